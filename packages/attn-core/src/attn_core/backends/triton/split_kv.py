"""How the keys of few queries a request are cut: what plan_splits fills and kernels follow."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attn_core.backends.triton.tuning import Launch

UNIT = 1024  # keys of a state of its own where a request must not depend on its neighbours
SHORT = 256  # keys of a request that is not worth a cut


@dataclass(frozen=True, kw_only=True)
class Splits:
    """One way of cutting the keys of few queries a request, equal for all layers of a class.

    lines: int32 [batch + 1], see plan_splits. lse_parts [S, block_m] and parts [S, block_m, Dv],
    float32: the states of rows that were cut, used by one layer after the other.
    """

    launch: Launch
    row_blocks: int
    row_lines: int  # of a row's block_m lines those that some request fills
    programs: int
    fixed: bool
    unit: int  # blocks of keys that no two programs share
    whole: bool  # every row is one unit: no state is left to be joined
    overlap: bool  # the merge is launched before the states are complete
    lines: Tensor
    parts: Tensor
    lse_parts: Tensor

    @property
    def least(self) -> int:
        """Units of work that a program takes at least."""
        return max(1, self.launch.least // self.unit)
