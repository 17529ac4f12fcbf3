"""Judge outputs of an attention call by the float64 oracle, within the suite's error budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.ops.kv import read_kv
from attn_core.testing.oracle import attend_request, yardstick
from attn_core.testing.tolerance import Measure, judged, worst
from attn_core.trust.reproducer import Reproducer

MOST_QUERIES = 16  # of a request: the oracle takes milliseconds for each
MOST_IN_ALL = 512


@dataclass(frozen=True, eq=False)
class Answer:
    """What a backend returned: out [T, Hq, Dv] and LSE [T, Hq] or None, on the host.

    rounds: the float8 dtype that it multiplies in, by its row.
    """

    out: Tensor
    lse: Tensor | None
    rounds: torch.dtype | None = None


@dataclass(frozen=True)
class Verdict:
    """How far a backend is from the truth in the request where it is worst."""

    request: int
    measure: Measure
    of: str  # "out" or "lse"

    @property
    def wrong(self) -> bool:
        """Whether the error is beyond the budget."""
        return self.measure.ratio > 1

    def __str__(self) -> str:
        error, allowed = self.measure.error, self.measure.budget
        return f"error {error:.2e}, allowed {allowed:.2e}"


def judge(r: Reproducer, answers: Mapping[str, Answer]) -> dict[str, Verdict]:
    """Compare each answer with the truth, in the queries of each request that `chosen` names.

    Returns for each the request that uses most of its budget; of equal ones the first.
    """
    result: dict[str, Verdict] = {}
    bytes_left, dtype = MOST_IN_ALL, TORCH_DTYPES[r.setting.dtype]
    for request, rows in enumerate(r.rows):
        queries = chosen(rows, answers)[:bytes_left]
        bytes_left -= len(queries)
        if not queries:
            continue
        solve = partial(_solve, r, request, queries)
        truth = solve(torch.float64, 0)
        baselines = {a.rounds: yardstick(partial(solve, rounds=a.rounds), dtype, truth)
                 for a in answers.values()}  # fmt: skip
        token_rows = torch.tensor(queries, device="cpu") + rows.start
        for name, answer in answers.items():
            baseline = baselines[answer.rounds]
            verdicts = [
                Verdict(
                    request, judged(answer.out[token_rows], truth[0], baseline[0], dtype), "out"
                )
            ]
            if answer.lse is not None:
                lse = judged(answer.lse[token_rows], truth[1], baseline[1], torch.float32)
                verdicts.append(Verdict(request, lse, "lse"))
            for verdict in verdicts:
                if name not in result or verdict.measure.ratio > result[name].measure.ratio:
                    result[name] = verdict
    return result


def chosen(rows: slice, answers: Mapping[str, Answer]) -> list[int]:
    """Choose up to 16 queries of a request: half lie even, in half the answers differ most."""
    n = rows.stop - rows.start
    if n <= MOST_QUERIES:
        return list(range(n))
    half = MOST_QUERIES // 2
    even = {i * (n - 1) // (half - 1) for i in range(half)}
    outs = torch.stack([a.out[rows].float().nan_to_num(nan=torch.inf) for a in answers.values()])
    spread = (outs.amax(0) - outs.amin(0)).nan_to_num(nan=0.0).flatten(1).amax(1)
    return sorted(even | set(spread.topk(half).indices.tolist()))


def _solve(
    r: Reproducer,
    request: int,
    queries: list[int],
    dtype: torch.dtype,
    order: int,
    rounds: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with some queries of a request, computed in `dtype`, as the suite's oracle does."""
    layer, size = r.layer, r.cache.page_size
    token = torch.arange(r.seq_lens[request], device="cpu")
    slots = r.page_table[request, token // size].long() * size + token % size
    k, v = read_kv(r.cache, slots, torch.float32)
    return attend_request(
        r.q[r.rows[request]],
        k,
        k[..., : layer.v_head_dim] if v is None else v,
        dtype=dtype,
        causal=layer.is_causal and not layer.is_cross,
        scale=layer.scale,
        window=layer.sliding_window,
        logit_cap=layer.logit_cap,
        sinks=layer.sinks,
        queries=queries,
        selected=r.visible(request),
        order=order,
        rounds=rounds,
    )


def total(verdicts: Mapping[str, Verdict]) -> Measure:
    """Return the measure of the answer that is worst."""
    return worst([v.measure for v in verdicts.values()])
