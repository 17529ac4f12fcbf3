"""Kernels of split-KV: one launch writes outputs and partials, a second one merges the partials."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

from attn_core.backends.triton.kernel import Call, Kernel, Launchers, Pass, PassLaunch
from attn_core.backends.triton.portable.arguments import MergeConstants, Scales, Split
from attn_core.backends.triton.portable.merge import merge_splits
from attn_core.backends.triton.portable.merge_tiles import merge_tiles
from attn_core.backends.triton.portable.plan_tiles import most_slots
from attn_core.backends.triton.schedule import Cuts, SplitKV, Tiles
from attn_core.backends.triton.tuning import Launch, power_of_two
from attn_core.ops.triton.launcher import Arguments, Grid, Launcher
from attn_core.runtime.layer import AttentionLayer


class _Kept(Protocol):
    @property
    def sinks(self) -> Any: ...
    @property
    def scales(self) -> Scales: ...


class SplitKernel(Kernel[SplitKV]):
    """A kernel whose partials merge_splits merges."""

    @abstractmethod
    def arguments(self, inputs: Pass, part: SplitKV) -> Arguments:
        """Return what all its launches in a pass share."""

    @abstractmethod
    def make_attend(self, call: Call, bound: Any, launch: Launch, part: SplitKV) -> Launcher:
        """Return its own launcher for calls with this key."""

    def pass_launch(self, call: Call, launch: Launch, part: SplitKV) -> PassLaunch:
        """Return how the layers of this call's group launch it in this pass."""
        inputs = call.inputs
        return PassLaunch(
            (part.cuts.programs, 1, 1),
            self.arguments(inputs, part),
            None if part.unsplit else _merge(inputs, part),
        )

    def make_launchers(self, call: Call, bound: Any, launch: Launch, part: SplitKV) -> Launchers:
        """Return launchers for calls with this key."""
        merge = None if part.unsplit else _merge_launcher(call.layer, bound, part.cuts)
        return Launchers(self.make_attend(call, bound, launch, part), merge)


def constants_of(cuts: Cuts) -> Split:
    """Return the constants of a split."""
    shared = cuts.sharing is not None
    tile_units = 0 if cuts.sharing is None else cuts.sharing.tile_units
    keys = (cuts.row_blocks, cuts.blocks_per_unit, cuts.batch_invariant, cuts.min_units)
    return Split(*keys, shared, tile_units, cuts.planned_quota, cuts.heads_at_once)


def _merge(inputs: Pass, part: SplitKV) -> tuple[Grid, Arguments]:
    """Return the grid of merge_splits and its arguments in a pass, whichever kernel splits."""
    cuts, cu_seqlens_q = part.cuts, inputs.requests.cu_seqlens_q
    columns, rows, _, _ = cuts.merge_tile
    tiles = cuts.programs if cuts.merges_cuts else cuts.tiles
    grid = (tiles, -(-cuts.tile_rows // rows), part.partial_out.shape[1] // columns)
    shared = (part.partials, cu_seqlens_q, part.work_indptr, part.spans)
    return grid, Arguments(*shared, inputs.size, cuts.programs)


def _merge_launcher(layer: AttentionLayer, bound: _Kept, cuts: Cuts) -> Launcher:
    columns, rows, partials, warps = cuts.merge_tile
    return Launcher(
        merge_splits,
        *(bound.sinks, bound.scales.v),
        *(cuts.launch.block_m, rows, columns, partials, cuts.group_partials),
        *(cuts.overlap, cuts.merges_cuts),
        constants_of(cuts),
        _merged(layer),
        num_warps=warps,
        **({"launch_pdl": True} if cuts.overlap else {}),
    )


_MERGERS = 4  # programs of merge_tiles that take rows of a part
_MERGED_ROWS = 8  # at a time


def merge_of_tiles(inputs: Pass, part: Tiles) -> tuple[Grid, Arguments] | None:
    """Return the grid of merge_tiles and its arguments in a pass; None where no keys are cut."""
    if part.parts is None:
        return None
    shared = (part.parts, inputs.requests.cu_seqlens_q, part.tile_offsets, part.request_order)
    return (most_slots(part.processors), _MERGERS, 1), Arguments(*shared, inputs.size)


def tiles_merger(layer: AttentionLayer, bound: _Kept, tile_rows: int, *, overlap: bool) -> Launcher:
    """Return the launcher of merge_tiles. overlap: whether the device can launch it early."""
    return Launcher(
        merge_tiles,
        *(bound.sinks, bound.scales.v, tile_rows, _MERGED_ROWS, overlap, _merged(layer)),
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )


def _merged(layer: AttentionLayer) -> MergeConstants:
    heads, width = layer.num_kv_heads, power_of_two(layer.v_head_dim)
    group, sinks = layer.num_q_heads // heads, layer.sinks is not None
    return MergeConstants(heads, group, layer.v_head_dim, width, sinks)
