"""The fastest backend by size of a pass, as a table that is made beforehand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from attn_core.costs.model import CostModel, Estimate
from attn_core.costs.shapes import Form, Pass, PassPhase
from attn_core.costs.workload import Workload

Bucket = tuple[int, int, int]  # bits of the requests, of the longest, of the queries of a request
MARGIN = 1.05  # what is this close to the fastest keeps the pass
CAPTURED_MARGIN = 1.02  # … and this close the chosen one is captured for all lengths


class Cell(NamedTuple):
    """best: the index of the fastest candidate; near: which are close enough to keep a pass."""

    best: int
    near: tuple[bool, ...]


@dataclass(frozen=True)
class Table:
    """cells: bucket → the candidates there; a bucket without a cell was not measured.

    graphs: bits of the requests → the candidate of a captured pass, which serves every length.
    """

    cells: Mapping[Bucket, Cell]
    graphs: Mapping[int, int]


def bucket_of(requests: int, longest: int, queries: int) -> Bucket:
    """Return the bucket of a pass of `queries` new tokens in all. Takes host numbers alone."""
    return requests.bit_length(), longest.bit_length(), (queries // (requests or 1)).bit_length()


def table(
    model: CostModel,
    rows: Sequence[tuple[str, str, bool]],
    forms: Sequence[Form],
    phase: PassPhase,
    workload: Workload,
    *,
    drafts: int = 0,
    tree: bool = False,
) -> Table:
    """Return the table of candidates: (name, digest of the row, replayed in graphs).

    The first candidate is the chosen one. Only buckets in which this very form was measured, with
    the chosen one and another, have a cell. workload: what lengths and requests captured passes
    have, and how much shorter than the longest the other requests of a pass are that decode or
    verify.
    """
    cells: dict[Bucket, Cell] = {}
    graphs: dict[int, int] = {}
    sizes = [key.size for key in model.profile.costs if key.size.phase == phase]
    most = max((x.requests for x in sizes), default=0)
    longest = max((x.longest for x in sizes), default=0)
    for requests in range(1, most.bit_length() + 1):
        n = _middle(requests)
        for bits in range(1, longest.bit_length() + 1):
            length = _middle(bits)
            for queries in _queries(phase, drafts, length):
                size = Pass.even(phase, n, length, queries, tree=tree)
                if phase != "prefill":
                    size = _uneven(size, workload)
                times = _times(model, rows, forms, size)
                if times is not None:
                    cells[requests, bits, queries.bit_length()] = _cell(times)
        if phase != "prefill":
            sums = [0.0] * len(rows)
            served = [x for x in workload.requests if x.bit_length() == requests]
            n = max(served, key=lambda x: workload.requests[x], default=n)
            for size, share in workload.batches(phase, n, drafts, tree=tree):
                times = _times(model, rows, forms, size) or [0.0] * len(rows)
                sums = [a + share * b for a, b in zip(sums, times, strict=True)]
            if sums[0]:
                least = min(sums)
                keeps = sums[0] <= CAPTURED_MARGIN * least
                graphs[requests] = 0 if keeps else sums.index(least)
    return Table(cells, graphs)


def _uneven(size: Pass, workload: Workload) -> Pass:
    """Return a pass of the same longest request, the others shorter as they are in the workload."""
    n, drafts = size.requests, size.drafts
    batches = workload.batches(size.phase, n, drafts, tree=size.tree)
    part = sum(share * x.kv_tokens / (n * x.longest) for x, share in batches)
    others = round((n * part - 1) * size.longest)  # KV tokens of all but the longest
    return replace(size, kv_tokens=size.longest + max(others, (n - 1) * max(drafts, 1)))


def _middle(bits: int) -> int:
    """Return the middle of the numbers that have so many bits."""
    return (3 * (1 << (bits - 1)) - 1) // 2


def _queries(phase: PassPhase, drafts: int, length: int) -> list[int]:
    if phase == "decode":
        return [1]
    if phase == "verify":
        return [drafts] if drafts <= length else []
    middles = map(_middle, itertools.count(1))
    return list(itertools.takewhile(lambda n: n <= length, middles))


def _times(
    model: CostModel, rows: Sequence[tuple[str, str, bool]], forms: Sequence[Form], size: Pass
) -> list[float] | None:
    """Return the µs of every candidate, infinite where not measured; None if there is no choice."""
    times: list[float] = []
    for name, digest, graphs in rows:
        found: list[Estimate | None] = [
            model.estimate(name, digest, form, size, graphs=graphs) for form in forms
        ]
        known = [x.us for x in found if x is not None and x.measured]
        times.append(sum(known) if len(known) == len(forms) else math.inf)
        if times[0] == math.inf:
            return None
    return times if sum(t < math.inf for t in times) > 1 else None


def _cell(times: Sequence[float]) -> Cell:
    least = min(times)
    return Cell(times.index(least), tuple(t <= MARGIN * least for t in times))
