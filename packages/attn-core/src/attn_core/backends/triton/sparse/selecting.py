"""Launch the selection of sparse MLA's keys; nothing is read to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_core.backends.triton.sparse.passes import SparsePass
from attn_core.backends.triton.sparse.topk import select_topk
from attn_core.backends.triton.tuning import power_of_two
from attn_core.ops.triton.launcher import Launcher, alike

ROW = 1 << 18  # scores of a row that one program selects from
FEW = 16  # queries of a request, up to which there are few rows
SELECT_PROGRAMS = 1056  # that select, at the most: 8 on each of 132 multiprocessors
VECTOR = 4  # scores that a thread loads at once


class SelectConstants(NamedTuple):
    """What select_topk is compiled for, in scores: those of a sample, of a segment of which the
    greater ones are marked, and those that are loaded at once. ROOM is for candidates: 32 more than
    are selected fit at least.
    """

    SAMPLE: int
    SEGMENT: int
    AT_ONCE: int
    ROOM: int


class Selecting(NamedTuple):
    """How rows are selected from: the warps of a program, and the registers of a thread."""

    constants: SelectConstants
    warps: int
    registers: int

    @property
    def options(self) -> dict[str, int]:
        """Return how the kernel is compiled; ROCm has no limit of registers."""
        limited = torch.cuda.is_available() and not torch.version.hip
        return {"num_warps": self.warps} | ({"maxnreg": self.registers} if limited else {})


# where rows are few and where they are many
WIDE = Selecting(SelectConstants(4096, 65536, 16384, 4096), 16, 128)
NARROW = Selecting(SelectConstants(2048, 32768, 8192, 4096), 8, 80)


def selecting(queries: int) -> Selecting:
    """Choose how to select; queries: the most that a request has."""
    return WIDE if queries <= FEW else NARROW


def select(
    scores: Tensor,
    first: int,
    count: int,
    inputs: SparsePass,
    chosen: Tensor,
    how: Selecting,
    *,
    page_size: int,
) -> None:
    """Write the slots of the greatest scores of some queries into chosen int32 [T, K].

    scores: float32 [count, L], of the queries from `first` on; column t is the key at position t.
    What a query does not see does not count. Rows longer than ROW are cut first: each piece keeps
    its own greatest, which the greatest of all are among.
    """
    topk, columns, narrowed = chosen.shape[1], inputs.longest, 0
    constants = how.constants
    constants = constants._replace(ROOM=max(constants.ROOM, power_of_two(topk + 32)))
    span = max(ROW, -(-columns // max(1, ROW // topk)))  # what is kept is a row in turn
    span = -(-span // 32) * 32
    programs = min(max(1, count * -(-columns // span)), SELECT_PROGRAMS)
    shape = (programs, constants.ROOM + constants.SEGMENT // 32 + 1)
    scratch = torch.empty(shape, dtype=torch.int32, device=scores.device)
    into = positions = chosen
    while True:
        pieces = max(1, -(-columns // span))
        kept = scores
        if pieces > 1:
            kept = scores.new_empty(count, pieces * topk)
            into = torch.empty(kept.shape, dtype=torch.int32, device=kept.device)
        step = _Step(scores, positions, kept, into, scratch)
        numbers = (first, count, pieces, span, narrowed)
        _launch(step, numbers, inputs, topk, page_size, how, constants)
        if pieces == 1:
            return
        scores, positions, narrowed, columns = kept, into, span, pieces * topk
        into, span = chosen, -(-max(span, columns) // 32) * 32


class _Step(NamedTuple):
    """The tensors of one launch of select_topk."""

    scores: Tensor
    positions: Tensor
    kept: Tensor
    into: Tensor
    scratch: Tensor


def _launch(
    step: _Step,
    numbers: tuple[int, int, int, int, int],
    inputs: SparsePass,
    topk: int,
    page_size: int,
    how: Selecting,
    constants: SelectConstants,
) -> None:
    """Launch select_topk. numbers: its `first` to `narrowed`."""
    scores, positions, kept, into, scratch = step
    places = [x.data_ptr() for x in step]
    at_scores, at_positions, at_kept, at_into, at_scratch = places
    row, kept_row = scores.stride(0), kept.stride(0)
    vector = VECTOR if row % VECTOR == 0 and at_scores % (4 * VECTOR) == 0 else 1
    key = (
        "select", inputs.key, how, constants, topk, page_size, vector, row >> 31,
        *map(alike, step, places),
    )  # fmt: skip
    launcher = inputs.launchers.get(key)
    if launcher is None:
        last = (topk, page_size, constants, vector)
        launcher = inputs.launchers[key] = Launcher(select_topk, *last, **how.options)
    count, pieces, shared = numbers[1], numbers[2], inputs.arguments
    launcher.launch(
        (max(1, min(count * pieces, SELECT_PROGRAMS)), 1, 1),
        (
            at_scores, at_positions, row, *shared.addresses, *numbers,
            at_scratch, at_kept, at_into, kept_row,
        ),
        lambda: (
            scores, positions, row, *shared.values, *numbers, scratch, kept, into, kept_row,
        ),
    )  # fmt: skip
