"""Split-KV schedule of requests with few queries, filled by plan_splits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attn_core.backends.triton.tuning import Launch

KEYS_PER_PARTIAL = 1024  # in deterministic mode, where no split depends on other requests
UNSPLIT_KEYS = 256  # requests with at most so many keys are not split


@dataclass(frozen=True, kw_only=True)
class Splits:
    """How the keys of requests with few queries are split, equal for all layers of a group.

    work_indptr: int32 [batch + 1], see plan_splits.
    partial_out, partial_lse: float32 [S, block_m, Dv] and [S, block_m], of tiles that were split.
    All layers share them: one runs after the other.
    """

    launch: Launch
    row_blocks: int
    tile_rows: int  # those of a tile's block_m rows that some request fills
    programs: int
    batch_invariant: bool
    blocks_per_unit: int  # blocks of keys that no two programs share
    unsplit: bool  # every tile is one unit: there is nothing to merge
    overlap: bool  # the merge is launched before the partials are complete
    work_indptr: Tensor
    partial_out: Tensor
    partial_lse: Tensor

    @property
    def min_units(self) -> int:
        """The fewest units of work that a program takes."""
        return max(1, self.launch.min_blocks // self.blocks_per_unit)
