"""The shapes that are measured: the fixed ones of each phase, and grids."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.cases import LATENT, ROPE, Case, Phase

GRID = "grid"
MLA_GRID = "mla-grid"
RAGGED = "ragged"
SHARED = "shared"
STORES = "stores"
_GIB = 1 << 30
GRID_KV_BYTES = 40 * _GIB  # what the KV of one shape may take
_GRID_FLOPS = 2 * 10**13  # and its work: some 30 ms on a GPU of 700 TFLOP/s


def _decode(batch: int, length: int, page_size: int = 64) -> Case:
    return Case(phase="decode", batch=batch, length=length, page_size=page_size)


def _tree(batch: int, length: int, page_size: int) -> Case:
    return Case(
        phase="verify", batch=batch, length=length, queries=8, tree=True, page_size=page_size
    )


def _mla(phase: Phase, heads: int, batch: int, length: int, queries: int = 1) -> Case:
    return Case(
        phase=phase,
        batch=batch,
        length=length,
        queries=queries,
        q_heads=heads,
        kv_heads=1,
        head_dim=LATENT + ROPE,
        v_head_dim=LATENT,
    )


FIXED: Mapping[str, tuple[Case, ...]] = {
    "decode": (
        _decode(1, 1024),
        _decode(1, 32768),
        _decode(16, 4096),
        _decode(64, 4096),
        _decode(256, 2048),
        # what a page size costs; FA4 takes pages of 128 alone
        _decode(64, 4096, 1),
        _decode(64, 4096, 16),
        _decode(64, 4096, 128),
        _decode(16, 4096, 128),
        Case(phase="decode", batch=64, length=4096, q_heads=8, kv_heads=1),
    ),
    "verify": (
        *(_tree(b, s, page) for page in (1, 64) for b, s in ((1, 4096), (16, 4096), (64, 2048))),
        Case(phase="verify", batch=16, length=4096, queries=4),
    ),
    "prefill": tuple(
        Case(phase="prefill", batch=b, length=s, queries=None)
        for b, s in ((1, 1024), (1, 4096), (1, 16384), (1, 24000), (16, 1024), (4, 4096))
    ),
    "extend": tuple(
        Case(phase="extend", batch=b, length=s, queries=n, page_size=page)
        for b, n, s in ((8, 512, 4608), (1, 2048, 32768))
        for page in (1, 16, 64, 128)
    ),
    "mla": tuple(
        replace(_mla("mla", heads, b, s), kv_dtype=store)
        for store in ("bf16", "fp8_e4m3")
        for heads in (128, 16)
        for b, s in ((1, 4096), (16, 4096), (64, 8192))
    ),
    "mla-verify": (_mla("mla-verify", 128, 16, 4096, queries=4),),
    "fp8": (Case(phase="fp8", batch=64, length=4096, kv_dtype="fp8_e4m3"),),
}

_RATIOS = ((16, 16), (16, 8), (32, 8), (32, 4), (16, 1))  # 1, 2, 4, 8 and 16 q heads a KV head
_DIMS = (64, 128, 256)
_PAGES = (64, 1, 16, 128)
_BATCHES = (1, 4, 16, 64, 256)
_LENGTHS: Mapping[str, tuple[int, ...]] = {
    "decode": (128, 1024, 4096, 16384, 131072),
    "verify": (128, 1024, 4096, 16384, 131072),
    "prefill": (128, 512, 2048, 8192, 32768),
}


def grid() -> tuple[Case, ...]:
    """Cross batches with lengths in each of three phases; the rest turns at its own pace.

    Ratios, head dims, page sizes and raggedness walk along the two axes with different strides, so
    that each value of one meets each value of the others. Shapes beyond 40 GiB of KV or 20 TFLOP
    of work are left out.
    """
    cases = []
    for p, (phase, lengths) in enumerate(_LENGTHS.items()):
        for i, j in itertools.product(range(len(_BATCHES)), range(len(lengths))):
            q_heads, kv_heads = _RATIOS[(i + j + p) % len(_RATIOS)]
            dim = _DIMS[(i + 2 * j + p) % len(_DIMS)]
            case = Case(
                phase=phase,  # type: ignore[arg-type]  # the keys above are phases
                batch=_BATCHES[i],
                length=lengths[j],
                queries={"decode": 1, "verify": 8, "prefill": None}[phase],
                ragged=_BATCHES[i] > 1 and (i * 2 + j) % 3 != 0,
                tree=phase == "verify" and (i + j) % 4 != 3,
                q_heads=q_heads,
                kv_heads=kv_heads,
                head_dim=dim,
                v_head_dim=dim,
                page_size=_PAGES[(2 * i + j + p) % len(_PAGES)],
            )
            if case.kv_bytes <= GRID_KV_BYTES and case.flops <= _GRID_FLOPS:
                cases.append(case)
    return tuple(cases)


def mla_grid() -> tuple[Case, ...]:
    """Cross heads with queries of absorbed MLA, over few and many requests, short and long."""
    shapes = ((16, 1024), (16, 4096), (16, 32768), (64, 1024), (64, 8192), (128, 4096))
    return tuple(
        _mla("mla" if queries == 1 else "mla-verify", heads, batch, length, queries)
        for queries, heads in itertools.product((1, 2, 4), (16, 32, 64, 128))
        for batch, length in shapes
    )


def ragged() -> tuple[Case, ...]:
    """Draw log-normal lengths for each phase: most requests are short, a few are very long.

    Head dims 64, 128 and 256 turn; pages have 64 tokens, which every peer takes.
    """
    cases = []
    for sigma, batch in itertools.product((1.0, 1.5), (16, 64, 256)):
        for round_number, (q_heads, kv_heads, dim) in enumerate(
            ((32, 8, 64), (32, 8, 128), (16, 2, 256))
        ):
            own = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "v_head_dim": dim}
            more: dict[str, Any] = {**own, "batch": batch, "sigma": sigma}
            cases.append(Case(phase="decode", length=2048, **more))
            cases.append(Case(phase="fp8", length=2048, kv_dtype="fp8_e4m3", **more))
            cases.append(
                Case(phase="verify", length=1024, queries=8, tree=round_number != 1, **more)
            )
            if batch < 256:
                cases.append(Case(phase="prefill", length=256, queries=None, **more))
                cases.append(Case(phase="extend", length=2048, queries=128, **more))
        for heads, queries in ((16, 1), (128, 1), (128, 4)):
            phase: Phase = "mla" if queries == 1 else "mla-verify"
            cases.append(replace(_mla(phase, heads, batch, 1024, queries), sigma=sigma))
    return tuple(cases)


def shared() -> tuple[Case, ...]:
    """Let requests share prefixes: one, several and nested groups, a part of them, and none."""
    shapes: list[dict[str, Any]] = [
        {"batch": 64, "length": 8192 + 512, "shared": ((64, 8192),)},
        {"batch": 256, "length": 2048 + 256, "shared": ((256, 2048),)},
        {"batch": 16, "length": 32768 + 1024, "shared": ((16, 32768),)},
        {"batch": 64, "length": 8192 + 512, "shared": ((16, 8192),)},
        {"batch": 64, "length": 8192 + 512, "shared": ((64, 4096), (8, 4096))},
        {"batch": 64, "length": 8192 + 512, "shared": ((32, 8192),), "sharers": 32},
        {"batch": 64, "length": 8192 + 512, "shared": ((16, 8192),), "sharers": 16},
        {"batch": 64, "length": 2048 + 2048, "shared": ((64, 2048),)},
        {"batch": 64, "length": 8192 + 512},
        {"batch": 16, "length": 1024},
        {"batch": 64, "length": 8192 + 512, "shared": ((32, 8192),), "sharers": 32, "alone": 8192},
    ]
    cases = []
    for heads, page in itertools.product(((32, 8), (28, 4)), (64, 16)):
        own: dict[str, Any] = {"q_heads": heads[0], "kv_heads": heads[1], "page_size": page}
        cases += [Case(phase="decode", **own, **shape) for shape in shapes]
        for drafts in (4, 8):
            cases.append(Case(phase="verify", queries=drafts, tree=True, **own, **shapes[0]))
    for page in (64, 16):
        cases.append(Case(phase="verify", queries=4, page_size=page, **shapes[0]))  # chains
    for phase, store in (("fp8", "fp8_e4m3"), ("fp4", "fp4_e2m1")):
        some: dict[str, Any] = {"phase": phase, "kv_dtype": store}
        cases += [Case(**some, **shapes[0]), Case(**some, **shapes[5])]
    for heads_of_latents, page in ((16, 64), (128, 64), (16, 16)):
        latents = _mla("mla", heads_of_latents, 64, 8192 + 512)
        cases.append(replace(latents, shared=((64, 8192),), page_size=page))
    return tuple(cases)


def stores() -> tuple[Case, ...]:
    """Read the same shapes from a cache in bf16, FP8 and FP4: what fewer bytes are worth."""
    decodes = [
        Case(phase="stores", batch=batch, length=length, page_size=page)
        for page in (64, 16)
        for batch, length in itertools.product((1, 16, 64), (1024, 8192))
    ]
    wide: dict[str, Any] = {"q_heads": 16, "kv_heads": 2, "head_dim": 256, "v_head_dim": 256}
    full = decodes[5]
    shapes = (
        *decodes,
        replace(full, head_dim=64, v_head_dim=64),
        replace(full, **wide),
        *(replace(_tree(b, 4096, page), phase="stores-verify") for b, page in ((16, 64), (64, 16))),
        Case(phase="stores-extend", batch=8, length=4608, queries=512),
        *(_mla("mla-stores", heads, b, 8192) for heads in (16, 128) for b in (1, 64)),
    )
    formats = ("bf16", "fp8_e4m3", "fp4_e2m1")
    return tuple(replace(shape, kv_dtype=store) for shape in shapes for store in formats)


def cases_of(phase: str) -> tuple[Case, ...]:
    """Return the cases of one phase, of a grid, or of "all": every phase but the grids."""
    if phase == GRID:
        return grid()
    if phase == MLA_GRID:
        return mla_grid()
    if phase == RAGGED:
        return ragged()
    if phase == SHARED:
        return shared()
    if phase == STORES:
        return stores()
    if phase == "all":
        return tuple(itertools.chain(*FIXED.values()))
    return FIXED[phase]


PHASES = (*FIXED, GRID, MLA_GRID, RAGGED, SHARED, STORES, "all")
