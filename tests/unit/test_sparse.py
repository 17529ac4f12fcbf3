"""Sparse MLA in the contract: index keys in the pool, the rule of dense passes, what is refused."""

import pytest
import torch
from attn_core.cache.layer_cache import LayerCache
from attn_core.cache.page_table import split_cache
from attn_core.cache.pool import KVPool
from attn_core.errors import BatchError, UnsupportedError, UsageError
from attn_core.ops.index import read_index, write_index
from attn_core.ops.kv import copy_slots
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.contract_checks import refuse_layer
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer

PAGE, PAGES, DIM, TOPK = 16, 9, 8, 32
SPEC = load_plugins().get("torch_native")
ROWS = {row.kind: row for row in SPEC.capabilities if row.device == "cpu"}


def layer(layer_id=0, topk=TOPK):
    return AttentionLayer(
        layer_id=layer_id, num_q_heads=2, num_kv_heads=1, head_dim=48, v_head_dim=32, scale=0.1,
        index_topk=topk,
    )  # fmt: skip


def pool(index_dtype="bf16", **options):
    options = {"page_size": PAGE, "index_dim": DIM, **options}
    return KVPool(
        [layer(0), layer(1)], num_pages=PAGES, kv_cache_dtype="fp32", kind="dsa",
        index_dtype=index_dtype, **options,
    )  # fmt: skip


def keys(n, seed=0):
    return torch.randn(n, DIM, generator=torch.Generator().manual_seed(seed))


SLOTS = torch.tensor([PAGE, 3 * PAGE + 5, 2, 8 * PAGE + 15])


