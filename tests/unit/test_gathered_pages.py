"""FP8 pages of a pass, decoded by Triton: the tokens and the slots that torch's operators give."""

import pytest
import torch

pytest.importorskip("triton")

from attn_core.cache.pool import KVPool
from attn_core.ops.kv import read_kv, write_kv
from attn_core.ops.triton.gather import Count, gather_pages
from attn_core.runtime import sparse
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer

PAGES = 40
LAYER = AttentionLayer(
    layer_id=0, num_q_heads=2, num_kv_heads=1, head_dim=328, v_head_dim=256, scale=0.1
)


def filled(page_size):
    """Return a cache whose tokens differ in size, and some of which are NaN."""
    pool = KVPool(
        [LAYER], num_pages=PAGES, page_size=page_size, kv_cache_dtype="fp8_e4m3", kind="dsa"
    )
    rng, tokens = torch.Generator().manual_seed(page_size), PAGES * page_size
    x = torch.randn(tokens, 1, 328, generator=rng)
    x *= 2.0 ** torch.randint(-12, 12, (tokens, 1, 1), generator=rng)
    x[7::13, 0, 130] = torch.nan
    cache = pool.layer(0)
    write_kv(cache, x, None, torch.arange(tokens))
    return cache


def slots_of(table, lengths, page_size, topk):
    """Select keys of each request, its first and its last one among them, then nothing."""
    rng = torch.Generator().manual_seed(0)
    chosen = torch.full((len(lengths), topk), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        keys = torch.randperm(length, generator=rng)[: topk - 2]
        keys = torch.cat([keys, torch.tensor([0, length - 1])]) if length else keys
        result = table[row][keys // page_size] * page_size + keys % page_size
        chosen[row, : len(keys)] = result.int()
    return chosen


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tokens_are_decoded_and_found(page_size, dtype):
    cache, lengths = filled(page_size), [2 * page_size + 1, page_size, 3 * page_size, 0]
    order = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(1)) + 1
    table = order[:20].view(4, 5).int()
    table[2, :2] = table[0, :2]  # a common prefix; of two copies either serves
    table[3] = PAGES + 1000  # of a request without keys no page is read
    table = torch.cat([table, torch.full((4, 3), PAGES + 7, dtype=torch.int32)], 1)[:, :6]
    topk = 1500 if page_size == 64 else 21
    chosen = slots_of(table, lengths, page_size, topk)
    longest, lens = max(lengths), torch.tensor(lengths, dtype=torch.int32)
    latents, result = gather_pages(cache, table, lens, longest, chosen, dtype)
    assert latents.shape == (4 * 3, page_size, 1, 328)
    assert latents.dtype is dtype
    used = chosen >= 0
    assert torch.equal(result >= 0, used)
    assert torch.equal(result[~used], chosen[~used])
    want, _ = read_kv(cache, chosen[used].long(), dtype)
    actual = latents.view(-1, 1, 328)[result[used].long()]
    assert torch.equal(actual.isnan(), want.isnan())
    assert torch.equal(actual.nan_to_num(), want.nan_to_num())
    assert want.isnan().any() == (chosen[used] % 13 == 7).any()


def test_a_pass_takes_it_where_triton_runs(monkeypatch):
    """The operators of torch and the kernels bring the same selected tokens."""
    cache, size = filled(16), 16
    table = torch.arange(1, 13, dtype=torch.int32).view(2, 6)
    view = CacheView(
        page_table=table, seq_lens=torch.tensor([70, 33], dtype=torch.int32), out_cache_loc=None,
        max_seq_len=70,
    )  # fmt: skip
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32),
        positions=torch.tensor([69, 32]), max_q_len=1, views={"full": view},
    )  # fmt: skip
    chosen = slots_of(table, [70, 33], size, 24)
    brought = []
    for triton in (False, True):
        sparse._gatherer.cache_clear()
        monkeypatch.setattr(sparse, "has_triton", lambda device, triton=triton: triton)
        latents, result = sparse.gather_pages(LAYER, cache, batch, chosen, torch.bfloat16)
        brought.append((latents.flatten(0, 1)[result.long()], result < 0))
    sparse._gatherer.cache_clear()
    assert (cache.launchers.keys() - {"write"}) != set()
    (want, none), (actual, none_too) = brought
    assert torch.equal(none, none_too)
    assert torch.equal(actual[~none].nan_to_num(), want[~none].nan_to_num())


@pytest.mark.parametrize("topk", [1500, 24])
def test_slots_are_counted_while_they_are_found(topk):
    """As count_slots does, also for one query more than there are."""
    cache, table = filled(16), torch.arange(1, 37, dtype=torch.int32).view(3, 12)
    lengths = [190, 5, 0]
    lens = torch.tensor(lengths, dtype=torch.int32)
    chosen = slots_of(table, lengths, 16, topk)
    _, alone = gather_pages(cache, table, lens, 190, chosen, torch.bfloat16)
    work = torch.full((3, 4), -7, dtype=torch.int32)
    count = Count(work, work.data_ptr(), 5)
    for _ in range(2):
        _, result = gather_pages(cache, table, lens, 190, chosen, torch.bfloat16, count=count)
        assert torch.equal(result, alone)
        assert work[0].tolist() == [*(chosen >= 0).sum(1).tolist(), 0]
        assert work[1].tolist() == [0, 1, 2, 3]
        assert work[2].tolist() == [0, 5, 10, 15]
