"""Selections compiled in another way than triton's: for `python -m benchmarks.sparse --ways`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.sparse import Call, SparseContestant
from benchmarks.sparse_cases import PAGE, SparseInputs, backend_of

SELECTING = "attn_core.backends.triton.sparse.selecting"


def way(text: str) -> SparseContestant:
    """Return the selection by "WARPSxREGISTERS" for each row; a thread loads 32 scores at once.

    Raises ValueError where the text is another.
    """
    if not re.fullmatch(r"(4|8|16|32)x\d+", text):
        raise ValueError(f"{text!r} is not WARPSxREGISTERS with 4, 8, 16 or 32 warps, as in 4x128")
    warps, registers = map(int, text.split("x"))

    def prepare(x: SparseInputs, library: Any) -> Call:
        chosen, queries = torch.empty_like(x.chosen), x.batch.max_q_len
        constants = library.selecting(queries).constants._replace(AT_ONCE=1024 * warps)
        how = library.Selecting(constants, warps, registers)
        plan = backend_of("triton", x, "bf16")[1]
        inputs = library.SparsePass(x.view, x.batch.cu_seqlens_q, plan.requests, queries=queries)

        def call() -> Tensor:
            scores = x.drawn_scores
            library.select(scores, 0, x.case.tokens, inputs, chosen, how, page_size=PAGE)
            return chosen

        return call

    return SparseContestant(name=f"triton {text}", part="select", module=SELECTING, prepare=prepare)
