"""flex_attention: what it declares, and that nothing is compiled once it has been created."""

import dataclasses
import random

import pytest
import torch
from attn_core.backends.flex_attention import backend as module
from attn_core.backends.flex_attention import kernel as kernels
from attn_core.cache.page_table import slot_table
from attn_core.cache.pool import KVPool
from attn_core.errors import BackendError, BatchError, UnsupportedError
from attn_core.ops.kv import read_kv, write_kv
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.layer import AttentionLayer
from attn_core.testing import BackendSuite
from torch.utils import _pytree as pytree

SPEC = load_plugins().get("flex_attention")
ROW = next(row for row in SPEC.capabilities if row.device == "cpu")
HEADS, KV_HEADS, DIM = 4, 2, 16
FULL = AttentionLayer(
    layer_id=0, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, v_head_dim=DIM, scale=0.25
)
WINDOW = dataclasses.replace(FULL, layer_id=1, view="window", sliding_window=21)
CAPPED = dataclasses.replace(FULL, layer_id=2, logit_cap=1.5)
LAYERS = (FULL, WINDOW, CAPPED)
PAGE = 16


@pytest.mark.long  # compiles some twenty shapes
class TestFlexAttention(BackendSuite):
    name = "flex_attention"
    reduced = True


def create(layers=LAYERS, *, page_size=PAGE, store="fp32", row=ROW):
    config = BackendConfig(
        name="flex_attention",
        row=row,
        layers=layers,
        page_size=page_size,
        dtype="fp32",
        kv_cache_dtype=store,
        device=torch.device("cpu"),
    )
    return create_backend(SPEC, config)


class World:
    """A pool whose unowned pages hold NaN, with requests that grow in it, and the right answers."""

    def __init__(self, page_size, store, pages, *, seed=0):
        self.page_size, self.pages, self.store = page_size, pages, store
        self.rng, self.torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
        self.pool = KVPool(LAYERS, num_pages={"full": pages, "window": pages},
                           page_size=page_size, kv_cache_dtype=store)  # fmt: skip
        self.free = list(range(1, pages))
        self.rng.shuffle(self.free)
        self.tables, self.lens = [], []
        for layer in LAYERS:
            for pool in (self.pool.layer(layer.layer_id).k, self.pool.layer(layer.layer_id).v):
                pool.view(torch.uint8).fill_(0x7F if store != "fp32" else 0xFF)

    def randn(self, *size):
        return torch.randn(size, generator=self.torch_rng)

    def batch(self, mode, rows, news):
        """Give the requests `rows` so many new tokens each."""
        for row, n in zip(rows, news, strict=True):
            while row >= len(self.lens):
                self.lens.append(0)
                self.tables.append([])
            self.lens[row] += n
            while len(self.tables[row]) * self.page_size < self.lens[row]:
                page = self.free.pop()
                self.tables[row].append(page)
                for cache in map(self.pool.layer, range(len(LAYERS))):
                    for pool in (cache.k, cache.v):  # the tails are finite, and far from zero
                        pool[page] = torch.full(pool[page].shape, 400.0).to(pool.dtype)
        width = max(len(self.tables[r]) for r in rows) + self.rng.randrange(4)
        table = torch.randint(0, self.pages, (len(rows), width), generator=self.torch_rng).int()
        behind = table.clone()  # what the window has left behind may be any page
        for i, row in enumerate(rows):
            own = torch.tensor(self.tables[row], dtype=torch.int32)
            table[i, : len(own)] = own
            first = max(0, self.lens[row] - news[i] - WINDOW.sliding_window + 1) // self.page_size
            behind[i, first : len(own)] = own[first:]
        lens = [self.lens[r] for r in rows]
        view = CacheView.build(
            page_table=behind, page_size=self.page_size, seq_lens=lens, new_lens=news
        )
        return ForwardBatch.build(
            mode,
            query_lens=news,
            seq_lens=lens,
            page_table=table,
            page_size=self.page_size,
            views={"window": view},
        ), slot_table(table, self.page_size)

    def check(self, backend, mode, rows, news, *, strided=False):
        """Run a pass over all layers; compare with a float64 softmax per query."""
        batch, slots = self.batch(mode, rows, news)
        metadata = backend.init_forward_metadata(batch)
        total = sum(news)
        run = backend.forward
        for layer in LAYERS:
            cache = self.pool.layer(layer.layer_id)
            k, v = (self.randn(total, KV_HEADS, DIM) for _ in range(2))
            write_kv(cache, k, v, batch.views["full"].out_cache_loc)
            q = self.randn(total, HEADS, 3 * DIM)[..., :DIM] if strided else self.randn(
                total, HEADS, DIM)  # fmt: skip
            out = torch.full((total, HEADS, DIM), torch.nan)
            actual = run(q, k, v, layer, cache, batch, metadata, out=out)
            assert actual is out
            at = 0
            for i, n in enumerate(news):
                want = self.answer(layer, cache, slots[i], self.lens[rows[i]], q[at : at + n])
                torch.testing.assert_close(actual[at : at + n], want, atol=3e-6, rtol=2e-5)
                at += n

    @staticmethod
    def answer(layer, cache, slots, length, q):
        k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1)
                for x in read_kv(cache, slots[:length], torch.float32))  # fmt: skip
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * layer.scale
        if layer.logit_cap:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        i = torch.arange(length - len(q), length)[:, None]
        j = torch.arange(length)
        hidden = j > i
        if layer.sliding_window:
            hidden |= j <= i - layer.sliding_window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).float()


