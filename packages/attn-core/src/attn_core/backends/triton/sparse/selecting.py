"""Launch the selection of sparse MLA's keys; nothing is read to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_core.backends.triton.sparse.passes import SparsePass
from attn_core.backends.triton.sparse.topk import select_topk
from attn_core.backends.triton.tuning import power_of_two
from attn_core.ops.triton.launcher import Arguments, Grid, Launcher, alike

ROW = 1 << 18  # scores of a row that one program selects from
FEW = 16  # queries of a request, up to which there are few rows
SELECT_PROGRAMS = 1056  # that select, at the most: 8 on each of 132 multiprocessors
VECTOR = 4  # scores that a thread loads at once


class SelectConstants(NamedTuple):
    """What select_topk is compiled for, in scores: those of a sample, of a segment of which the
    greater ones are marked, and those that are loaded at once. CAPACITY is for candidates: 32 more
    than are selected fit at least.
    """

    SAMPLE: int
    SEGMENT: int
    AT_ONCE: int
    CAPACITY: int


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


class Step(NamedTuple):
    """One launch of select_topk, with all that is known before the tensor of the selection.

    into: what it writes in its place, of rows that are cut.
    """

    launcher: Launcher
    grid: Grid
    arguments: Arguments
    into: Tensor | None

    def run(self, chosen: Tensor) -> None:
        """Launch it; chosen: int32 [T, K]."""
        out = chosen if self.into is None else self.into
        args = (out.data_ptr(), *self.arguments.addresses)
        self.launcher.launch(self.grid, args, (out,), self.arguments.values)


def select(
    scores: Tensor,
    first: int,
    count: int,
    inputs: SparsePass,
    chosen: Tensor,
    selector: Selecting,
    *,
    page_size: int,
) -> None:
    """Write the slots of the greatest scores of some queries into chosen int32 [T, K].

    scores: float32 [count, L], of the queries from `first` on; column t is the key at position t.
    What a query does not see does not count.
    """
    for step in steps(scores, first, count, inputs, chosen, selector, page_size=page_size):
        step.run(chosen)


def steps(
    scores: Tensor,
    first: int,
    count: int,
    inputs: SparsePass,
    chosen: Tensor,
    selector: Selecting,
    *,
    page_size: int,
) -> list[Step]:
    """Return the launches of `select`, for tensors like `chosen`, too. They hold their scratch.

    Rows longer than ROW are cut first: each piece keeps its own greatest, which the greatest of all
    are among.
    """
    topk, columns, narrowed = chosen.shape[1], inputs.longest, 0
    constants = selector.constants
    constants = constants._replace(CAPACITY=max(constants.CAPACITY, power_of_two(topk + 32)))
    span = max(ROW, -(-columns // max(1, ROW // topk)))  # what is kept is a row in turn
    span = -(-span // 32) * 32
    programs = min(max(1, count * -(-columns // span)), SELECT_PROGRAMS)
    shape = (programs, constants.CAPACITY + constants.SEGMENT // 32 + 1)
    scratch = torch.empty(shape, dtype=torch.int32, device=scores.device)
    positions, result = scratch, []
    while True:
        pieces = max(1, -(-columns // span))
        kept_scores, kept_positions = scores, None
        if pieces > 1:
            kept_scores = scores.new_empty(count, pieces * topk)
            kept_positions = torch.empty(
                kept_scores.shape, dtype=torch.int32, device=kept_scores.device
            )
        out = chosen if kept_positions is None else kept_positions
        numbers = (first, count, pieces, span, narrowed)
        launcher = _launcher(
            (scores, positions, scratch, kept_scores, out),
            inputs,
            topk,
            page_size,
            selector,
            constants,
        )
        numbers_after = (*numbers, scratch, kept_scores, kept_scores.stride(0))
        arguments = inputs.arguments.between((scores, positions, scores.stride(0)), numbers_after)
        grid = (max(1, min(count * pieces, SELECT_PROGRAMS)), 1, 1)
        result.append(Step(launcher, grid, arguments, kept_positions))
        if kept_positions is None:
            return result
        scores, positions, narrowed, columns = kept_scores, kept_positions, span, pieces * topk
        span = -(-max(span, columns) // 32) * 32


def _launcher(
    tensors: tuple[Tensor, ...],
    inputs: SparsePass,
    topk: int,
    page_size: int,
    selector: Selecting,
    constants: SelectConstants,
) -> Launcher:
    """Return select_topk for tensors that are alike. tensors: the scores are the first one."""
    scores, row = tensors[0], tensors[0].stride(0)
    vector = VECTOR if row % VECTOR == 0 and scores.data_ptr() % (4 * VECTOR) == 0 else 1
    key = (
        "select", inputs.key, selector, constants, topk, page_size, vector, row >> 31,
        *map(alike, tensors),
    )  # fmt: skip
    launcher: Launcher | None = inputs.launchers.get(key)
    if launcher is None:
        last = (topk, page_size, constants, vector)
        launcher = inputs.launchers[key] = Launcher(select_topk, *last, **selector.options)
    return launcher
