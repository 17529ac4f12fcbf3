"""Finds the keys that neighbouring requests share, so that a pass reads them once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from attn_core.backends.triton.portable.arguments import FIRST_SPAN, SPAN, Requests
from attn_core.backends.triton.portable.first_spans import Cut
from attn_core.backends.triton.portable.plan_shared import plan_shared
from attn_core.backends.triton.tuning import Launch, power_of_two
from attn_core.costs.shared_prefix import (
    SHARED_TILE_ROWS,
    fits_tile,
    is_latent,
    shared_granule,
)
from attn_core.ops.triton.launcher import Launcher, alike
from attn_core.runtime.layer import LayerGroup

TILE_UNITS = 4  # blocks of keys that tiles of drafts and of latents count beside theirs
LARGE_TILE_UNITS = 1  # that tiles of 128 rows count at most
TILE_UNITS_FROM = 16  # query rows of a request from which on they do
PARTS_PER_PROCESSOR = 2  # the most, of kernels that read the spans which parts begin in
# of a buffer for the plan of a batch before its first spans: work_indptr, spans and shared keys
_ROWS = 2 + SPAN.value


class Sharing(NamedTuple):
    """How keys are shared: groups begin and end at multiples of `granule` keys, a multiple of BN.

    page_size: tokens of a page. group: query heads of a KV head. tile_units: see Split.
    """

    granule: int
    page_size: int
    group: int
    tile_units: int = 0


class Parts(NamedTuple):
    """How the work is cut: into num_parts of min_units or more, which KV heads take in turns.

    num_parts: 0 where no kernel reads the spans that parts begin in.
    """

    min_units: int
    turns: int
    num_parts: int


NO_PARTS = Parts(min_units=1, turns=1, num_parts=0)


def sharing_of(
    group: LayerGroup, queries: int, page_size: int, store_bytes: int, launch: Launch
) -> Sharing | None:
    """Return how requests of `queries` share keys; None where no two of them fit a tile.

    store_bytes: of a value in the store. Beside their keys, tiles of drafts and of latents count
    units; decode is faster without, and few rows with half of them where a step is large. A tile of
    128 rows counts no more than one.
    """
    rows = queries * group.num_queries_per_kv
    if not fits_tile(rows, max(launch.block_m, SHARED_TILE_ROWS)):
        return None
    granule = shared_granule(rows, group.head_dim, group.v_head_dim, store_bytes)
    tiled = queries > 1 or is_latent(group.head_dim, group.v_head_dim)
    tile_units = TILE_UNITS if tiled and rows >= TILE_UNITS_FROM else 0
    if rows <= TILE_UNITS_FROM and launch.block_n > 64:
        tile_units //= 2
    if launch.block_m > SHARED_TILE_ROWS:
        tile_units = min(tile_units, LARGE_TILE_UNITS)
    return Sharing(granule, page_size, group.num_queries_per_kv, tile_units)


def buffer_shape(requests: int, processors: int) -> tuple[int, int]:
    """Return rows and columns of a buffer for the plan of a batch.

    processors: those of the device, 0 where requests do not share keys. The last rows take the
    spans that parts begin in.
    """
    spans = 2 * requests if processors else requests
    columns = -(-(spans + 3) // FIRST_SPAN.value) * FIRST_SPAN.value  # lines of the cache
    if not processors:
        return 4, columns
    parts = processors * PARTS_PER_PROCESSOR
    return _ROWS + -(-parts * FIRST_SPAN.value // columns), columns


def spans_of(buffer: Tensor) -> Tensor:
    """Return the spans int32 [columns, SPAN] in a buffer int32 [rows, columns]."""
    return buffer[1 : 1 + SPAN.value].view(-1, SPAN.value)


def first_spans_of(buffer: Tensor) -> Tensor:
    """Return where the spans that parts begin in lie in a buffer: int32, FIRST_SPAN of each."""
    return buffer[_ROWS:].view(-1)


def fill_spans(
    planners: dict[Hashable, Launcher],
    requests: Requests,
    buffer: Tensor,
    counter: Tensor,
    launch: Launch,
    sharing: Sharing,
    parts: Parts = NO_PARTS,
) -> None:
    """Fill the spans and the work_indptr of a batch: one small launch that a graph can record.

    buffer: int32 [rows, columns], see buffer_shape; its first row takes work_indptr int32
    [2 · batch + 1]. counter: int32 [1], zero before and after.
    """
    cu_seqlens_q, seq_lens, table = requests
    batch = seq_lens.shape[0]
    tensors = (cu_seqlens_q, seq_lens, table, buffer, counter)
    key = (table.stride(0) >> 31, *map(alike, tensors))
    launcher = planners.get(key)
    if launcher is None:
        launcher = planners[key] = Launcher(
            plan_shared,
            *(sharing.granule, sharing.group, launch.block_m, power_of_two(batch)),
            2048 if sharing.page_size < 8 else 512,
            Cut(
                *(sharing.page_size, launch.block_n, sharing.tile_units, *parts),
                power_of_two(parts.num_parts),
            ),
            num_warps=4,
        )
    launcher.launch((batch, 1, 1), (*tensors, batch, table.stride(0), buffer.stride(0)))
