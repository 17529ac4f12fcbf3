"""Numbers at the edges of their formats: queries in bf16 that fp16 lacks, heads without a sink."""

import math

import pytest
import torch

pytest.importorskip("triton")

from attn_core import TORCH_DTYPES, AttentionLayer, CacheView, ForwardBatch, ForwardMode, LayerCache
from attn_core.plugins.registry import load_plugins
from attn_core.testing.harness import Bench

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = load_plugins().get("triton")


def attend(q, cache, layer, batch, *, kind="mha", kv_dtype="auto", dtype="bf16"):
    stored = dtype if kv_dtype == "auto" else kv_dtype
    row = next(
        r
        for r in SPEC.capabilities
        if r.kind == kind and r.device == "cuda" and "sm90" in r.archs and stored in r.kv_dtypes
    )
    bench = Bench(spec=SPEC, row=row, torch_device=DEVICE, arch="sm90", multiprocessors=3)
    backend = bench.create((layer,), dtype=dtype, page_size=cache.page_size, kv_dtype=kv_dtype)
    plan = backend.init_forward_metadata(batch)
    return backend.forward(q, None, None, layer, cache, batch, plan, return_lse=True)


def make_batch(new, length, page_size):
    pages = torch.arange(-(-length // page_size), dtype=torch.int32, device=DEVICE)
    return ForwardBatch.build(
        ForwardMode.EXTEND,
        query_lens=[new],
        seq_lens=[length],
        page_table=pages[None],
        page_size=page_size,
    )


@pytest.mark.parametrize("store", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("new", [1, 40])  # split-KV, and tiles of prompts
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_queries_of_any_size_over_fp8(kind, new, cap, store):
    """Rows far above the largest number of fp16, and below its smallest normal ones; zeros."""
    heads, dim, v_dim = (1, 48, 32) if kind == "mla" else (2, 32, 32)
    layer = AttentionLayer(
        layer_id=0, num_q_heads=4, num_kv_heads=heads, head_dim=dim, v_head_dim=v_dim,
        scale=dim**-0.5, logit_cap=cap,
    )  # fmt: skip
    torch.manual_seed(0)
    length, page = 50, 16
    k = torch.randn(4, page, heads, dim).to(TORCH_DTYPES[store])
    v = None if kind == "mla" else torch.randn(4, page, heads, v_dim).to(k.dtype)
    q = torch.randn(new, 4, dim)
    sizes = torch.tensor([1e5, 1e30, 1.0, 1e-4])  # of the heads
    for size in sizes.tolist():
        # the scale brings scores of this size near 1; those of others vanish or decide
        scaled = AttentionLayer(**{**vars(layer), "scale": dim**-0.5 / size})
        rows = (q * sizes[:, None]).bfloat16()
        rows[0, 1:] = 0
        cache = LayerCache(k=k.to(DEVICE), v=None if v is None else v.to(DEVICE))
        batch = make_batch(new, length, page)
        got, lse = attend(rows.to(DEVICE), cache, scaled, batch, kind=kind, kv_dtype=store)
        at = int((sizes == size).nonzero())
        keys = k.double().flatten(0, 1)[:length, at // (4 // heads)]
        values = keys[:, :v_dim]
        if v is not None:
            values = v.double().flatten(0, 1)[:length, at // (4 // heads)]
        scores = rows[:, at].double() @ keys.T * scaled.scale
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        seen = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        scores.masked_fill_(~seen, -math.inf)
        want = scores.softmax(-1) @ values
        torch.testing.assert_close(got[:, at].double().cpu(), want, atol=0.02, rtol=0.02)
        torch.testing.assert_close(
            lse[:, at].double().cpu(), scores.logsumexp(-1), atol=1e-3, rtol=1e-3
        )
        # a GPU multiplies and subtracts in one step: the largest of scores beyond 2^31 overflows
        below = sizes / size * 64 < 2**30
        assert got[:, below].isfinite().all()
        assert lse[:, below].isfinite().all()


@pytest.mark.parametrize("new", [1, 40])
def test_a_head_without_a_sink_and_a_request_without_keys(new):
    """A sink of -inf is none; without keys either, the output is 0 and the LSE -inf."""
    layer = AttentionLayer(
        layer_id=0, num_q_heads=2, num_kv_heads=1, head_dim=32, v_head_dim=32, scale=0.2,
        is_cross=True, view="cross", sinks=torch.tensor([-math.inf, 0.5], device=DEVICE),
    )  # fmt: skip
    torch.manual_seed(0)
    q = torch.randn(2 * new, 2, 32, device=DEVICE)
    k, v = torch.randn(2, 4, 16, 1, 32, device=DEVICE).unbind(0)
    lengths = (0, 33)
    table = torch.tensor([[0, 0, 0], [3, 1, 2]], dtype=torch.int32, device=DEVICE)
    view = CacheView.build(
        page_table=table, page_size=16, seq_lens=lengths, new_lens=(0, 0), writes=False
    )
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        cu_seqlens_q=torch.tensor([0, new, 2 * new], dtype=torch.int32, device=DEVICE),
        positions=torch.zeros(2 * new, dtype=torch.int64, device=DEVICE),
        max_q_len=new,
        views={"cross": view},
        query_lens_host=(new, new),
    )
    got, lse = attend(q, LayerCache(k=k, v=v), layer, batch, dtype="fp32")
    assert (got[:new] == 0).all()
    assert (lse[:new, 0] == -math.inf).all()
    torch.testing.assert_close(lse[:new, 1], torch.full((new,), 0.5, device=DEVICE))
    keys, values = (x[[3, 1, 2]].flatten(0, 2)[:33].double() for x in (k, v))
    scores = q[new:].double() @ keys.T * 0.2
    want = scores.softmax(-1) @ values
    torch.testing.assert_close(got[new:, 0].double(), want[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        lse[new:, 0].double(), scores[:, 0].logsumexp(-1), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("new", [1, 40])
def test_an_infinite_sink_leaves_nothing_for_the_keys(new):
    """Nor does a finite one that is infinite in the logarithm to base 2."""
    layer = AttentionLayer(
        layer_id=0, num_q_heads=4, num_kv_heads=1, head_dim=32, v_head_dim=32, scale=0.2,
        sinks=torch.tensor([math.inf, 3e38, -math.inf, 0.5], device=DEVICE),
    )  # fmt: skip
    torch.manual_seed(0)
    q = torch.randn(new, 4, 32, device=DEVICE)
    k, v = torch.randn(2, 4, 16, 1, 32, device=DEVICE).unbind(0)
    batch = ForwardBatch.build(
        ForwardMode.EXTEND,
        query_lens=[new],
        seq_lens=[40],
        page_table=torch.tensor([[3, 1, 2]], dtype=torch.int32, device=DEVICE),
        page_size=16,
    )
    got, lse = attend(q, LayerCache(k=k, v=v), layer, batch, dtype="fp32")
    assert (got[:, :2] == 0).all()
    assert (lse[:, :2] > 1e38).all()
    assert (got[:, 2:] != 0).all()
    assert lse[:, 2:].isfinite().all()
