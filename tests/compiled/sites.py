"""Where the Triton backend launches kernels: name → a call with tensors that have no memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from attn_core.backends import triton as backend
from attn_core.backends.triton.csr import fill_csr
from attn_core.backends.triton.merge import merge_states
from attn_core.capabilities import Device, Phase
from attn_core.forward import ForwardMode
from attn_core.page_table import PageCsr
from attn_core.plugins import load_plugins
from attn_core.testing.bench import Bench
from attn_core.testing.cases import Case, RaggedCase
from attn_core.testing.inputs import Point, make_inputs, make_layer, to_device
from attn_core.testing.passes import attend, create, indptr
from attn_core.unmet import unmet

META = torch.device("meta")
SPEC = load_plugins().get("triton")
LIBRARIES = {"triton": triton.__version__}
PROCESSORS = 132  # of an H200; it is no constant of a kernel
TREE = (-1, 0, 0, 1, 1, 2, 5, 5)
Site = Callable[[str], object]  # the arch, "sm90" or "gfx942"


class NotDeclared(Exception):  # noqa: N818  # no error: the site is left out
    """No row of the backend says that it does this on that chip."""


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=META)


def bench(needs, arch, *, deterministic=False):
    """Return the backend on the device "meta", believing to be on `arch`."""
    backend._device = lambda device: (arch, PROCESSORS)
    device = Device("cuda" if arch.startswith("sm") else "rocm", arch)
    kind, gaps = needs.layers[0].kind, []
    for row in SPEC.capabilities:
        if (row.kind, row.device) != (kind, device.type) or Phase.PREFILL not in row.phases:
            continue
        lacks = unmet(row, needs, device, LIBRARIES, Phase.PREFILL)
        if not lacks:
            return Bench(spec=SPEC, row=row, torch_device=META, deterministic=deterministic)
        gaps.append("; ".join(map(str, lacks)))
    raise NotDeclared(min(gaps, key=len))


def passed(case, point, arch, *, deterministic=False):
    """Plan a pass and run one layer: every kernel of it, the write of new tokens included."""
    needs = replace(case.needs(point.dtype, point.page_size), speculation=None)
    asked = bench(needs, arch, deterministic=deterministic)
    inputs = to_device(make_inputs(case, point, fused=True), META)
    attend(create(asked, case, inputs, point), inputs, cache=inputs.cache, return_lse=True)


def ragged(case, dtype, arch):
    """Run attention without a cache."""
    layer = make_layer(case, torch.Generator())
    made = bench(case.needs(dtype), arch).create((layer,), dtype=dtype)
    (hq, hkv), (d, dv) = case.heads, case.dims
    q, k, v = meta(64, hq, d), meta(64, hkv, d), meta(64, hkv, dv)
    cu = indptr(case.query_lens, META)
    made.forward_ragged(q, k, v, layer, cu, cu, 64, 64, causal=case.causal, return_lse=True)


@triton.jit
def _greedy(x, M: tl.constexpr, N: tl.constexpr):
    y = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    z = tl.dot(y, tl.trans(y))
    tl.store(x + tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :], z)


def greedy(arch):
    """Launch what takes too much of everything: what is looked for is also seen."""
    warps = 8 if arch.startswith("sm") else 2  # any fewer take long to compile
    _greedy[(1,)](meta(128, 512, dtype=torch.float16), M=128, N=512, num_warps=warps)


def csr(arch):
    table, lengths = meta(64, 500, dtype=torch.int32), meta(64, dtype=torch.int32)
    buffers = [meta(n, dtype=torch.int32) for n in (65, 64 * 500, 64)]
    fill_csr(PageCsr(*buffers), table, lengths, 16)


def merge(arch):
    merge_states(meta(2, 512, 32, 128), meta(2, 512, 32, dtype=torch.float32))


def decode(**more):
    return replace(_DECODE, **more)


def extend(**more):
    return replace(_DECODE, mode=ForwardMode.EXTEND, query_lens=(64, 64), **more)


def verify(**more):
    trees = {"query_lens": (8, 8), "trees": (TREE, TREE)}
    return replace(_DECODE, mode=ForwardMode.TARGET_VERIFY, **{**trees, **more})


# Llama-3.1-8B; of lengths nothing that is compiled depends
_DECODE = Case(
    feature="",
    mode=ForwardMode.DECODE,
    query_lens=(1, 1),
    seq_lens=(70, 64),
    heads=(32, 8),
    dims=(128, 128),
)
MLA = {"kind": "mla", "heads": (128, 1), "dims": (576, 512)}
ODDITIES = {"window": 33, "sinks": True, "dims": (64, 64), "heads": (64, 8)}  # gpt-oss

# What serving spends its time in: name → a pass and where it is run.
HOT = {
    "decode": (decode(), "bf16", 64),
    "decode-page-1": (decode(), "bf16", 1),
    "decode-fp8": (decode(kv_dtype="fp8_e4m3", k_scale=0.5), "bf16", 64),
    "extend": (extend(), "bf16", 64),
    "extend-page-1": (extend(), "bf16", 1),
    "verify-tree": (verify(), "bf16", 1),
    "verify-chain": (verify(trees=None, query_lens=(4, 4)), "bf16", 64),
    "decode-gpt-oss": (decode(**ODDITIES), "bf16", 64),
    "extend-gpt-oss": (extend(**ODDITIES), "bf16", 64),
    "mla-decode": (decode(**MLA), "bf16", 64),
    "mla-decode-16-heads": (decode(**(MLA | {"heads": (16, 1)})), "bf16", 64),
}
MORE = {
    "decode-fp16": (decode(), "fp16", 64),
    "decode-fp32": (decode(), "fp32", 64),
    "decode-fp4": (decode(kv_dtype="fp4_e2m1", k_scale=0.5), "bf16", 64),
    "decode-e5m2": (decode(kv_dtype="fp8_e5m2"), "bf16", 64),
    "decode-256": (decode(dims=(256, 256), heads=(8, 4), logit_cap=50.0), "bf16", 64),
    "decode-80": (decode(dims=(80, 80), heads=(32, 32)), "bf16", 64),
    "extend-fp32": (extend(), "fp32", 64),
    "extend-fp8": (extend(kv_dtype="fp8_e4m3", k_scale=0.5), "bf16", 64),
    "extend-fp4": (extend(kv_dtype="fp4_e2m1", k_scale=0.5), "bf16", 64),
    "extend-256": (extend(dims=(256, 256), heads=(8, 4), logit_cap=50.0), "bf16", 64),
    "verify-tree-gpt-oss": (verify(**ODDITIES), "bf16", 16),
    "mla-extend": (extend(**MLA), "bf16", 64),
    "mla-verify-tree": (verify(**MLA), "bf16", 64),
    "mla-decode-fp32": (decode(**MLA), "fp32", 64),
}


def _sites() -> dict[str, Site]:
    found: dict[str, Site] = {"csr": csr, "merge": merge}
    for name, (case, dtype, page) in {**HOT, **MORE}.items():
        found[name] = partial(passed, case, Point(dtype=dtype, page_size=page))
    fixed = Point(dtype="bf16", page_size=64)
    found["decode-fixed"] = partial(passed, decode(), fixed, deterministic=True)
    lens = {"query_lens": (64,), "key_lens": (64,)}
    mla = RaggedCase(feature="", kind="mla", causal=True, heads=(16, 16), dims=(192, 128), **lens)
    vision = RaggedCase(feature="", heads=(16, 16), dims=(80, 80), **lens)
    found["mla-ragged"] = partial(ragged, mla, "bf16")
    found["encoder"] = partial(ragged, vision, "bf16")
    return found


SITES = _sites() | {"greedy": greedy}
GROUPS = {
    "quick": ("csr", "merge", "decode", "extend", "mla-decode"),
    "hot": ("csr", "merge", *HOT),
    "more": tuple(SITES.keys() - HOT.keys() - {"csr", "merge", "greedy"}),
}
