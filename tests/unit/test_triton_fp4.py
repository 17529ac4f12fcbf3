"""FP4 stores are read exactly: every code with every scale, wherever they lie."""

from dataclasses import replace

import pytest
import torch
from attn_core.backends.triton.portable.launch import LayerArguments
from attn_core.backends.triton.tuning import Launch
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.quant import from_fp4
from attn_core.runtime.batch import ForwardBatch, SpecInfo
from attn_core.runtime.layer import AttentionLayer

pytest.importorskip("triton")

import triton
import triton.language as tl
from attn_core.backends.triton.portable.loads import load_values
from triton_server import DEVICE, M, make_backend

ON_GPU = DEVICE.type == "cuda"
HKV, GROUP = 2, 4


@triton.jit
def _loaded(
    pool, blocks, out, token_stride, block_stride, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    at, block_at = n * token_stride, n * block_stride
    x = load_values(pool, blocks, at, block_at, FIRST, WIDTH, D, tl.float16, C)
    d = FIRST + tl.arange(0, WIDTH)
    tl.store(out + n[:, None] * D + d[None, :], x.to(tl.float32), mask=(d < D)[None, :])


def dense(x):
    return x


def beside(x):
    """Lie beside as many others, aligned as if dense."""
    return torch.cat((x, x.flip(0)), -1)[..., : x.shape[-1]]


def odd(x):
    """Begin at odd addresses."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 1, dtype=torch.uint8, device=x.device)
    wide = torch.cat((wide, wide), -1)[..., 1:]
    wide[..., : x.shape[-1]] = x.view(torch.uint8)
    return wide[..., : x.shape[-1]].view(x.dtype)


FORMS = {"dense": dense, "beside": beside, "odd": odd}


def layer_of(d, dv=None, **changes):
    heads = {"num_q_heads": HKV * GROUP, "num_kv_heads": HKV}
    changes |= {"head_dim": d, "v_head_dim": dv or d, "scale": d**-0.5}
    return AttentionLayer(layer_id=0, **heads, **changes)


def stores(tokens, d, page, seed, *, scales=None):
    """Return codes and scales of a pool full of every byte, NaN left out of the scales."""
    rng = torch.Generator().manual_seed(seed)
    shape = (tokens // page, page, HKV)
    codes = torch.randint(0, 256, (*shape, d // 2), dtype=torch.uint8, generator=rng)
    blocks = torch.randint(0, 256, (*shape, d // 16), dtype=torch.uint8, generator=rng)
    if scales is not None:  # near 1, zeros of both signs among them
        blocks = torch.tensor(scales, dtype=torch.uint8)[blocks.long() % len(scales)]
    blocks[(blocks & 0x7F) == 0x7F] = 0
    return codes.to(DEVICE), blocks.view(torch.float8_e4m3fn).to(DEVICE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", [16, 32, 48, 64, 80, 128, 192])
def test_every_code_times_every_scale_is_exact(d, form):
    """Also NaN, both zeros, the smallest number of fp16 and negative scales, of foreign writers."""
    tokens, place = 256, FORMS[form]
    every = torch.arange(256, dtype=torch.uint8)
    codes = every.repeat_interleave(d // 2).view(d // 2, tokens).t().roll(1, 1).contiguous()
    codes = (codes.int() + torch.arange(d // 2) * 37).to(torch.uint8)
    blocks = every[:, None] + torch.arange(d // 16, dtype=torch.uint8) * 91
    of_heads = (x.view(tokens // 16, 16, 1, -1) for x in (codes, blocks))
    codes, blocks = (place(x.to(DEVICE)) for x in of_heads)
    scales = blocks.view(torch.uint8).view(torch.float8_e4m3fn)
    layer = replace(layer_of(d), num_q_heads=1, num_kv_heads=1)
    cache = LayerCache(k=codes, v=codes, block_scales=(scales, scales))
    launch = Launch(block_m=64, block_n=16, warps=4, stages=1, ptx=ON_GPU)
    constants = LayerArguments.of(layer, cache, torch.float16).constants(launch, 0, paged=True)
    aligned = form != "odd" and d % 32 == 0
    assert bool(constants.FP4_ALIGNED) == aligned
    got = torch.full((tokens, d), 7.0, device=DEVICE)
    parts = [(0, constants.D1)] + [(constants.D1, constants.D2)] * bool(constants.D2)
    for first, width in parts:
        _loaded[(tokens // 16,)](
            codes, scales, got, codes.stride(1), scales.stride(1), first, width, d, 16, constants
        )
    want = from_fp4(codes, scales, 1.0, torch.float32).reshape(tokens, d) * 2.0**-14
    assert want.isnan().any()
    assert (want == 2.0**-24).any()
    assert torch.equal(got.isnan(), want.isnan())
    some = ~want.isnan()
    assert torch.equal(got[some].view(torch.int32), want[some].view(torch.int32))


def attended(layer, cache, queries, lengths, page, mode, dtype, *, tree=None):
    """Return the outputs of the Triton backend, those in float64, and a budget of their error."""
    width = -(-max(lengths) // page)
    rng = torch.Generator().manual_seed(len(lengths))
    pages = torch.randperm(cache.k.shape[0] - 1, generator=rng)[: len(lengths) * width] + 1
    table = pages.view(len(lengths), width).int().to(DEVICE)
    q = torch.randn(sum(queries), HKV * GROUP, layer.head_dim, generator=rng).to(DEVICE, dtype)
    spec = (
        SpecInfo(topk=2, num_draft_tokens=queries[0], tree_mask=tree) if tree is not None else None
    )
    batch = ForwardBatch.build(
        mode, query_lens=queries, seq_lens=lengths, page_table=table, page_size=page, spec=spec
    )
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    backend = make_backend(
        layer, page_size=page, dtype=names[dtype], kv_cache_dtype="fp4_e2m1",
        topk=2 if spec else 0, num_draft_tokens=queries[0] if spec else 0,
    )  # fmt: skip
    metadata = backend.init_forward_metadata(batch)
    out = backend.forward(q, None, None, layer, cache, batch, metadata)
    k_blocks, v_blocks = cache.block_scales
    k = from_fp4(cache.k, k_blocks, cache.k_scale, torch.float64)
    v = from_fp4(cache.v, v_blocks, cache.v_scale, torch.float64)
    want, budget, at = [], [], 0
    for b, (n, length) in enumerate(zip(queries, lengths, strict=True)):
        keys = k[table[b].long()].flatten(0, 1)[:length].repeat_interleave(GROUP, 1)
        values = v[table[b].long()].flatten(0, 1)[:length].repeat_interleave(GROUP, 1)
        scores = torch.einsum("nhd,khd->hnk", q[at : at + n].double(), keys) * layer.scale
        j, i = torch.arange(length, device=DEVICE), torch.arange(n, device=DEVICE)[:, None]
        seen = j <= length - n + i
        if tree is not None:
            seen[:, length - n :] = tree[b]
        if layer.sliding_window is not None:
            seen &= j > length - n + i - layer.sliding_window
        scores = scores.masked_fill(~seen, -torch.inf)
        if layer.sinks is not None:
            sinks = layer.sinks.double()[:, None, None].expand(-1, n, 1)
            p = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        else:
            p = scores.softmax(-1)
        want.append(torch.einsum("hnk,khd->nhd", p, values))
        budget.append(torch.einsum("hnk,khd->nhd", p, values.abs()))
        at += n
    return out, torch.cat(want), torch.cat(budget)


NEAR_ONE = (0x38, 0x3B, 0x30, 0x41, 0x00, 0x80, 0x01, 0xB5)  # and 0, -0, the smallest, negative
PASSES = {
    "decode": (M.DECODE, (1, 1, 1), (300, 7, 65)),
    "verify": (M.TARGET_VERIFY, (8, 8, 8), (300, 11, 65)),
    "extend": (M.EXTEND, (40, 7, 1), (300, 7, 65)),
}


CASES = [
    (64, "dense", {}),
    (128, "dense", {"sliding_window": 33}),
    (128, "beside", {}),
    (128, "odd", {}),
    (80, "dense", {"sinks": True}),
    (48, "dense", {}),
    (96, "beside", {"sliding_window": 70, "sinks": True}),
    (256, "dense", {}),
]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, i, id=f"{name}-{CASES[i]}", marks=[pytest.mark.long] * (i % 2 == rest))
        for name, rest in (("decode", None), ("verify", 1), ("extend", 0))
        for i in range(len(CASES))
    ],
)
def test_passes_attend_to_the_numbers_that_are_stored(name, case):
    mode, queries, lengths = PASSES[name]
    d, form, changes = CASES[case]
    page = (1, 16, 64)[(case + list(PASSES).index(name)) % 3]  # each pass has each size
    if "sinks" in changes:
        sinks = torch.linspace(-2, 2, HKV * GROUP).to(DEVICE)
        changes = changes | {"sinks": sinks}
    layer = layer_of(d, **changes)
    tree = torch.ones(3, 8, 8, dtype=torch.bool).tril().to(DEVICE) if name == "verify" else None
    tokens = 3 * 320 + 64
    k, k_scales = stores(tokens, d, page, 1, scales=NEAR_ONE)
    v, v_scales = stores(tokens, d, page, 2, scales=NEAR_ONE)
    k, k_scales, v, v_scales = (FORMS[form](x) for x in (k, k_scales, v, v_scales))
    cache = LayerCache(k=k, v=v, k_scale=0.37, v_scale=1.7, block_scales=(k_scales, v_scales))
    for dtype, epsilon in ((torch.float32, 2**-17), (torch.bfloat16, 2**-7)):
        got, want, budget = attended(layer, cache, queries, lengths, page, mode, dtype, tree=tree)
        error = (got.double() - want).abs()
        worst = float((error / (epsilon * budget + 1e-30)).max())
        assert worst <= 1, f"{dtype}: {worst}"
