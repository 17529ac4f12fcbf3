"""Prepare a selection for Hopper's latent decode: count its slots, decode FP8 latents."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_core.cache.layer_cache import LATENT_BLOCK, LayerCache

GROUP = tl.constexpr(LATENT_BLOCK)  # values of an FP8 latent that share a scale
_ROWS = 16  # latents that a program decodes


@triton.jit(do_not_specialize=["row_stride", "units", "tokens"])
def count_slots(
    topk_indices, row_stride, work, units, tokens, TOPK: tl.constexpr, BLOCK: tl.constexpr
):
    """Write three int32 [tokens + 1]: the slots of each query, its number, and its first unit."""
    token = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    own = topk_indices + token.to(tl.int64) * row_stride
    here = (n < TOPK) & (token < tokens)
    slot = tl.load(own + n, mask=here, other=-1)
    tl.store(work + token, tl.sum((slot >= 0).to(tl.int32)))
    tl.store(work + (tokens + 1) + token, token)
    tl.store(work + 2 * (tokens + 1) + token, token * units)


@triton.jit(do_not_specialize=["row_stride"])
def decode_selected(
    values, scales, rope_parts, topk_indices, row_stride, out, places,
    PAGE: tl.constexpr, TOPK: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr,
    BDR: tl.constexpr, ROWS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, SCALES_PAGE: tl.constexpr,
    SCALES_TOKEN: tl.constexpr, ROPE_PAGE: tl.constexpr, ROPE_TOKEN: tl.constexpr,
):  # fmt: skip
    """Decode ROWS selected latents of a query into out [T, TOPK, DV + DR], and say where they are.

    places int32 [T, TOPK] are their slots in out, -1 where nothing is selected.
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(topk_indices + token * row_stride + n, mask=n < TOPK, other=-1)
    used = slot >= 0
    row = token * TOPK + n
    tl.store(places + row, tl.where(used, row, -1).to(tl.int32), mask=n < TOPK)
    page = (slot // PAGE).to(tl.int64)
    inner = slot % PAGE
    to = out + row[:, None] * (DV + DR)
    at = page * PAGE_STRIDE + inner * TOKEN_STRIDE
    at_scale = page * SCALES_PAGE + inner * SCALES_TOKEN
    for group in tl.static_range(DV // GROUP):
        d = group * GROUP + tl.arange(0, GROUP)
        x = tl.load(values + at[:, None] + d[None, :], mask=used[:, None], other=0.0)
        scale = tl.load(scales + at_scale + group, mask=used, other=0.0)
        x = x.to(tl.float32) * scale[:, None]
        tl.store(to + d[None, :], x.to(out.dtype.element_ty), mask=used[:, None])
    r = tl.arange(0, BDR)
    inside = used[:, None] & (r < DR)[None, :]
    of_slot = rope_parts + (page * ROPE_PAGE + inner * ROPE_TOKEN)[:, None]
    y = tl.load(of_slot + r[None, :], mask=inside, other=0.0)
    tl.store(to + DV + r[None, :], y.to(out.dtype.element_ty), mask=inside)


def counted(topk_indices: Tensor, units: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return int32 [T + 1] each: the slots of each query, its number, its first unit of work."""
    (tokens, topk), device = topk_indices.shape, topk_indices.device
    work = torch.empty(3, tokens + 1, dtype=torch.int32, device=device)
    count_slots[(tokens + 1,)](
        topk_indices, topk_indices.stride(0), work, units, tokens, topk,
        triton.next_power_of_2(topk), num_warps=4,
    )  # fmt: skip
    counts, ends, indptr = work
    return counts, ends, indptr


def decoded(cache: LayerCache, topk_indices: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Decode selected FP8 latents to `dtype`, [T · K, 1, 1, D]; and their slots in it [T, K]."""
    values, scales, rope = cache.latents
    (tokens, topk), device = topk_indices.shape, topk_indices.device
    v_dim, rope_dim = cache.latent_dim, rope.shape[-1]
    out = torch.empty(tokens * topk, 1, 1, v_dim + rope_dim, dtype=dtype, device=device)
    places = torch.empty(tokens, topk, dtype=torch.int32, device=device)
    decode_selected[(tokens, triton.cdiv(topk, _ROWS))](
        values, scales, rope, topk_indices, topk_indices.stride(0), out, places,
        cache.page_size, topk, v_dim, rope_dim, triton.next_power_of_2(rope_dim), _ROWS,
        *(x.stride(axis) for x in (values, scales, rope) for axis in (0, 1)),
        num_warps=4,
    )  # fmt: skip
    return out, places
