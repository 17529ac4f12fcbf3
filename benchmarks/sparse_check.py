"""Compare results of sparse MLA's benchmark with float64, and our selections with a sort."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.linear_record import Record
from benchmarks.peers.sparse import Call, SparseContestant
from benchmarks.sparse_cases import TOPK, SparseInputs

# Of the root mean square. FP8 products are summed with some 14 bits.
TOLERANCES = {"score": 2e-3, "attend": 1e-2, "chain": 1e-2}
MISSED = 0.01  # of a selection's keys by scores that were rounded another way


def checked(inputs: SparseInputs, most: int = 2) -> list[int]:
    """Return the queries whose results are compared: the first, the last and some between."""
    last = inputs.case.tokens - 1
    return sorted({last * i // most for i in range(most + 1)})


def missed(inputs: SparseInputs, token: int, chosen: Tensor, scores: Tensor) -> float:
    """Return which part of a query's slots int32 [K] is not right by scores [s] of what it sees.

    1 where a slot comes twice or is not the query's. Of equal scores any key is right.
    """
    slots = inputs.slot_table[inputs.request[token], : len(scores)]
    at = torch.full((int(inputs.slot_table.max()) + 1,), -1, device=slots.device)
    at[slots.long()] = torch.arange(len(slots), device=slots.device)
    keys = at[chosen[chosen >= 0].long()]
    if len(set(keys.tolist())) != min(TOPK, len(scores)) or len(keys) != len(set(keys.tolist())):
        return 1.0
    if (keys < 0).any():
        return 1.0
    border = scores.topk(len(keys)).values[-1]
    return float((scores[keys] < border).double().mean())


def check(record: Record, inputs: SparseInputs, contestant: SparseContestant, call: Call) -> None:
    """Call once, and record how far its result is from the reference."""
    part, actual, errors, misses = contestant.part, call(), [], []
    store = contestant.store
    for token in checked(inputs, 16 if part == "select" else 2):
        seen = int(inputs.visible[token])
        chosen = inputs.chosen[token]
        if part == "score":
            errors.append(rms(actual[token, :seen], inputs.scores(token)))
        if part == "select":
            scores = inputs.drawn_scores[token, :seen]
            misses.append(missed(inputs, token, actual[token], scores))
            if contestant.ours:  # in the order of the keys, of equal ones the earliest
                best = scores.sort(descending=True, stable=True).indices[:TOPK].sort().values
                slots = inputs.slot_table[inputs.request[token], best]
                misses.append(float(not torch.equal(slots.int(), actual[token])))
        if part in ("index_topk", "chain"):
            chosen = (actual if part == "index_topk" else actual[1])[token]
            misses.append(missed(inputs, token, chosen, inputs.scores(token)))
        if part in ("attend", "chain"):
            out = actual[0] if part == "chain" else actual
            out = out.view(inputs.case.tokens, *out.shape[-2:])[token]
            errors.append(rms(out, inputs.attended(token, chosen, store)))
    if errors:
        record["out_error"] = max(errors)
    if misses:
        record["missed"] = max(misses)
    allowed = 0.0 if part == "select" else MISSED
    wrong = record.get("out_error", 0.0) > TOLERANCES.get(part, 0.0)
    record["wrong"] = wrong or not record.get("missed", 0.0) <= allowed


def rms(got: Tensor, want: Tensor) -> float:
    """Return the root mean square of the difference over that of the right result; inf for NaN."""
    error = (got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()
    return float(error.nan_to_num(nan=torch.inf))
