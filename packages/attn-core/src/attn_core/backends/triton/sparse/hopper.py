"""Launch Hopper's latent decode over selections: each query is a request, and each slot a page."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_core.backends.triton.hopper.common import AttentionConfig
from attn_core.backends.triton.hopper.mla_decode import decode_mla_hopper
from attn_core.backends.triton.hopper.stores import PANEL, SWIZZLED, rows_fit
from attn_core.backends.triton.portable.arguments import (
    Outputs,
    Partials,
    Requests,
    Scales,
    Store,
)
from attn_core.backends.triton.sparse.gather import Brought, Source
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.launcher import Launcher, MapOf, alike
from attn_core.ops.triton.merge import Merge
from attn_core.runtime.layer import AttentionLayer

TILE = 64  # query heads, and keys of a block


def takes(q: Tensor, layer: AttentionLayer, cache: LayerCache) -> bool:
    """Say whether it serves a layer: latents of 512 + 64 columns in q's 16 bits, or in FP8."""
    dims = (q.shape[2], layer.v_head_dim) == (576, 512)
    if not dims or q.dtype.itemsize != 2:
        return False
    return bool(cache.latent_dim) or (cache.k.dtype is q.dtype and rows_fit(cache.k, "NHD"))


class Cut(NamedTuple):
    """How the selection of each query is cut among programs: units of blocks of TILE slots."""

    row_blocks: int
    per_unit: int
    units: int
    programs: int


