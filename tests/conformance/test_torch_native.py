"""torch_native against the oracle, in every feature that it declares, and against itself."""

import dataclasses
from functools import cache

import attn_core.backends.torch_native as torch_native
import pytest
import torch
from attn_core.backend import BackendConfig
from attn_core.backends.torch_native import TorchNative
from attn_core.capabilities import Capabilities
from attn_core.errors import BackendError, UnsupportedError
from attn_core.forward import AttentionLayer, ForwardBatch, ForwardMode
from attn_core.merge import merge_states
from cases import CASES, DTYPES, RAGGED_CASES, Case, Inputs, RaggedCase, answer, make_inputs
from oracle import assert_within_budget, attend_one, visible_keys

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(params=["one-tile", "tiles"])
def tiles(request, monkeypatch):
    """Run with tiles as shipped, and with the smallest on two cores: short cases are merged too."""
    cores = torch.get_num_threads()
    if request.param == "tiles":
        monkeypatch.setattr(torch_native, "_CPU_TILE", 1)
        monkeypatch.setattr(torch_native.plan, "_LEAST_SPLIT", 2)
        torch.set_num_threads(2)
    yield request.param
    torch.set_num_threads(cores)


def create(inputs: Inputs, kind: str, dtype: str, page_size: int, kv_dtype: str) -> TorchNative:
    device = inputs.q.device
    return TorchNative(config_for((inputs.layer,), dtype, kind, page_size, kv_dtype, device))


def config_for(
    layers,
    dtype: str,
    kind: str,
    page_size: int,
    kv_dtype: str,
    device: torch.device = torch.device("cpu"),  # noqa: B008  # a constant
) -> BackendConfig:
    return BackendConfig(
        name="torch_native",
        row=Capabilities(
            kind=kind, device="any", dtypes=set(DTYPES), kv_dtypes={kv_dtype}, priority=0
        ),
        layers=layers,
        page_size=page_size,
        dtype=dtype,
        kv_cache_dtype=dtype if kv_dtype == "auto" else kv_dtype,
        device=device,
    )


def run(case: Case, inputs: Inputs, dtype: str, page_size: int, batch: ForwardBatch | None = None):
    """The backend's output without LSE, and its output and LSE, all into buffers of NaN."""
    batch = batch or inputs.batch
    backend = create(inputs, case.kind, dtype, page_size, case.kv_dtype)
    decode = batch.forward_mode in {ForwardMode.DECODE, ForwardMode.DRAFT_DECODE}
    forward = backend.forward_decode if decode else backend.forward_extend
    metadata = backend.init_forward_metadata(batch)
    outs = []
    for return_lse in (False, True):
        shape = (batch.num_tokens, inputs.layer.num_q_heads, inputs.layer.v_head_dim)
        out = inputs.q.new_full(shape, torch.nan)
        got = forward(
            inputs.q,
            None,
            None,
            inputs.layer,
            inputs.cache,
            batch,
            metadata,
            out=out,
            return_lse=return_lse,
        )
        assert (got[0] if return_lse else got) is out
        outs.append(got)
    return outs[0], *outs[1]


@cache
def expected(name: str, dtype: str, page_size: int, layout: str):
    case = BY_NAME[name]
    inputs = make_inputs(case, dtype, page_size, layout=layout)
    return inputs, answer(case, inputs, torch.float64), answer(case, inputs, DTYPES[dtype])


PARAMS = [
    pytest.param(
        case.name, dtype, page_size, layout, id=f"{case.name}-{dtype}-{page_size}-{layout}"
    )
    for case in CASES
    for page_size, layout in (
        (1, "shuffled"),
        (16, "shuffled"),
        (64, "shuffled"),
        (16, "consecutive"),
    )
    for dtype in (case.dtypes if (page_size, layout) == (16, "shuffled") else case.dtypes[-1:])
]


@pytest.mark.parametrize(("name", "dtype", "page_size", "layout"), PARAMS)
def test_agrees_with_the_oracle(name, dtype, page_size, layout, tiles):
    case = BY_NAME[name]
    inputs, (out, lse), (near_out, near_lse) = expected(name, dtype, page_size, layout)
    plain, got, got_lse = run(case, inputs, dtype, page_size)
    n, rounding = inputs.real_tokens, DTYPES[dtype]
    assert_within_budget("out", plain[:n], out, near_out, rounding)
    assert_within_budget("out with lse", got[:n], out, near_out, rounding)
    assert got_lse.dtype == torch.float32
    assert_within_budget("lse", got_lse[:n], lse, near_lse, torch.float32)


