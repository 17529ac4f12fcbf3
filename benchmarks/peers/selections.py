"""Other ways to select than triton takes: for `python -m benchmarks.sparse --variants`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.sparse import LAUNCH, Call, Prepare, SparseContestant
from benchmarks.sparse_cases import PAGE, SparseInputs, backend_of


def _before(x: SparseInputs, registers: Any) -> Call:
    """The selection that select_topk took the place of."""
    plan, view, chosen = backend_of("triton", x, "bf16")[1], x.view, torch.empty_like(x.chosen)
    passes = (view.page_table, view.seq_lens, x.batch.cu_seqlens_q, plan.requests)

    def call() -> Tensor:
        registers.select(x.drawn_scores, *passes, chosen, page_size=PAGE)
        return chosen

    return call


def _variant(warps: int, registers: int, *constants: int) -> Prepare:
    """Return the selection by another way to compile it: see SelectConstants."""

    def prepare(x: SparseInputs, launch: Any) -> Call:
        how = launch.Selecting(launch.SelectConstants(*constants), warps, registers)
        plan, view, chosen = backend_of("triton", x, "bf16")[1], x.view, torch.empty_like(x.chosen)
        passed = (x.drawn_scores, 0, x.case.tokens, view, x.batch.cu_seqlens_q, plan.requests)

        def call() -> Tensor:
            launch.select(*passed, chosen, how, page_size=PAGE)
            return chosen

        return call

    return prepare


# warps, registers, and constants of the selection, for --variants
_WAYS = (
    (4, 128, 2048, 32768, 4096, 4096),
    (8, 64, 2048, 32768, 8192, 4096),
    (8, 80, 2048, 32768, 8192, 4096),
    (8, 128, 2048, 32768, 8192, 4096),
    (16, 64, 4096, 65536, 16384, 4096),
    (16, 128, 4096, 65536, 16384, 4096),
    (32, 64, 8192, 65536, 32768, 4096),
)
VARIANTS: tuple[SparseContestant, ...] = (
    SparseContestant(
        name="in registers", part="select", module="benchmarks.peers.registers", prepare=_before
    ),
    *(
        SparseContestant(
            name="triton " + " ".join(map(str, way)), part="select", module=LAUNCH,
            prepare=_variant(*way),
        )
        for way in _WAYS
    ),
)  # fmt: skip