@functools.lru_cache(1024)
def cut(tokens: int, heads: int, topk: int, processors: int) -> Cut:
    """Cut into as many units as there are programs to take them; 0 processors always cut alike."""
    row_blocks, blocks = -(-heads // TILE), -(-topk // TILE)
    num_parts = max(1, processors // (tokens * row_blocks)) if processors else 8
    per_unit = triton.next_power_of_2(-(-blocks // min(blocks, num_parts)))
    units = -(-blocks // per_unit)
    parts = min(tokens * units, max(1, (processors or tokens * units) // row_blocks))
    return Cut(row_blocks, per_unit, units, parts * row_blocks)


class Attention(NamedTuple):
    """How queries of one form attend in a pass, with its scratch.

    source: brings the latents in the dtype of q. copies: queries are made contiguous first.
    rows: the shape of the queries as TMA reads them. numbers: the tokens, the stride of a row of
    slots, and of latents in a page, a token and a head. partial: outputs and then LSE of the
    units, where there are several, and their addresses; merge: what merges them.
    """

    launcher: Launcher
    source: Source
    copies: bool
    rows: tuple[int, int]
    programs: int
    of_out: tuple[int, ...]
    numbers: tuple[int, int, tuple[int, int, int]]
    partial: Tensor | None
    at_partial: tuple[int, int] | None
    merge: Merge | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        layer: AttentionLayer,
        source: Source,
        latents: Tensor,
        slots: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        processors: int,
        launchers: dict[Any, Any],
    ) -> Attention:
        """Return it for tensors like these, where `takes` says that it serves them.

        latents: [pages, page size, 1, 576], and slots in them, like what the source brings.
        launchers: what is kept, of one device.
        """
        copies = not q.is_contiguous() or q.data_ptr() % 16 != 0
        (tokens, heads, dim), v_dim, size = q.shape, layer.v_head_dim, latents.shape[1]
        row_blocks, per_unit, units, programs = cut(tokens, heads, source.topk, processors)
        token = latents.stride(0) if size == 1 else latents.stride(1)
        strides, of_out, row = (size * token, token, dim), out.stride(), slots.stride(0)
        partial, at_partial, merge, written = None, None, None, lse
        if units > 1:
            padded, rows = row_blocks * TILE, tokens * units * row_blocks * TILE
            written = torch.empty(rows * (v_dim + 1), dtype=torch.float32, device=q.device)
            partial, partial_ptr = written, written.data_ptr()
            at_partial = (partial_ptr, partial_ptr + 4 * rows * v_dim)
            of_parts = (padded * v_dim, units * padded * v_dim, v_dim, 1, padded, units * padded, 1)
            merge = Merge.of(
                tuple(map(alike, (written, written, out, lse))), (units, tokens, heads, v_dim),
                (*of_parts, *of_out, *lse.stride()), launchers, base_2=True,
            )  # fmt: skip
        like_q = q.dtype if copies else alike(q)
        key = (
            "hopper", heads, v_dim, layer.scale, row_blocks, per_unit, row >> 31, strides,
            of_out[:2], like_q, *map(alike, (out, lse, written, slots, latents)),
        )  # fmt: skip
        launcher = launchers.get(key)
        if launcher is None:
            launcher = launchers[key] = _attending(layer, heads, dim, row_blocks, per_unit)
        source.units = units
        return cls(
            launcher, source, copies, (tokens * heads, dim), programs, of_out[:2],
            (tokens, row, strides), partial, at_partial, merge,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Return the bytes of its scratch."""
        return self.source.nbytes + (0 if self.partial is None else self.partial.nbytes)

    def run(
        self, q: Tensor, cache: LayerCache, topk_indices: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        """Attend to the selected slots, into out [T, H, Dv] and lse float32 [T, H]."""
        if self.copies:
            q = q.clone(memory_format=torch.contiguous_format)
        gathered = self.source.bring(cache, topk_indices)
        rows, (tokens, row, strides) = self.rows, self.numbers
        latents, slots, _, (at_lengths, at_ends, at_indptr) = gathered
        at_out, at_lse = out.data_ptr(), lse.data_ptr()
        at_partial = self.at_partial or (at_lse, at_lse)
        self.launcher.launch(
            (self.programs, 1, 1),
            (
                MapOf(q.data_ptr(), rows, (rows[1], 1)), (at_out, at_lse, *self.of_out), at_partial,
                (at_ends, at_lengths, slots.data_ptr()), at_indptr, at_indptr, at_indptr,
                *(tokens, row, (latents.data_ptr(), *strides)),
            ),
            lambda: self._tensors(q, gathered, out, lse),
        )  # fmt: skip
        if self.merge is not None:
            addresses = (*at_partial, at_out, at_lse)
            self.merge.run(addresses, lambda: (*self._parts(out, lse), out, lse))

    def _tensors(self, q: Tensor, gathered: Brought, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
        """Return the arguments with tensors."""
        latents, slots, (lengths, ends, indptr), _ = gathered
        rows, (tokens, row, strides) = self.rows, self.numbers
        return (
            TensorDescriptor(q, [*rows], [rows[1], 1], [TILE, PANEL], SWIZZLED),
            Outputs(out, lse, *self.of_out), Partials(*self._parts(out, lse)),
            Requests(ends, lengths, slots), indptr, indptr, indptr, tokens, row,
            Store(latents, *strides),
        )  # fmt: skip

    def _parts(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs and LSE of the units."""
        if (partial := self.partial) is None:
            return lse, lse
        states = partial.numel() // (out.shape[2] + 1)
        return partial[:-states], partial[-states:]


def _attending(
    layer: AttentionLayer, heads: int, dim: int, row_blocks: int, per_unit: int
) -> Launcher:
    config = AttentionConfig(
        HEADS=1, GROUP=heads, PAGE=1, HND=False, GATHERS=True, BN=TILE, D=dim, USE_SOFTCAP=False,
        USE_SINKS=False, MASK=0, WINDOW=False, STAGES=2, INT64_OFFSETS=True,
        ROW_BLOCKS=row_blocks, BLOCKS_PER_UNIT=per_unit, BATCH_INVARIANT=True,
    )  # fmt: skip
    return Launcher(decode_mla_hopper, Scales(layer.scale, 1.0, 1.0), config, num_warps=4)