@pytest.mark.parametrize("steps", [28, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("page_size", "store"),
    [
        (16, "fp32"),
        *(pytest.param(*x, marks=pytest.mark.long) for x in ((1, "fp32"), (24, "fp32"))),
        (64, "fp8_e4m3"),
    ],
    ids=lambda x: str(x),
)
def test_steps_are_right_and_compile_nothing(page_size, store, steps):
    """Requests come, are prefilled in chunks and grow; batches of 1 to 7, pools that grow."""
    backend = create(page_size=page_size, store=store)
    assert len(backend.kernels) == 2  # a window is no other shape, a soft cap is
    assert [len(k.compiled) for k in backend.kernels] == [1, 1]
    rng = random.Random(1)
    world = World(page_size, store, 2500 // page_size)
    for step in range(steps):
        if step % 40 in (0, 20):
            world = World(page_size, store, (2500 + 40 * step) // page_size, seed=step)
            world.check(backend, ForwardMode.EXTEND, [0, 1, 2], [1, 70, 33])
        alive = range(len(world.lens))
        rows = rng.sample(alive, rng.randint(1, len(alive)))
        if step % 10 == 3 and len(alive) < 7:
            rows, news = [*rows[:2], len(alive)], [*[1] * len(rows[:2]), rng.randint(1, 90)]
            world.check(backend, ForwardMode.MIXED, rows, news)
        elif step % 10 == 7:
            news = [rng.randint(0, 20) for _ in rows[1:]]
            world.check(backend, ForwardMode.EXTEND, rows, [1, *news], strided=True)
        else:
            with torch.inference_mode(step % 3 == 0), torch.set_grad_enabled(step % 3 == 1):
                world.check(backend, ForwardMode.DECODE, rows, [1] * len(rows))
    assert [len(k.compiled) for k in backend.kernels] == [1, 1]
    assert backend.compilations == 2
    assert create(page_size=page_size, store=store).kernels == backend.kernels


def test_a_pool_that_a_gpu_cannot_count_is_read_by_the_blocks_of_the_pass():
    backend = create()
    backend._most = 0  # as for 2^31 numbers on a GPU
    world = World(PAGE, "fp32", 64)
    world.check(backend, ForwardMode.EXTEND, [0, 1, 2], [40, 1, 17])
    world.check(backend, ForwardMode.DECODE, [2, 0], [1, 1])
    one = World(PAGE, "fp32", 64)
    one.check(backend, ForwardMode.EXTEND, [0], [1])


def test_heads_that_a_gpu_does_not_take_are_padded(monkeypatch):
    small = dataclasses.replace(FULL, head_dim=13, v_head_dim=5)
    q, k = torch.randn(9, HEADS, 13), torch.randn(9, KV_HEADS, 13)
    v = torch.randn(9, KV_HEADS, 5)
    batch = ForwardBatch.build(
        ForwardMode.EXTEND, query_lens=[9], seq_lens=[9], page_size=PAGE,
        page_table=torch.tensor([[1]], dtype=torch.int32),
    )  # fmt: skip
    actual = []
    for least in (1, 16):
        monkeypatch.setattr(module, "_CPU_DIM", least)
        backend = create((small,))
        pool = KVPool([small], num_pages=2, page_size=PAGE, kv_cache_dtype="fp32")
        for store in (pool.layer(0).k, pool.layer(0).v):
            store.zero_()
        write_kv(pool.layer(0), k, v, batch.views["full"].out_cache_loc)
        plan = backend.init_forward_metadata(batch)
        actual.append(backend.forward(q, k, v, small, pool.layer(0), batch, plan))
    torch.testing.assert_close(*actual, atol=1e-6, rtol=1e-5)


def test_a_model_that_registers_its_outputs_compiles_nothing():
    """transformers registers its classes with torch when a model's module is first imported."""
    backend, world = create(), World(PAGE, "fp32", 20)
    before = backend.compilations
    world.check(backend, ForwardMode.EXTEND, [0], [5])
    output = type("ModelOutput", (), {})
    pytree.register_pytree_node(output, lambda x: ([], None), lambda children, context: output())
    world.check(backend, ForwardMode.EXTEND, [0], [5])
    assert backend.compilations == before


def test_passes_without_queries_give_nothing():
    backend, world = create(), World(PAGE, "fp32", 20)
    table = torch.zeros(2, 1, dtype=torch.int32)
    batch = ForwardBatch.build(
        ForwardMode.EXTEND, query_lens=(0, 0), seq_lens=(3, 4), page_table=table, page_size=PAGE
    )
    metadata = backend.init_forward_metadata(batch)
    q = torch.zeros(0, HEADS, DIM)
    out = backend.forward(q, None, None, FULL, world.pool.layer(0), batch, metadata)
    assert out.shape == (0, HEADS, DIM)


@pytest.mark.parametrize("page_size", [16, 1])
def test_requests_without_queries_or_without_keys_are_skipped(page_size):
    backend, world = create(page_size=page_size), World(page_size, "fp32", 320 // page_size)
    world.check(backend, ForwardMode.EXTEND, [0, 1, 2], [0, 5, 0])
    world.check(backend, ForwardMode.EXTEND, [0, 1, 2], [1, 0, 1], strided=True)
    world.check(backend, ForwardMode.DECODE, [1], [1])


@pytest.fixture
def one_pass():
    backend, world = create(), World(PAGE, "fp32", 20)
    batch, _ = world.batch(ForwardMode.EXTEND, [0], [5])
    metadata = backend.init_forward_metadata(batch)
    q = torch.zeros(5, HEADS, DIM)
    return backend, (q, None, None, FULL, world.pool.layer(0), batch, metadata)


def test_lengths_on_the_device_alone_are_enough(one_pass):
    backend, args = one_pass
    q, cache, batch = torch.randn(5, HEADS, DIM), args[4], args[5]
    views = {k: dataclasses.replace(v, seq_lens_host=None) for k, v in batch.views.items()}
    bare = dataclasses.replace(batch, views=views, query_lens_host=None)
    outs = [
        backend.forward(q, None, None, FULL, cache, b, backend.init_forward_metadata(b))
        for b in (batch, bare)
    ]
    assert torch.equal(*outs)


def test_what_is_not_honoured_is_refused(one_pass):
    backend, args = one_pass
    with pytest.raises(UnsupportedError, match="no log-sum-exp"):
        backend.forward(*args, return_lse=True)
    with pytest.raises(UnsupportedError, match="topk_indices"):
        backend.forward(*args, topk_indices=torch.zeros(1))
    stranger = dataclasses.replace(FULL, layer_id=9, view="cross")
    with pytest.raises(BackendError, match=r"layer 9 \(view 'cross'\)"):
        backend.forward(*args[:3], stranger, *args[4:])
    for change in ({"is_causal": False}, {"is_cross": True}, {"sinks": torch.zeros(HEADS)}):
        with pytest.raises(UnsupportedError, match="layer 0 needs"):
            create((dataclasses.replace(FULL, **change),))
    drafts = ForwardBatch.build(
        ForwardMode.TARGET_VERIFY,
        query_lens=(2,),
        seq_lens=(9,),
        page_table=torch.ones(1, 1, dtype=torch.int32),
        page_size=PAGE,
        spec=SpecInfo(topk=1, num_draft_tokens=2),
    )
    with pytest.raises(UnsupportedError, match="no drafts"):
        backend.init_forward_metadata(drafts)


@pytest.fixture
def nothing_compiled():
    kernels.compiled_kernel.cache_clear()
    yield
    kernels.compiled_kernel.cache_clear()


def test_a_machine_that_cannot_compile_says_so_at_creation(nothing_compiled, monkeypatch):
    def no_compiler(graph, inputs):
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr(kernels, "lookup_backend", lambda name: no_compiler)
    with pytest.raises(UnsupportedError, match=r"No working C\+\+ compiler found.*torch_native"):
        create()


def test_without_torch_compile_creation_is_refused(nothing_compiled, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with pytest.raises(UnsupportedError, match="TORCHDYNAMO_DISABLE"):
        create((FULL,))


def test_block_masks_have_what_torch_2_8_wants(monkeypatch):
    """It refuses a mask without the blocks that the backward pass reads."""
    masks = []
    monkeypatch.setattr(
        kernels, "flex_attention", lambda *x, block_mask, **y: masks.append(block_mask)
    )
    inner = kernels._attend(
        kernels.KernelShape("cpu", torch.float32, 1, 16, 16, 0.25, None, 16, 48)
    )
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    q, k = torch.zeros(1, 1, 4, 16), torch.zeros(1, 16, 1, 16)
    inner(q, k, k, one, one, one[None], one[None], *[one] * 5)
    assert masks[0].q_num_blocks is not None
    assert masks[0].q_indices is not None


@pytest.mark.parametrize("pages", [(5, 6), (-1, 0), (2, 30)])
def test_pages_that_the_pool_has_not_are_refused(pages):
    """The compiled kernel would read what lies behind the pool."""
    pool = KVPool([FULL], num_pages=6, page_size=PAGE, kv_cache_dtype="fp32")
    backend = create((FULL,))
    batch = ForwardBatch.build(
        ForwardMode.EXTEND, query_lens=[1], seq_lens=[20],
        page_table=torch.tensor([pages], dtype=torch.int32), page_size=PAGE, writes=False,
    )  # fmt: skip
    plan = backend.init_forward_metadata(batch)
    q = torch.randn(1, HEADS, DIM)
    with pytest.raises(BatchError, match="of a pool of 6 blocks of keys"):
        backend.forward(q, None, None, FULL, pool.layer(0), batch, plan)


def test_tokens_behind_the_last_request_are_padding():
    pool = KVPool([FULL], num_pages=6, page_size=PAGE, kv_cache_dtype="fp32")
    backend = create((FULL,))
    view = CacheView(
        page_table=torch.tensor([[1]], dtype=torch.int32),
        seq_lens=torch.tensor([4], dtype=torch.int32),
        out_cache_loc=None,
        max_seq_len=4,
    )
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
        positions=torch.zeros(5, dtype=torch.int64), max_q_len=5, views={"full": view},
    )  # fmt: skip
    k = torch.randn(4, KV_HEADS, DIM)
    write_kv(pool.layer(0), k, k, torch.arange(PAGE, PAGE + 4))
    plan, q = backend.init_forward_metadata(batch), torch.randn(5, HEADS, DIM)
    got = backend.forward(q, None, None, FULL, pool.layer(0), batch, plan)
    k = k.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("qhd,khd->hqk", q[:2], k) * FULL.scale
    scores[:, 0, 3] = -torch.inf
    torch.testing.assert_close(got[:2], torch.einsum("hqk,khd->qhd", scores.softmax(-1), k))
