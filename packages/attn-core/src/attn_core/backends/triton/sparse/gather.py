"""Prepare a selection for Hopper's latent decode: count its slots, decode FP8 latents."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_core.backends.triton.sparse.passes import MOST_KEPT
from attn_core.cache.layer_cache import LayerCache, split_latents
from attn_core.dtypes import LATENT_BLOCK
from attn_core.ops.triton.gather import (
    Count,
    count_row,
    empty_pages,
    gather_pages,
    pages_key,
)
from attn_core.ops.triton.launcher import (
    Launcher,
    Pointers,
    alike,
    moved,
    numbered,
    pointers,
)
from attn_core.ops.triton.read import saturated
from attn_core.runtime.batch import CacheView

GROUP = tl.constexpr(LATENT_BLOCK)  # values of an FP8 latent that share a scale
_ROWS = 16  # latents that a program decodes


@triton.jit(do_not_specialize=["row_stride", "units", "tokens"])
def count_slots(
    topk_indices, row_stride, work, units, tokens, TOPK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Count the slots of each query, and of one more than there are."""
    count_row(topk_indices, row_stride, tl.program_id(0), work, units, tokens, TOPK, BLOCK)


@triton.jit(do_not_specialize=["row_stride", "units", "tokens"])
def decode_selected(
    topk_indices, row_stride, out, places, work, units, tokens, values, scales, rope_parts,
    PAGE: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, DV: tl.constexpr,
    DR: tl.constexpr, BDR: tl.constexpr, ROWS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, SCALES_PAGE: tl.constexpr,
    SCALES_TOKEN: tl.constexpr, ROPE_PAGE: tl.constexpr, ROPE_TOKEN: tl.constexpr,
):  # fmt: skip
    """Decode ROWS selected latents of a query into out [T, TOPK, DV + DR], and say where they are.

    places int32 [T, TOPK] are their slots in out, -1 where nothing is selected. The first programs
    of each query do what count_slots does.
    """
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        count_row(
            topk_indices, row_stride, tl.program_id(0), work, units, tokens, TOPK, BLOCK
        )  # fmt: skip
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = (n < TOPK) & (token < tokens)
    slot = tl.load(topk_indices + token * row_stride + n, mask=mask, other=-1)
    valid = slot >= 0
    row = token * TOPK + n
    tl.store(places + row, tl.where(valid, row, -1).to(tl.int32), mask=mask)
    page = (slot // PAGE).to(tl.int64)
    inner = slot % PAGE
    out_ptrs = out + row[:, None] * (DV + DR)
    offsets = page * PAGE_STRIDE + inner * TOKEN_STRIDE
    at_scale = page * SCALES_PAGE + inner * SCALES_TOKEN
    for group in tl.static_range(DV // GROUP):
        d = group * GROUP + tl.arange(0, GROUP)
        x = tl.load(values + offsets[:, None] + d[None, :], mask=valid[:, None], other=0.0)
        scale = tl.load(scales + at_scale + group, mask=valid, other=0.0)
        x = saturated(x.to(tl.float32) * scale[:, None], out.dtype.element_ty)
        tl.store(out_ptrs + d[None, :], x, mask=valid[:, None])
    r = tl.arange(0, BDR)
    rope_mask = valid[:, None] & (r < DR)[None, :]
    of_slot = rope_parts + (page * ROPE_PAGE + inner * ROPE_TOKEN)[:, None]
    y = tl.load(of_slot + r[None, :], mask=rope_mask, other=0.0)
    tl.store(out_ptrs + DV + r[None, :], y.to(out.dtype.element_ty), mask=rope_mask)


Brought = tuple[Tensor, Tensor, Tensor, tuple[int, int, int]]


class Source:
    """Brings the latents of a cache as they are, and counts the selected slots of each query.

    topk_indices: like those of all layers. launchers: what is kept, of one device.
    units: of work for a query, set by who attends. nbytes: of the latents that it holds.
    """

    nbytes = 0

    def __init__(self, topk_indices: Tensor, launchers: dict[Any, Any]) -> None:
        self.tokens, self.topk = topk_indices.shape
        self.row, self.units, self.launchers = topk_indices.stride(0), 1, launchers
        width = self.tokens // 4 * 4 + 4  # each row is aligned to 16 bytes
        self.work = torch.empty(3, width, dtype=torch.int32, device=topk_indices.device)
        work_ptr = self.work.data_ptr()
        self.at_work = (work_ptr, work_ptr + 4 * width, work_ptr + 8 * width)
        self.counts = self._counting(topk_indices)

    def _counting(self, topk_indices: Tensor) -> Launcher:
        key = ("count", self.topk, self.row >> 31, alike(topk_indices))
        launcher: Launcher | None = self.launchers.get(key)
        if launcher is None:
            block = triton.next_power_of_2(self.topk)
            launcher = Launcher(count_slots, self.topk, block, num_warps=4)
            self.launchers[key] = launcher
        return launcher

    def count(self, topk_indices: Tensor) -> None:
        """Write int32 [3, T + 1]: the slots of each query, its number, its first unit of work."""
        numbers = (self.units, self.tokens)
        self.counts.launch(
            (self.tokens + 1, 1, 1),
            (topk_indices.data_ptr(), self.row, self.at_work[0], *numbers),
            (topk_indices, self.row, self.work, *numbers),
        )

    def bring(self, cache: LayerCache, topk_indices: Tensor) -> Brought:
        """Return latents, the slots in them, and what `count` writes, with its addresses."""
        self.count(topk_indices)
        return cache.k, topk_indices, self.work, self.at_work


class _Decoder(NamedTuple):
    """Decodes into one dtype, from one cache that lies at these pointers."""

    launcher: Launcher
    pointers: Pointers


class Selected(Source):
    """Brings the FP8 latents that are selected, decoded to `dtype`: [T · K, 1, 1, D]."""

    def __init__(
        self,
        topk_indices: Tensor,
        launchers: dict[Any, Any],
        cache: LayerCache,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(topk_indices, launchers)
        device, dim = topk_indices.device, cache.latent_dim + cache.latents[2].shape[-1]
        self.latents = torch.empty(topk_indices.numel(), 1, 1, dim, dtype=dtype, device=device)
        self.slots = torch.empty(topk_indices.shape, dtype=torch.int32, device=device)
        self.nbytes = self.latents.nbytes
        self._to = (self.latents.data_ptr(), self.slots.data_ptr(), self.at_work[0])
        key_parts = (self.topk, self.row >> 31, alike(topk_indices), dtype)
        self._decoder = ("decode", numbered(key_parts))

    def bring(self, cache: LayerCache, topk_indices: Tensor) -> Brought:
        """Decode them in one launch, which counts them too."""
        decoder: _Decoder | None = cache.launchers.get(self._decoder)
        if decoder is None or moved(decoder.pointers):
            decoder = cache.launchers[self._decoder] = _decoder(cache, self.topk)
        numbers = (self.units, self.tokens)
        decoder.launcher.launch(
            (self.tokens + 1, -(-self.topk // _ROWS), 1),
            (topk_indices.data_ptr(), self.row, *self._to, *numbers),
            (topk_indices, self.row, self.latents, self.slots, self.work, *numbers),
        )
        return self.latents, self.slots, self.work, self.at_work


class Pages(Source):
    """Brings the FP8 latents of all pages of a pass, decoded to `dtype`.

    latents, slots: like those that it brings. It brings the latter, and where they are few also the
    former; more are made for each layer.
    """

    def __init__(
        self,
        topk_indices: Tensor,
        launchers: dict[Any, Any],
        view: CacheView,
        cache: LayerCache,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(topk_indices, launchers)
        self._of, self._dtype = (view.page_table, view.seq_lens, view.max_seq_len), dtype
        pages = view.page_table.shape[0] * -(-view.max_seq_len // cache.page_size)
        self._pages = (pages, cache.page_size, 1, cache.latent_dim + cache.latents[2].shape[-1])
        self._few = math.prod(self._pages) * dtype.itemsize <= MOST_KEPT
        self._into = empty_pages(cache, pages if self._few else 0, topk_indices, dtype)
        self.latents, _, self.slots = self._into
        self.nbytes = self.latents.nbytes
        self._key = pages_key(view.page_table, view.seq_lens, topk_indices, dtype, counts=True)

    def bring(self, cache: LayerCache, topk_indices: Tensor) -> Brought:
        """Decode them, and count while their slots are found."""
        buffers = self._into
        if not self._few:
            buffers = (buffers[0].new_empty(self._pages), *buffers[1:])
        count = Count(self.work, self.at_work[0], self.units)
        arguments = (*self._of, topk_indices, self._dtype, buffers, count, self._key)
        read = gather_pages(cache, *arguments)
        return *read, self.work, self.at_work


def _decoder(cache: LayerCache, topk: int) -> _Decoder:
    values, scales, rope = latents = split_latents(cache.k, cache.latent_dim)
    v_dim, rope_dim = cache.latent_dim, rope.shape[-1]
    launcher = Launcher(
        decode_selected,
        *(*latents, cache.page_size, topk, triton.next_power_of_2(topk), v_dim, rope_dim),
        *(triton.next_power_of_2(rope_dim), _ROWS),
        *(x.stride(axis) for x in (values, scales, rope) for axis in (0, 1)),
        num_warps=4,
    )
    return _Decoder(launcher, pointers(cache.k))
