"""Page tables, CSR and slots say the same thing; splitting keeps every token where it was."""

import pytest
import torch
from attn_core.cache import page_table as pt
from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import BatchError, UnsupportedError
from hypothesis import given
from hypothesis import strategies as st

lengths = st.lists(st.integers(0, 40), max_size=6)
sizes = st.sampled_from([1, 2, 4, 8])


def make(lens, page_size, seed=0):
    """Page lists of scattered distinct pages, by plain Python."""
    counts = [-(-n // page_size) for n in lens]
    ids = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    return [[ids.pop() for _ in range(c)] for c in counts]


def slots_of(rows, lens, page_size):
    return [
        [r[i // page_size] * page_size + i % page_size for i in range(n)]
        for r, n in zip(rows, lens, strict=True)
    ]


@given(lengths, sizes)
def test_csr(lens, page_size):
    rows = make(lens, page_size)
    table, seq_lens = pt.pad_page_table(rows), torch.tensor(lens, dtype=torch.int32)
    width = max(map(len, rows), default=0)
    assert table.tolist() == [r + [0] * (width - len(r)) for r in rows]
    csr = pt.to_csr(table, seq_lens, page_size)
    flat = [p for r in rows for p in r]
    assert csr.indptr.tolist() == [sum(map(len, rows[:i])) for i in range(len(rows) + 1)]
    assert csr.indices.tolist() == flat
    assert csr.last_page_len.tolist() == [(n - 1) % page_size + 1 if n else 0 for n in lens]
    assert {t.dtype for t in (csr.indptr, csr.indices, csr.last_page_len)} == {torch.int32}
    assert csr.seq_lens(page_size).tolist() == lens


@given(lengths, sizes, st.integers(0, 5))
def test_a_bound_gives_the_same_with_a_tail_of_the_dummy(lens, page_size, more):
    rows = make(lens, page_size)
    table, seq_lens = pt.pad_page_table(rows, width=3), torch.tensor(lens, dtype=torch.int32)
    exact = pt.to_csr(table, seq_lens, page_size)
    n = exact.indices.shape[0]
    bound = pt.to_csr(table, seq_lens, page_size, num_pages=n + more)
    assert torch.equal(bound.indices[:n], exact.indices)
    assert bound.indices[n:].tolist() == [0] * more
    assert torch.equal(bound.indptr, exact.indptr)


@given(lengths, sizes)
def test_slots(lens, page_size):
    rows = make(lens, page_size)
    table = pt.pad_page_table(rows)
    want = slots_of(rows, lens, page_size)
    spelled = pt.slot_table(table, page_size)
    assert spelled.dtype == torch.int64
    assert [r[:n] for r, n in zip(spelled.tolist(), lens, strict=True)] == want
    # kernel pages of any size that divides the page name the same tokens
    for p in (p for p in (1, 2, 4, 8) if page_size % p == 0):
        split = pt.split_pages(table, page_size, p)
        assert split.dtype == torch.int32
        assert torch.equal(pt.slot_table(split, p), spelled)


def test_slot_table_is_cut_to_a_length():
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    slots = pt.slot_table(table, 4, max_len=5)
    assert slots.tolist() == [[12, 13, 14, 15, 4], [8, 9, 10, 11, 0]]


@pytest.mark.parametrize("fp4", [False, True])
def test_split_cache_names_the_same_memory(fp4):
    def paged(*tail):
        return torch.randn(5, 8, *tail).to(torch.float8_e4m3fn)

    cache = LayerCache(
        k=paged(2, 4),
        v=paged(2, 3),
        block_scales=(paged(2, 1), paged(2, 1)) if fp4 else None,
        index=paged(6),
        k_scale=2.0,
    )
    small = pt.split_cache(cache, 2)
    assert small.page_size == 2
    assert small.k_scale == 2.0
    assert len(small.parts()) == len(cache.parts())
    table = torch.tensor([[4, 1, 2]], dtype=torch.int32)
    split = pt.split_pages(table, 8, 2)
    for (big, _), (little, _) in zip(cache.parts(), small.parts(), strict=True):
        assert little.data_ptr() == big.data_ptr()
        big, little = big.view(torch.uint8), little.view(torch.uint8)
        assert torch.equal(big[table].flatten(1, 2), little[split].flatten(1, 2))
    assert pt.split_cache(cache, 8) is cache


def test_splitting_refuses_what_cannot_be():
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="kernel page 3 does not divide the pool's page 8"):
        pt.split_pages(table, 8, 3)
    heads_first = LayerCache(k=torch.zeros(2, 3, 8, 4), v=None, layout="HND")
    assert heads_first.page_size == 8
    with pytest.raises(UnsupportedError, match="layout HND: pages of 8 tokens cannot be split"):
        pt.split_cache(heads_first, 4)
    with pytest.raises(UnsupportedError, match="kernel page 16"):
        pt.split_cache(heads_first, 16)
    both = torch.zeros(2, 2, 8, 3, 4)
    stacked = LayerCache(k=both[:, 0], v=both[:, 1])
    assert pt.kernel_pages(stacked.k, 8) is stacked.k
    with pytest.raises(UnsupportedError, match=r"strides \[192, 12, 4, 1\]: the kernel reads"):
        pt.split_cache(stacked, 4)
    wide = torch.zeros(2, 8, 3, 8)[..., :4]
    assert pt.kernel_pages(wide, 4).shape == (4, 4, 3, 4)
    with pytest.raises(UnsupportedError, match="the kernel reads dense pages"):
        pt.kernel_pages(wide, 8, dense=True)


def test_padding_a_batch():
    table, lens = torch.tensor([[5, 6]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    padded, padded_lens = pt.pad_batch(table, lens, 3, fill_len=2)
    assert padded.tolist() == [[5, 6], [0, 0], [0, 0]]
    assert padded_lens.tolist() == [9, 2, 2]
    assert (padded.dtype, padded_lens.dtype) == (torch.int32, torch.int32)
    assert torch.equal(pt.pad_batch(table, lens, 1)[0], table)
    with pytest.raises(BatchError, match="1 requests do not fit a batch of 0"):
        pt.pad_batch(table, lens, 0)


@pytest.mark.parametrize(
    ("tokens", "page", "reused"),
    [(65, 64, 64), (32, 64, 0), (64, 64, 64), (63, 64, 0), (0, 16, 0), (7, 1, 7), (47, 16, 32)],
)
def test_prefix_reuse_counts_whole_pages(tokens, page, reused):
    assert pt.reusable_prefix(tokens, page) == reused


def test_nothing_syncs_where_a_bound_is_given():
    """A meta tensor has no values: reading one raises."""
    table = torch.zeros(3, 4, dtype=torch.int32, device="meta")
    lens = torch.zeros(3, dtype=torch.int32, device="meta")
    with pytest.raises(Exception, match="meta"):
        lens.tolist()
    csr = pt.to_csr(table, lens, 16, num_pages=12)
    assert csr.indices.shape == (12,)
    assert csr.seq_lens(16).shape == (3,)
    assert pt.slot_table(table, 16, max_len=50).shape == (3, 50)
    assert pt.split_pages(table, 16, 4).shape == (3, 16)
    assert pt.pad_batch(table, lens, 8)[0].shape == (8, 4)
