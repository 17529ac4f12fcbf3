"""dual_chunk_flash_attn over the emulated FlashAttention-3: the suite, its calls, its graphs."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from attn_core import (
    AttentionLayer,
    BackendConfig,
    DualChunk,
    ForwardBatch,
    ForwardMode,
    GraphRunner,
    HybridDispatcher,
    KVPool,
    create_backend,
    load_plugins,
)
from attn_core.testing import BackendSuite

SGL = {"sglang-kernel": "0.4.5"}


class TestDualChunkFlashAttn(BackendSuite):
    name = "dual_chunk_flash_attn"
    kinds = ("mha",)
    device = "cuda:sm90"
    on = "cpu"
    libraries: ClassVar = SGL
    passes = 10
    reduced = True


@pytest.mark.long
class TestWhole(TestDualChunkFlashAttn):
    """Every point of every case, as the evidence counts them."""

    reduced = False


@pytest.mark.usefixtures("ampere")
@pytest.mark.long  # the same wrapper again
class TestAmpere(BackendSuite):
    name = "dual_chunk_flash_attn"
    kinds = ("mha",)
    device = "cuda:sm80"
    on = "cpu"
    libraries: ClassVar = SGL
    passes = 10
    reduced = True


@pytest.fixture
def ampere(vendor, monkeypatch):
    import fa3_leaf

    monkeypatch.setattr(fa3_leaf, "ARCH", 80)


LAYER = AttentionLayer(
    layer_id=0,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    scale=0.125,
    dual_chunk=DualChunk(chunk_size=80, local_size=16),
)


@pytest.fixture
def lengths(monkeypatch):
    """Record the lengths and the order of every call of the library."""
    from sgl_kernel import flash_attn

    made, real = [], flash_attn.flash_attn_with_kvcache

    def call(*positional, **named):
        made.append((named["cache_seqlens"].tolist(), named["causal"]))
        return real(*positional, **named)

    import functools

    monkeypatch.setattr(flash_attn, "flash_attn_with_kvcache", functools.wraps(real)(call))
    return made


def created(layer=LAYER):
    spec = load_plugins().get("dual_chunk_flash_attn")
    row = next(r for r in spec.capabilities if "sm90" in r.archs)
    config = BackendConfig(
        name=spec.name, row=row, layers=(layer,), page_size=16, dtype="bf16",
        kv_cache_dtype="bf16", device=torch.device("cpu"), arch="sm90",
    )  # fmt: skip
    return create_backend(spec, config)


def pool_of(layer=LAYER):
    return KVPool([layer], num_pages=128, page_size=16, kv_cache_dtype="bf16")


def decoding(seq_lens):
    table = torch.arange(1, 1 + 20 * len(seq_lens), dtype=torch.int32).view(-1, 20)
    return ForwardBatch.build(
        ForwardMode.DECODE, query_lens=[1] * len(seq_lens), seq_lens=seq_lens, page_table=table,
        page_size=16,
    )  # fmt: skip


def decode(seq_lens, *, layer=LAYER, max_seq_len=None):
    backend, pool, batch = created(layer), pool_of(layer), decoding(seq_lens)
    view = batch.views["full"]
    if max_seq_len is not None:
        view = replace(view, max_seq_len=max_seq_len, seq_lens_host=None)
        batch = replace(batch, views={"full": view})
    metadata = backend.init_forward_metadata(batch)
    q = torch.zeros(len(seq_lens), *layer.query_shape, dtype=torch.bfloat16)
    return backend.forward(q, None, None, layer, pool.layer(0), batch, metadata)


def test_each_query_meets_the_keys_of_its_chunks(lengths):
    decode([1, 64, 65, 200])
    assert lengths == [
        ([1, 64, 1, 8], True),
        ([0, 0, 64, 64], False),
        ([0, 0, 0, 128], False),
    ]


@pytest.mark.parametrize(("longest", "calls"), [(64, 1), (65, 2), (128, 2), (129, 3)])
def test_short_batches_have_fewer_calls(lengths, longest, calls):
    decode([1, longest])
    assert len(lengths) == calls


def test_what_a_graph_may_replay_has_all_calls(lengths):
    decode([1, 5], max_seq_len=320)
    assert lengths == [([1, 5], True), ([0, 0], False), ([0, 0], False)]


def test_a_graph_replays_requests_of_any_number_of_chunks():
    """Its calls are those of the capture, although a pass of shorter requests needs fewer."""
    backend, pool = created(), pool_of()
    dispatcher = HybridDispatcher({"prefill": backend, "decode": backend}, pool)
    torch.manual_seed(0)
    for pages in (pool.layer(0).k, pool.layer(0).v):
        pages.copy_(torch.randn(pages.shape))

    def step(batch, plan, q, k, v):
        return dispatcher.forward(q, k, v, LAYER, batch, plan)

    q, new = torch.randn(2, *LAYER.query_shape).bfloat16(), torch.randn(2, 2, 2, 64).bfloat16()
    runner = GraphRunner(dispatcher, batch_sizes=[3], max_seq_len=320)
    runner.capture(ForwardMode.DECODE, step, inputs=(q, *new))
    for seq_lens in ([1, 5], [64, 65], [300, 2], [128, 129]):
        batch = decoding(seq_lens)
        right = step(batch, dispatcher.init_forward_metadata(batch), q, *new)
        assert torch.equal(runner.replay(batch, q, *new), right)