def test_bf16_index_keys_are_stored_as_they_are():
    cache = pool().layer(0)
    new = keys(4).bfloat16()
    write_index(cache, new, SLOTS)
    assert torch.equal(cache.index[SLOTS // PAGE, SLOTS % PAGE], new)
    assert torch.equal(read_index(cache, SLOTS, torch.float32), new.float())


def test_fp8_index_keys_lie_planar():
    """Byte for byte: the values of a page's tokens, then their float32 scales."""
    cache = pool("fp8_e4m3").layer(0)
    assert cache.index.shape == (PAGES, PAGE * (DIM + 4))
    new = keys(4) * torch.tensor([1e-6, 1.0, 300.0, 7.0])[:, None]
    write_index(cache, new, SLOTS)
    for key, slot in zip(new, SLOTS.tolist(), strict=True):
        page, offset = cache.index[slot // PAGE], slot % PAGE
        scale = max(key.abs().max(), torch.tensor(1e-4)) * (1 / 448)
        values = page[offset * DIM : (offset + 1) * DIM].view(torch.float8_e4m3fn)
        stored = page[PAGE * DIM + 4 * offset :][:4].view(torch.float32)
        assert torch.equal(stored[0], scale)
        assert torch.equal(values.float(), (key / scale).to(torch.float8_e4m3fn).float())
        read = read_index(cache, torch.tensor([[slot]]), torch.float32)
        assert torch.equal(read[0, 0], values.float() * scale)
    unwritten = torch.ones(PAGES * PAGE, dtype=torch.bool)
    unwritten[SLOTS] = False
    everything = read_index(cache, torch.arange(PAGES * PAGE), torch.float32)
    assert not everything[unwritten].any()


@pytest.mark.parametrize("index_dtype", ["bf16", "fp8_e4m3"])
def test_index_keys_are_copied_with_their_tokens(index_dtype):
    cache = pool(index_dtype).layer(0)
    everywhere = torch.arange(PAGES * PAGE)
    write_index(cache, keys(len(everywhere)) * (1 + everywhere[:, None]), everywhere)
    want = read_index(cache, everywhere, torch.float32)
    src, dst = torch.tensor([20, 21, 40]), torch.tensor([21, 22, 130])
    want[dst] = want[src]
    copy_slots(cache, src, dst)
    assert torch.equal(read_index(cache, everywhere, torch.float32), want)


@pytest.mark.parametrize(("index_dtype", "per_token"), [("bf16", 2 * DIM), ("fp8_e4m3", DIM + 4)])
def test_memory_of_index_keys(index_dtype, per_token):
    asked = {
        "page_size": PAGE, "kv_cache_dtype": "fp32", "kind": "dsa", "index_dim": DIM,
        "index_dtype": index_dtype,
    }  # fmt: skip
    latents = PAGE * 48 * 4
    page = KVPool.bytes_per_page([layer(0), layer(1)], **asked)
    assert page == 2 * (latents + PAGE * per_token)
    assert pool(index_dtype).nbytes == PAGES * page
    shared = KVPool.bytes_per_page([layer(0), layer(1)], index_layers={1}, **asked)
    assert shared == 2 * latents + PAGE * per_token


def test_a_layer_that_shares_a_selection_stores_no_index_keys():
    caches = pool(index_layers={0})
    assert caches.layer(0).index is not None
    with pytest.raises(UnsupportedError, match=r"no index keys: .* index_layers"):
        write_index(caches.layer(1), keys(4), SLOTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index_dtype": "fp4"}, "index_dtype 'fp4' .expected fp32 or fp16 or bf16 or fp8"),
        ({"index_dtype": "fp8_e4m3", "index_dim": 6}, "index_dim 6 in fp8_e4m3 .* multiple of 4"),
        ({"index_dim": -1}, "index_dim -1"),
    ],
)
def test_index_keys_that_cannot_be_stored(options, message):
    with pytest.raises(UsageError, match=message):
        pool(**options)


def test_planar_pages_are_not_split():
    """Pages of 16 tokens are no two pages of 8 where the scales follow all values."""
    assert split_cache(pool().layer(0), 8).index.shape == (2 * PAGES, 8, DIM)
    assert split_cache(pool("fp8_e4m3").layer(0), 8).index is None


@pytest.mark.parametrize("index_dtype", ["bf16", "fp8_e4m3"])
def test_padding_writes_no_index_keys(index_dtype):
    caches = [pool(index_dtype).layer(0) for _ in range(2)]
    new, padded = keys(4), torch.tensor([*SLOTS[:2], -1, -7])
    write_index(caches[0], new, padded)
    write_index(caches[1], new[:2], SLOTS[:2])
    assert torch.equal(*(raw(cache) for cache in caches))


def raw(cache):
    return cache.index.view(torch.uint8)


class TestWriter:
    """Triton's writer, on a GPU or in its interpreter, against torch's."""

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @pytest.fixture(autouse=True)
    def _triton(self):
        pytest.importorskip("triton")

    def on_device(self, x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device).copy_(x)

    def check(self, new, slots, index_dtype="fp8_e4m3", dim=DIM):
        from attn_core.ops.triton.index import write_index as write

        want, got = (pool(index_dtype, index_dim=dim).layer(0) for _ in range(2))
        raw(want).fill_(0xA5)
        moved = LayerCache(k=got.k.to(self.device), v=None, index=want.index.to(self.device))
        write_index(want, new, slots)
        write(moved, self.on_device(new), self.on_device(slots))
        assert torch.equal(raw(moved).cpu(), raw(want))
        return moved

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("index_dtype", ["bf16", "fp16", "fp8_e4m3"])
    def test_both_write_the_same_bits(self, dtype, index_dtype):
        """Of more keys than a program writes, some huge, tiny, zero or infinite."""
        rng = torch.Generator().manual_seed(1)
        slots = torch.randperm(PAGES * PAGE, generator=rng)[:37]
        new = torch.randn(37, 128, generator=rng) * 2.0 ** (torch.arange(37)[:, None] - 20.0)
        new[3], new[4, 7], new[5, 0] = 0, torch.inf, -torch.inf
        new[6] = new[6] / new[6].abs().max() * 1e-4  # the smallest that has a scale of its own
        self.check(new.to(dtype).nan_to_num(posinf=torch.inf), slots, index_dtype, 128)

    def test_what_is_no_number_stays_in_its_key(self):
        new = keys(4)
        new[1, 3] = torch.nan
        cache = self.check(new.nan_to_num(), SLOTS)
        from attn_core.ops.triton.index import write_index as write

        write(cache, self.on_device(new), self.on_device(SLOTS))
        read = read_index(cache, self.on_device(SLOTS), torch.float32)
        assert read[1].isnan().all()
        assert read[[0, 2, 3]].isfinite().all()

    def test_padding_of_any_strides_and_widths(self):
        slots = torch.tensor([33, -1, 4, -9, 143])
        self.check(keys(5), slots)
        self.check(torch.randn(10, 2 * 12)[::2, ::2], slots.repeat_interleave(2)[::2], dim=12)
        self.check(torch.randn(5, 40)[:, 1:37], slots, "bf16", dim=36)
        self.check(torch.randn(8, 5).T, slots)
        self.check(keys(0), slots[:0])

    def test_another_pass_and_another_pool(self):
        """What is kept of a cache serves passes of other lengths, not a pool that has moved."""
        cache = self.check(keys(4), SLOTS)
        from attn_core.ops.triton.index import write_index as write

        want = pool("fp8_e4m3").layer(0)
        raw(want).copy_(raw(cache))
        more = torch.arange(20, 31)
        for new, slots in ((keys(11, 1), more), (keys(2, 2), SLOTS[:2])):
            write_index(want, new, slots)
            write(cache, self.on_device(new), self.on_device(slots))
        assert torch.equal(raw(cache).cpu(), raw(want))
        with pytest.raises(UsageError, match=r"index keys \[4, 8\] for slots .*\[3\]"):
            write(cache, self.on_device(keys(4)), self.on_device(SLOTS[:3]))
        bare = LayerCache(k=cache.k, v=None)
        with pytest.raises(UnsupportedError, match="no index keys"):
            write(bare, self.on_device(keys(4)), self.on_device(SLOTS))


class Session:
    """A dispatcher of torch_native over two layers, the second without an indexer."""

    def __init__(self, kind="dsa", topk=TOPK, **options):
        caches = pool(index_layers={0}, **options)
        self.layers = [layer(0, topk), layer(1, topk)]
        config = BackendConfig(
            name="torch_native", row=ROWS[kind], layers=tuple(self.layers), page_size=PAGE,
            dtype="fp32", kv_cache_dtype="fp32", device=torch.device("cpu"), num_draft_tokens=4,
        )  # fmt: skip
        backend = create_backend(SPEC, config)
        roles = ("prefill", "decode", "verify", "draft")
        self.dispatcher, self.caches = (
            HybridDispatcher(dict.fromkeys(roles, backend), caches),
            caches,
        )

    def batch(self, mode, new, length):
        spec = SpecInfo(topk=1, num_draft_tokens=4) if mode is ForwardMode.TARGET_VERIFY else None
        return ForwardBatch.build(
            mode, query_lens=[new], seq_lens=[length], page_size=PAGE, spec=spec,
            page_table=torch.arange(1, PAGES, dtype=torch.int32)[None],
        )  # fmt: skip

    def select(self, batch, **changes):
        n = batch.num_tokens
        asked = {
            "q_index": torch.randn(n, 3, DIM), "k_index": keys(n), "weights": torch.rand(n, 3),
            **changes,
        }  # fmt: skip
        metadata = self.dispatcher.init_forward_metadata(batch)
        return self.dispatcher.index_topk(*asked.values(), self.layers[0], batch, metadata)

    def attend(self, batch, selection, layer=0):
        q, k = torch.randn(batch.num_tokens, 2, 48), torch.randn(batch.num_tokens, 1, 48)
        metadata = self.dispatcher.init_forward_metadata(batch)
        return self.dispatcher.forward(
            q, k, None, self.layers[layer], batch, metadata, topk_indices=selection
        )


M = ForwardMode


@pytest.mark.parametrize(
    ("mode", "new", "length", "dense"),
    [
        (M.EXTEND, 5, TOPK, True),
        (M.EXTEND, 5, TOPK + 1, False),
        (M.DECODE, 1, 7, False),
        (M.TARGET_VERIFY, 4, 9, False),
        (M.DRAFT_EXTEND, 2, 9, False),
        (M.MIXED, 5, 9, False),
    ],
)
def test_only_a_short_extend_is_dense(mode, new, length, dense):
    session = Session()
    batch = session.batch(mode, new, length)
    chosen = session.select(batch)
    assert (chosen is None) == dense
    # either way the new index keys are in the cache
    slots = batch.views["full"].out_cache_loc
    written = read_index(session.caches.layer(0), slots, torch.float32)
    assert torch.equal(written, keys(new).bfloat16().float())
    for i in (0, 1):  # the second layer shares the selection
        assert session.attend(batch, chosen, layer=i).isfinite().all()


def test_without_a_selection_a_long_pass_is_refused():
    session = Session()
    batch = session.batch(M.DECODE, 1, TOPK + 1)
    with pytest.raises(BatchError, match=r"layer 1 attends to 32 keys .* up to 33 .* topk_indices"):
        session.attend(batch, None, layer=1)
    session.attend(session.batch(M.DECODE, 1, TOPK), None)


def test_an_idle_pass_selects_nothing():
    session = Session()
    batch = ForwardBatch.build(
        M.IDLE, query_lens=[], seq_lens=[], page_size=PAGE,
        page_table=torch.zeros(0, 1, dtype=torch.int32),
    )  # fmt: skip
    assert session.select(batch) is None


def test_a_query_without_keys_gives_zeros():
    session = Session()
    batch = session.batch(M.EXTEND, 3, 40)
    none = torch.full((3, TOPK), -1, dtype=torch.int32)
    metadata = session.dispatcher.init_forward_metadata(batch)
    out, lse = session.dispatcher.forward(
        torch.randn(3, 2, 48), torch.randn(3, 1, 48), None, session.layers[0], batch, metadata,
        topk_indices=none, return_lse=True,
    )  # fmt: skip
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_index": torch.zeros(4, 3, DIM)}, r"q_index \[4, 3, 8\] .expected \[5, index heads"),
        (
            {"weights": torch.zeros(5, 2)},
            r"weights torch.float32 \[5, 2\] .expected float32 \[5, 3",
        ),
        ({"weights": torch.zeros(5, 3).half()}, r"weights torch.float16"),
        ({"k_index": torch.zeros(5, 4)}, r"k_index \[5, 4\] .expected \[5, 8\]"),
    ],
)
def test_indexer_inputs_that_do_not_fit(changes, message):
    session = Session()
    with pytest.raises(BatchError, match=message):
        session.select(session.batch(M.EXTEND, 5, 40), **changes)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (torch.zeros(5, 4, dtype=torch.int64), r"torch.int64 \[5, 4\] .expected int32 \[5, keys\]"),
        (torch.zeros(5, 0, dtype=torch.int32), r"torch.int32 \[5, 0\] .expected .* 1 key or more"),
        (torch.zeros(4, 4, dtype=torch.int32), r"torch.int32 \[4, 4\]"),
        (torch.zeros(5, 8, dtype=torch.int32)[:, ::2], "stride 2 in their last"),
    ],
)
def test_selections_that_do_not_fit(selection, message):
    session = Session()
    with pytest.raises(BatchError, match=message):
        session.attend(session.batch(M.EXTEND, 5, 40), selection)


def test_other_rows_refuse_the_layer():
    config = BackendConfig(
        name="fa3", row=ROWS["mla"], layers=(), page_size=PAGE, dtype="bf16",
        kv_cache_dtype="bf16", device=torch.device("cpu"),
    )  # fmt: skip
    message = "layer 0 attends to 32 keys per query, the chosen row of fa3 is of kind 'mla'"
    with pytest.raises(UnsupportedError, match=message):
        refuse_layer(config, layer())
    refuse_layer(config, layer(topk=None))


def test_a_layer_without_index_topk_has_no_indexer():
    session = Session(topk=None)
    with pytest.raises(UnsupportedError, match="layer 0 has index_topk None"):
        session.select(session.batch(M.EXTEND, 5, 40))
    with pytest.raises(UsageError, match="index_topk 0"):
        layer(topk=0)
