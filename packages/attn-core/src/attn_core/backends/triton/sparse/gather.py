"""Prepare a selection for Hopper's latent decode: count its slots, decode FP8 latents."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_core.cache.layer_cache import LATENT_BLOCK, LayerCache, split_latents
from attn_core.ops.triton.launcher import Launcher, Pointers, alike, moved, pointers

GROUP = tl.constexpr(LATENT_BLOCK)  # values of an FP8 latent that share a scale
_ROWS = 16  # latents that a program decodes


@triton.jit(do_not_specialize=["row_stride", "work_stride", "units", "tokens"])
def count_slots(
    topk_indices, row_stride, work, work_stride, units, tokens,
    TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write rows int32 [tokens + 1]: the slots of each query, its number, and its first unit."""
    token = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    own = topk_indices + token.to(tl.int64) * row_stride
    here = (n < TOPK) & (token < tokens)
    slot = tl.load(own + n, mask=here, other=-1)
    tl.store(work + token, tl.sum((slot >= 0).to(tl.int32)))
    tl.store(work + work_stride + token, token)
    tl.store(work + 2 * work_stride + token, token * units)


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


def counted(topk_indices: Tensor, units: int, launchers: dict[Any, Any]) -> Tensor:
    """Return int32 [3, T + 1]: the slots of each query, its number, its first unit of work.

    Each row is aligned to 16 bytes. launchers: what is kept, of one device.
    """
    (tokens, topk), row = topk_indices.shape, topk_indices.stride(0)
    width = -(-(tokens + 1) // 4) * 4
    work = torch.empty(3, width, dtype=torch.int32, device=topk_indices.device)
    at_slots, at_work = topk_indices.data_ptr(), work.data_ptr()
    key = ("count", topk, row >> 31, alike(topk_indices, at_slots))
    launcher = launchers.get(key)
    if launcher is None:
        block = triton.next_power_of_2(topk)
        launcher = launchers[key] = Launcher(count_slots, topk, block, num_warps=4)
    numbers = (width, units, tokens)
    launcher.launch(
        (tokens + 1, 1, 1),
        (at_slots, row, at_work, *numbers),
        lambda: (topk_indices, row, work, *numbers),
    )
    return work


class _Decoder(NamedTuple):
    """Decodes into one dtype, from one cache that lies at these pointers."""

    launcher: Launcher
    pointers: Pointers
    latents: tuple[Tensor, Tensor, Tensor]
    addresses: tuple[Any, ...]
    dim: int


def decoded(cache: LayerCache, topk_indices: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Decode selected FP8 latents to `dtype`, [T · K, 1, 1, D]; and their slots in it [T, K]."""
    (tokens, topk), row = topk_indices.shape, topk_indices.stride(0)
    at_slots = topk_indices.data_ptr()
    key = ("decode", topk, row >> 31, alike(topk_indices, at_slots), dtype)
    decoder = cache.launchers.get(key)
    if decoder is None or moved(decoder.pointers):
        decoder = cache.launchers[key] = _decoder(cache, topk)
    launcher, _, latents, addresses, dim = decoder
    out = torch.empty(tokens * topk, 1, 1, dim, dtype=dtype, device=topk_indices.device)
    places = torch.empty(tokens, topk, dtype=torch.int32, device=topk_indices.device)
    launcher.launch(
        (tokens, -(-topk // _ROWS), 1),
        (*addresses, at_slots, row, out.data_ptr(), places.data_ptr()),
        lambda: (*latents, topk_indices, row, out, places),
    )
    return out, places


def _decoder(cache: LayerCache, topk: int) -> _Decoder:
    values, scales, rope = latents = split_latents(cache.k, cache.latent_dim)
    v_dim, rope_dim = cache.latent_dim, rope.shape[-1]
    launcher = Launcher(
        decode_selected,
        *(cache.page_size, topk, v_dim, rope_dim, triton.next_power_of_2(rope_dim), _ROWS),
        *(x.stride(axis) for x in (values, scales, rope) for axis in (0, 1)),
        num_warps=4,
    )
    addresses = tuple(x.data_ptr() for x in latents)
    return _Decoder(launcher, pointers(cache.k), latents, addresses, v_dim + rope_dim)
