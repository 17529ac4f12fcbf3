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
from attn_core.backends.triton.sparse.gather import counted, decoded
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.launcher import Launcher, MapOf, alike
from attn_core.ops.triton.merge import Merge, launch_merge
from attn_core.runtime.layer import AttentionLayer

__all__ = ["attend", "decoded", "takes"]
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
    wanted = max(1, processors // (tokens * row_blocks)) if processors else 8
    per_unit = triton.next_power_of_2(-(-blocks // min(blocks, wanted)))
    units = -(-blocks // per_unit)
    parts = min(tokens * units, max(1, (processors or tokens * units) // row_blocks))
    return Cut(row_blocks, per_unit, units, parts * row_blocks)


def attend(
    q: Tensor,
    layer: AttentionLayer,
    latents: Tensor,
    topk_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    processors: int,
    launchers: dict[Any, Any],
) -> None:
    """Do what launch.attend does, for what `takes` says.

    latents: [pages, page size, 1, 576] in the dtype of q. launchers: what is kept, of one device.
    """
    if not q.is_contiguous() or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    (tokens, heads, dim), v_dim, size = q.shape, layer.v_head_dim, latents.shape[1]
    row_blocks, per_unit, units, programs = cut(tokens, heads, topk_indices.shape[1], processors)
    counts = counted(topk_indices, units, launchers)
    rows = tokens * units * row_blocks * TILE
    partial = lse
    if units > 1:  # outputs, then their LSE
        partial = torch.empty(rows * (v_dim + 1), dtype=torch.float32, device=q.device)
    tensors = (q, out, lse, partial, topk_indices, latents)
    at_q, at_out, at_lse, at_partial, at_slots, at_latents = places = [
        x.data_ptr() for x in tensors
    ]
    like_q, like_out, like_lse, like_partial, *likes = map(alike, tensors, places)
    at_states = at_partial + 4 * rows * v_dim if units > 1 else at_lse
    at_counts, width = counts.data_ptr(), 4 * counts.shape[1]
    token = latents.stride(0) if size == 1 else latents.stride(1)
    strides, of_out, row = (size * token, token, dim), out.stride(), topk_indices.stride(0)
    key = (
        "hopper", heads, v_dim, layer.scale, row_blocks, per_unit, row >> 31, strides, of_out[:2],
        like_q, like_out, like_lse, like_partial, *likes,
    )  # fmt: skip
    launcher = launchers.get(key)
    if launcher is None:
        launcher = launchers[key] = _attending(layer, heads, dim, row_blocks, per_unit)

    def arguments() -> tuple[Any, ...]:
        descriptor = TensorDescriptor(q, [tokens * heads, dim], [dim, 1], [TILE, PANEL], SWIZZLED)
        lengths, ends, indptr = counts
        return (
            descriptor, Outputs(out, lse, *of_out[:2]), Partials(*states()),
            Requests(ends, lengths, topk_indices), indptr, indptr, tokens, row,
            Store(latents, *strides),
        )  # fmt: skip

    def states() -> tuple[Tensor, Tensor]:
        whole = units > 1
        return (partial[: rows * v_dim], partial[rows * v_dim :]) if whole else (lse, lse)

    at_indptr = at_counts + 2 * width
    launcher.launch(
        (programs, 1, 1),
        (
            MapOf(at_q, (tokens * heads, dim), (dim, 1)), (at_out, at_lse, *of_out[:2]),
            (at_partial, at_states), (at_counts + width, at_counts, at_slots), at_indptr, at_indptr,
            tokens, row, (at_latents, *strides),
        ),
        arguments,
    )  # fmt: skip
    if units > 1:
        padded = row_blocks * TILE
        of_parts = (padded * v_dim, units * padded * v_dim, v_dim, 1, padded, units * padded, 1)
        merge = Merge(
            (at_partial, at_states, at_out, at_lse),
            (like_partial, like_partial, like_out, like_lse),
            (units, tokens, heads, v_dim),
            (*of_parts, *of_out, *lse.stride()),
            base_2=True,
        )
        launch_merge(merge, lambda: (*states(), out, lse), launchers)


def _attending(
    layer: AttentionLayer, heads: int, dim: int, row_blocks: int, per_unit: int
) -> Launcher:
    config = AttentionConfig(
        HEADS=1, GROUP=heads, PAGE=1, HND=False, GATHERS=True, BN=TILE, D=dim, USE_SOFTCAP=False,
        USE_SINKS=False, MASK=0, WINDOW=False, STAGES=2, INT64_OFFSETS=True,
        ROW_BLOCKS=row_blocks, BLOCKS_PER_UNIT=per_unit, BATCH_INVARIANT=True,
    )  # fmt: skip
    return Launcher(decode_mla_hopper, Scales(layer.scale, 1.0, 1.0), config, num_warps=4)