def on_device(x, device: torch.device):
    """Move every tensor in a dataclass, tuple or mapping, at any depth."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, tuple):
        return tuple(on_device(y, device) for y in x)
    if isinstance(x, dict):
        return {k: on_device(y, device) for k, y in x.items()}
    if dataclasses.is_dataclass(x):
        changed = {f.name: on_device(getattr(x, f.name), device) for f in dataclasses.fields(x)}
        return dataclasses.replace(x, **changed)
    return x


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", BY_NAME)
def test_agrees_with_the_oracle_on_cuda(name, dtype):
    case = BY_NAME[name]
    inputs, (out, lse), _ = expected(name, dtype, 16, "shuffled")
    inputs = on_device(inputs, torch.device("cuda"))
    near_out, near_lse = (x.cpu() for x in answer(case, inputs, DTYPES[dtype]))
    plain, got, got_lse = run(case, inputs, dtype, 16)
    n, rounding = inputs.real_tokens, DTYPES[dtype]
    assert_within_budget("out", plain[:n].cpu(), out, near_out, rounding)
    assert_within_budget("out with lse", got[:n].cpu(), out, near_out, rounding)
    assert_within_budget("lse", got_lse[:n].cpu(), lse, near_lse, torch.float32)


def ragged_answer(case, layer, q, k, v, dtype):
    outs, lses, at, base = [], [], 0, 0
    for n, s in zip(case.query_lens, case.key_lens, strict=True):
        for i in range(n):
            seen = visible_keys(i, n, s, causal=case.causal, window=case.window)
            seen = [base + j for j in seen]
            row, rest = q[at + i].to(dtype), {"scale": layer.scale, "sinks": layer.sinks}
            one = attend_one(
                row, k[seen].to(dtype), v[seen].to(dtype), logit_cap=layer.logit_cap, **rest
            )
            outs.append(one[0])
            lses.append(one[1])
        at, base = at + n, base + s
    return torch.stack(outs), torch.stack(lses)


def ragged_inputs(case: RaggedCase, dtype: str):
    rng = torch.Generator().manual_seed(1)
    (hq, hkv), (d, dv) = case.heads, case.dims
    layer = AttentionLayer(
        layer_id=0,
        num_q_heads=hq,
        num_kv_heads=hkv,
        head_dim=d,
        v_head_dim=dv,
        scale=d**-0.5,
        sliding_window=case.window,
        logit_cap=case.logit_cap,
        sinks=torch.randn(hq, generator=rng) if case.sinks else None,
        is_causal=case.causal,
    )
    q = torch.randn(sum(case.query_lens), hq, d, generator=rng).to(DTYPES[dtype])
    k = torch.randn(sum(case.key_lens), hkv, d, generator=rng).to(DTYPES[dtype])
    v = torch.randn(sum(case.key_lens), hkv, dv, generator=rng).to(DTYPES[dtype])
    return layer, q, k, v


@cache
def ragged_expected(case: RaggedCase, dtype: str):
    """The inputs, the truth and the yardstick."""
    layer, q, k, v = ragged_inputs(case, dtype)
    want, near = (ragged_answer(case, layer, q, k, v, d) for d in (torch.float64, q.dtype))
    return (layer, q, k, v), want, near


def lengths(lens) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", RAGGED_CASES, ids=lambda c: c.name)
def test_ragged_agrees_with_the_oracle(case, dtype, tiles):
    (layer, q, k, v), want, near = ragged_expected(case, dtype)
    out = torch.full((q.shape[0], q.shape[1], v.shape[2]), torch.nan, dtype=q.dtype)
    cu_q, cu_k = lengths(case.query_lens), lengths(case.key_lens)
    got, lse = backend_for(layer, dtype).forward_ragged(
        q,
        k,
        v,
        layer,
        cu_q,
        cu_k,
        max(case.query_lens),
        max(case.key_lens),
        causal=case.causal,
        out=out,
        return_lse=True,
    )
    assert got is out
    assert_within_budget("out", got, want[0], near[0], q.dtype)
    assert_within_budget("lse", lse, want[1], near[1], torch.float32)


def test_an_mla_prefix_in_chunks_merges_to_the_whole():
    case = RaggedCase(
        name="whole", query_lens=(20,), key_lens=(90,), causal=True, heads=(4, 4), dims=(192, 128)
    )
    layer, q, k, v = ragged_inputs(case, "bf16")
    backend, cu_q = backend_for(layer, "bf16"), lengths([20])
    parts = []
    for a, b in ((0, 40), (40, 70), (70, 90)):
        kept = slice(a, b)
        part = backend.forward_ragged(
            q,
            k[kept],
            v[kept],
            layer,
            cu_q,
            lengths([b - a]),
            20,
            b - a,
            causal=a == 70,
            return_lse=True,
        )
        parts.append(part)
    out, lse = merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))
    want, near = (ragged_answer(case, layer, q, k, v, d) for d in (torch.float64, q.dtype))
    assert_within_budget("out", out, want[0], near[0], q.dtype)
    assert_within_budget("lse", lse, want[1], near[1], torch.float32)


def backend_for(layer: AttentionLayer, dtype: str, kind: str = "mha") -> TorchNative:
    return TorchNative(config_for((layer,), dtype, kind, 16, dtype))


WHOLE = Case(name="whole", query_lens=(90, 33), seq_lens=(90, 33), window=40, sinks=True)


def rebatched(inputs: Inputs, mode: ForwardMode, query_lens, seq_lens) -> ForwardBatch:
    table = inputs.batch.views["full"].page_table
    return ForwardBatch.build(
        mode, query_lens=query_lens, seq_lens=seq_lens, page_table=table, page_size=16
    )


def pick(inputs: Inputs, spans) -> Inputs:
    """The same cache, with the queries of some token spans of WHOLE only."""
    q = torch.cat([inputs.q[a:b] for a, b in spans])
    return dataclasses.replace(inputs, q=q)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_prefill_in_chunks_is_the_prefill_in_one(dtype):
    inputs = make_inputs(WHOLE, dtype, 16)
    truth, near = (answer(WHOLE, inputs, d)[0] for d in (torch.float64, DTYPES[dtype]))
    got = torch.empty_like(run(WHOLE, inputs, dtype, 16)[0])
    for (a0, a1), (b0, b1) in (((0, 31), (0, 1)), ((31, 64), (1, 32)), ((64, 90), (32, 33))):
        batch = rebatched(inputs, ForwardMode.EXTEND, (a1 - a0, b1 - b0), (a1, b1))
        spans = ((a0, a1), (90 + b0, 90 + b1))
        part = run(WHOLE, pick(inputs, spans), dtype, 16, batch)[0]
        got[a0:a1], got[90 + b0 : 90 + b1] = part[: a1 - a0], part[a1 - a0 :]
    assert_within_budget("chunks", got, truth, near, DTYPES[dtype])


def test_a_longer_prefill_is_a_prefill_and_a_decode():
    inputs = make_inputs(WHOLE, "bf16", 16)
    truth, near = (answer(WHOLE, inputs, d)[0] for d in (torch.float64, torch.bfloat16))
    before = rebatched(inputs, ForwardMode.EXTEND, (89, 32), (89, 32))
    step = rebatched(inputs, ForwardMode.DECODE, (1, 1), (90, 33))
    first = run(WHOLE, pick(inputs, ((0, 89), (90, 122))), "bf16", 16, before)[0]
    last = run(WHOLE, pick(inputs, ((89, 90), (122, 123))), "bf16", 16, step)[0]
    got = torch.cat([first[:89], last[:1], first[89:], last[1:]])
    assert_within_budget("prefill and decode", got, truth, near, torch.bfloat16)


@pytest.mark.parametrize("name", ["prefill-prefix", "decode-edges", "verify-tree", "mla-decode"])
def test_where_the_pages_lie_does_not_matter(name):
    case = BY_NAME[name]
    inputs = make_inputs(case, "bf16", 16)
    want = run(case, inputs, "bf16", 16)
    pages = inputs.cache.k.shape[0]
    moved = torch.cat([torch.zeros(1, dtype=torch.long), torch.randperm(pages - 1) + 1])
    back = moved.argsort()
    v = None if inputs.cache.v is None else inputs.cache.v[back]
    view = inputs.batch.views["full"]
    view = dataclasses.replace(view, page_table=moved[view.page_table.long()].int())
    again = dataclasses.replace(
        inputs,
        cache=dataclasses.replace(inputs.cache, k=inputs.cache.k[back], v=v),
        batch=dataclasses.replace(inputs.batch, views={"full": view}),
    )
    for a, b in zip(want, run(case, again, "bf16", 16), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["prefill-prefix", "decode-padded", "verify-tree", "cross"])
def test_lengths_on_the_device_alone_are_enough(name):
    case = BY_NAME[name]
    inputs = make_inputs(case, "bf16", 16)
    n = inputs.real_tokens
    want = run(case, inputs, "bf16", 16)
    views = {k: dataclasses.replace(v, seq_lens_host=None) for k, v in inputs.batch.views.items()}
    batch = dataclasses.replace(inputs.batch, views=views, query_lens_host=None)
    for a, b in zip(want, run(case, inputs, "bf16", 16, batch), strict=True):
        assert torch.equal(a[:n], b[:n])


@pytest.mark.parametrize("layout", ["HND", "strided"])
def test_other_layouts_of_the_pool_are_read_alike(layout):
    case = BY_NAME["prefill-prefix"]
    inputs = make_inputs(case, "bf16", 16)
    want = run(case, inputs, "bf16", 16)
    k, v = inputs.cache.k, inputs.cache.v
    if layout == "HND":
        cache = dataclasses.replace(
            inputs.cache,
            k=k.transpose(1, 2).contiguous(),
            v=v.transpose(1, 2).contiguous(),
            layout="HND",
        )
    else:  # K and V of a page beside each other
        both = torch.stack([k, v], 1)
        cache = dataclasses.replace(inputs.cache, k=both[:, 0], v=both[:, 1])
    got = run(case, dataclasses.replace(inputs, cache=cache), "bf16", 16)
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "calls"),
    [("decode-equal", 2), ("prefill-equal", 2), ("verify-tree", 3), ("cross", 3)],
)
def test_equal_lengths_share_one_call(name, calls, monkeypatch):
    seen = []

    def counted(*args, **kwargs):
        seen.append(args[0].shape)
        return attend(*args, **kwargs)

    attend = torch_native.attend
    monkeypatch.setattr(torch_native, "attend", counted)
    case = BY_NAME[name]
    inputs = make_inputs(case, "bf16", 16)
    backend = create(inputs, case.kind, "bf16", 16, "bf16")
    metadata = backend.init_forward_metadata(inputs.batch)
    q, layer, cache = inputs.q, inputs.layer, inputs.cache
    backend.forward_extend(q, None, None, layer, cache, inputs.batch, metadata)
    assert len(seen) == calls


def test_an_idle_pass_gives_an_empty_output():
    inputs = make_inputs(WHOLE, "bf16", 16)
    table = torch.zeros(0, 1, dtype=torch.int32)
    batch = ForwardBatch.build(
        ForwardMode.IDLE, query_lens=(), seq_lens=(), page_table=table, page_size=16
    )
    backend = backend_for(inputs.layer, "bf16")
    metadata = backend.init_forward_metadata(batch)
    out = backend.forward_extend(
        inputs.q[:0], None, None, inputs.layer, inputs.cache, batch, metadata
    )
    assert out.shape == (0, 4, 64)


def test_what_is_not_honoured_is_refused():
    layer = make_inputs(WHOLE, "bf16", 16).layer
    with pytest.raises(UnsupportedError, match="sliding window of 40"):
        backend_for(dataclasses.replace(layer, is_causal=False), "bf16")
    with pytest.raises(UnsupportedError, match="sliding window of 40"):
        backend_for(dataclasses.replace(layer, is_cross=True), "bf16")
    inputs = make_inputs(WHOLE, "bf16", 16)
    backend = backend_for(layer, "bf16")
    metadata = backend.init_forward_metadata(inputs.batch)
    args = (inputs.q, None, None)
    with pytest.raises(UnsupportedError, match="topk_indices"):
        backend.forward_extend(
            *args, layer, inputs.cache, inputs.batch, metadata, topk_indices=torch.zeros(1)
        )
    other = dataclasses.replace(layer, sliding_window=7, layer_id=3)
    with pytest.raises(BackendError, match="layer 3"):
        backend.forward_extend(*args, other, inputs.cache, inputs.batch, metadata)
