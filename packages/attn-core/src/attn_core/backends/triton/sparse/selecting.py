"""Launch the selection of sparse MLA's keys; nothing is read to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attn_core.backends.triton.sparse.topk import select_topk
from attn_core.backends.triton.tuning import power_of_two
from attn_core.runtime.batch import CacheView

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
    view: CacheView,
    cu_seqlens_q: Tensor,
    requests: Tensor,
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
    table, topk = view.page_table, chosen.shape[1]
    constants = how.constants
    constants = constants._replace(ROOM=max(constants.ROOM, power_of_two(topk + 32)))
    columns, narrowed = view.max_seq_len, 0
    span = max(ROW, triton.cdiv(columns, max(1, ROW // topk)))  # what is kept is a row in turn
    span = triton.cdiv(span, 32) * 32
    programs = min(max(1, count * triton.cdiv(columns, span)), SELECT_PROGRAMS)
    shape = (programs, constants.ROOM + constants.SEGMENT // 32 + 1)
    scratch = torch.empty(shape, dtype=torch.int32, device=scores.device)
    kept, into, positions = scores, chosen, chosen
    while True:
        pieces = max(1, triton.cdiv(columns, span))
        if pieces > 1:
            kept = scores.new_empty(count, pieces * topk)
            into = torch.empty(kept.shape, dtype=torch.int32, device=kept.device)
        aligned = scores.stride(0) % VECTOR == 0 and scores.data_ptr() % (4 * VECTOR) == 0
        select_topk[(max(1, min(count * pieces, SELECT_PROGRAMS)),)](
            scores, positions, scores.stride(0), table, table.stride(0), view.seq_lens,
            cu_seqlens_q, requests, first, count, pieces, span, narrowed, scratch, kept, into,
            kept.stride(0), topk, page_size, constants, VECTOR if aligned else 1, **how.options,
        )  # fmt: skip
        if pieces == 1:
            return
        scores, positions, narrowed, columns = kept, into, span, pieces * topk
        into, span = chosen, triton.cdiv(max(span, columns), 32) * 32
