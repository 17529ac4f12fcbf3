"""Decode the pages of a pass from FP8 latents of sparse MLA, and find selected slots in them."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache, split_latents
from attn_core.dtypes import LATENT_BLOCK
from attn_core.ops.triton.launcher import (
    Launcher,
    Pointers,
    alike,
    moved,
    numbered,
    pointers,
)
from attn_core.ops.triton.read import e4m3, saturated

_GROUP = tl.constexpr(LATENT_BLOCK)  # values of a latent that share a scale
_ROWS = 16  # latents that a program decodes
_SLOTS = 1024  # slots that a program finds


@triton.jit(do_not_specialize=["table_stride", "columns", "rows"])
def decode_pages(
    page_table, table_stride, seq_lens, columns, rows, out, place, values, scales, rope_parts,
    PAGE: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr, BDR: tl.constexpr, ROWS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, SCALES_PAGE: tl.constexpr,
    SCALES_TOKEN: tl.constexpr, ROPE_PAGE: tl.constexpr, ROPE_TOKEN: tl.constexpr,
):  # fmt: skip
    """Decode ROWS tokens of the first `columns` pages of each request into out [rows, DV + DR].

    Pages behind a request's keys are left out. place int32 [pages] says where a page is in out; of
    one that several requests share, any of its copies.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    number = row // PAGE
    inner = row % PAGE
    request = number // columns
    column = number % columns
    row_mask = row < rows
    length = tl.load(seq_lens + request, mask=row_mask, other=0)
    token_mask = row_mask & (column * PAGE < length)
    page = tl.load(page_table + request * table_stride + column, mask=token_mask, other=0).to(
        tl.int64
    )
    tl.store(place + page, number.to(tl.int32), mask=token_mask & (inner == 0))
    out_ptrs = out + row[:, None] * (DV + DR)
    offsets = page * PAGE_STRIDE + inner * TOKEN_STRIDE
    scale_offsets = page * SCALES_PAGE + inner * SCALES_TOKEN
    for group in tl.static_range(DV // _GROUP):
        d = group * _GROUP + tl.arange(0, _GROUP)
        bits = tl.load(values + offsets[:, None] + d[None, :], mask=token_mask[:, None], other=0)
        scale = tl.load(scales + scale_offsets + group, mask=token_mask, other=0.0)
        x = e4m3(bits.to(tl.int32)) * scale[:, None]
        x = saturated(x, out.dtype.element_ty)
        tl.store(out_ptrs + d[None, :], x, mask=token_mask[:, None])
    r = tl.arange(0, BDR)
    rope_mask = token_mask[:, None] & (r < DR)[None, :]
    rope_ptrs = rope_parts + (page * ROPE_PAGE + inner * ROPE_TOKEN)[:, None]
    y = tl.load(rope_ptrs + r[None, :], mask=rope_mask, other=0.0)
    tl.store(out_ptrs + DV + r[None, :], y.to(tl.float32).to(out.dtype.element_ty), mask=rope_mask)


@triton.jit
def count_row(topk_indices, row_stride, token, work, units, tokens, TOPK, BLOCK: tl.constexpr):
    """Write to work int32 [3, stride] the slots of a query, its number, and its first unit."""
    n = tl.arange(0, BLOCK)
    mask = (n < TOPK) & (token < tokens)
    slot = tl.load(topk_indices + token.to(tl.int64) * row_stride + n, mask=mask, other=-1)
    stride = tokens // 4 * 4 + 4
    tl.store(work + token, tl.sum((slot >= 0).to(tl.int32)))
    tl.store(work + stride + token, token)
    tl.store(work + 2 * stride + token, token * units)


@triton.jit(do_not_specialize=["row_stride", "topk", "tokens", "units"])
def place_slots(
    topk_indices, row_stride, place, slots, topk, tokens, work, units,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Write the slots of a query among the pages that decode_pages decoded; -1 stays.

    COUNT > 0, the slots of a query rounded up: the first programs of each query, and of one more
    than there are, count them.
    """
    if COUNT > 0:  # noqa: SIM102  # compiled in or out
        if tl.program_id(1) == 0:
            count_row(
                topk_indices, row_stride, tl.program_id(0), work, units, tokens, topk, COUNT
            )  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (n < topk) & (token < tokens)
    slot = tl.load(topk_indices + token * row_stride + n, mask=mask, other=-1)
    selected = slot >= 0
    number = tl.load(place + slot // PAGE, mask=selected, other=0)
    new = tl.where(selected, number * PAGE + slot % PAGE, -1)
    tl.store(slots + token * topk + n, new, mask=mask)


class Count(NamedTuple):
    """Where count_row writes: work int32 [3, stride], its address, and the units of a query."""

    work: Tensor
    address: int
    units: int


class _Gatherer(NamedTuple):
    """Decodes into one dtype, from one cache that lies at these pointers, and finds slots."""

    decode: Launcher
    find: Launcher
    pointers: Pointers


Gathered = tuple[Tensor, Tensor, Tensor]


def empty_pages(
    cache: LayerCache, pages: int, topk_indices: Tensor, dtype: torch.dtype
) -> Gathered:
    """Return what gather_pages fills: latents of so many pages, their places, and slots."""
    size, device = cache.page_size, topk_indices.device
    dim = cache.latent_dim + cache.latents[2].shape[-1]
    return (
        torch.empty(pages, size, 1, dim, dtype=dtype, device=device),
        torch.empty(cache.num_pages, dtype=torch.int32, device=device),
        torch.empty(topk_indices.shape, dtype=torch.int32, device=device),
    )


def gather_pages(
    cache: LayerCache,
    page_table: Tensor,
    seq_lens: Tensor,
    longest: int,
    topk_indices: Tensor,
    dtype: torch.dtype,
    buffers: Gathered | None = None,
    count: Count | None = None,
    key: Hashable = None,
) -> tuple[Tensor, Tensor]:
    """Return the pages of a pass in `dtype`, [n, page size, 1, D], and the selected slots in them.

    page_table int32 [B, columns], seq_lens int32 [B], longest: an upper bound of these.
    topk_indices int32 [T, K]: keys of the requests, or -1. What lies in pages behind a request's
    keys may be anything. Two launches, bit for bit what attn_core.ops.kv.read_pages reads; only the
    payload of a NaN may differ. Never syncs.
    buffers: of empty_pages, to be filled. count: also count the slots of each query. key: that of
    pages_key, where it is known.
    """
    size, (tokens, topk) = cache.page_size, topk_indices.shape
    columns = -(-longest // size)
    pages = page_table.shape[0] * columns
    stride, row = page_table.stride(0), topk_indices.stride(0)
    if key is None:
        key = pages_key(page_table, seq_lens, topk_indices, dtype, counts=count is not None)
    x: _Gatherer | None = cache.launchers.get(key)
    if x is None or moved(x.pointers):
        x = cache.launchers[key] = _gatherer(cache, topk if count else 0)
    latents, place, slots = buffers or empty_pages(cache, pages, topk_indices, dtype)
    place_ptr = place.data_ptr()
    if pages:
        x.decode.launch(
            (-(-pages * size // _ROWS), 1, 1),
            (
                page_table.data_ptr(), stride, seq_lens.data_ptr(), columns, pages * size,
                latents.data_ptr(), place_ptr,
            ),
            (page_table, stride, seq_lens, columns, pages * size, latents, place),
        )  # fmt: skip
    if tokens:
        work, work_ptr, units = count or (slots, slots.data_ptr(), 0)
        x.find.launch(
            (tokens + (count is not None), -(-topk // _SLOTS), 1),
            (
                topk_indices.data_ptr(), row, place_ptr, slots.data_ptr(), topk, tokens, work_ptr,
                units,
            ),
            (topk_indices, row, place, slots, topk, tokens, work, units),
        )  # fmt: skip
    return latents, slots


def pages_key(
    page_table: Tensor, seq_lens: Tensor, topk_indices: Tensor, dtype: torch.dtype, *, counts: bool
) -> int:
    """Return a number that is equal where gather_pages launches the same kernels over a cache."""
    tensors = (page_table, seq_lens, topk_indices)
    far = (page_table.stride(0) >> 31, topk_indices.stride(0) >> 31)
    topk = topk_indices.shape[1] if counts else 0
    return numbered(("pages", dtype, *far, topk, *map(alike, tensors)))


def _gatherer(cache: LayerCache, counted: int) -> _Gatherer:
    values, scales, rope = split_latents(cache.k, cache.latent_dim)
    inner, width = 2 if cache.layout == "HND" else 1, rope.shape[-1]
    decode = Launcher(
        decode_pages,
        *(values.view(torch.uint8), scales, rope, cache.page_size, cache.latent_dim, width),
        *(triton.next_power_of_2(max(1, width)), _ROWS),
        *(x.stride(axis) for x in (values, scales, rope) for axis in (0, inner)),
        num_warps=4,
    )
    columns = triton.next_power_of_2(counted) if counted else 0
    find = Launcher(place_slots, cache.page_size, _SLOTS, columns, num_warps=4)
    return _Gatherer(decode, find, pointers(cache.k))
