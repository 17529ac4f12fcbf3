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
Candidates = tuple[int, ...]  # the candidate of each group of layers
MARGIN = 1.05  # what is this close to the fastest keeps the pass
CAPTURED_MARGIN = 1.02  # … and this close the chosen one is captured for all lengths


class Cell(NamedTuple):
    """best: the index of the fastest candidate; near: which are close enough to keep a pass."""

    best: int
    near: tuple[bool, ...]


@dataclass(frozen=True)
class Table:
    """cells: bucket → the picks there; a bucket without a cell was not measured.

    graphs: bits of the requests → the pick of a captured pass, which serves every length.
    A pick is the index of a candidate, which takes all layers; behind the candidates come the
    `mixed` picks, each of which has the candidate of every group of layers.
    """

    cells: Mapping[Bucket, Cell]
    graphs: Mapping[int, int]
    mixed: Sequence[Candidates] = ()


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
    numbers: Sequence[int] = (),
    drafts: int = 0,
    tree: bool = False,
) -> Table:
    """Return the table of candidates: (name, digest of the row, replayed in graphs).

    The first candidate is the chosen one. Only buckets in which this very form was measured, with
    the chosen one and another, have a cell. workload: what lengths and requests captured passes
    have, and how much shorter than the longest the other requests of a pass are that decode or
    verify. forms: of each group of equal layers. numbers: how many layers each group has; () where
    that is not known: then a layer of each counts, and plans do not.
    """
    times: dict[Bucket, _Times] = {}
    captured: dict[int, _Times] = {}
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
                pass_times = _times(model, rows, forms, numbers, size)
                if pass_times is not None:
                    times[requests, bits, queries.bit_length()] = pass_times
        if phase != "prefill":
            served = [x for x in workload.requests if x.bit_length() == requests]
            n = max(served, key=lambda x: workload.requests[x], default=n)
            parts = [
                (share, pass_times)
                for size, share in workload.batches(phase, n, drafts, tree=tree)
                if (pass_times := _times(model, rows, forms, numbers, size)) is not None
            ]
            if parts:
                captured[requests] = _mean(parts)
    best = [x.mixed(MARGIN) for x in times.values()]
    best += [x.mixed(CAPTURED_MARGIN) for x in captured.values()]
    mixed = tuple(dict.fromkeys(x for x in best if x is not None))
    picks = [(i,) * len(forms) for i in range(len(rows))] + list(mixed)
    return Table(
        {bucket: _cell([x.of(pick) for pick in picks]) for bucket, x in times.items()},
        {bits: _graph([x.of(pick) for pick in picks]) for bits, x in captured.items()},
        mixed,
    )


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


class _Times(NamedTuple):
    """What a pass takes: candidate → µs in the layers of each group, and those of its plan.

    A candidate plans for all of its layers, whichever of them it runs. plans: None where one is
    not known; then none counts, and only one candidate plans.
    """

    us: Sequence[Sequence[float]]
    plans: Sequence[float] | None

    def of(self, pick: Candidates) -> float:
        """Return the µs of a pick: of its layers, and of the plan of each backend in it."""
        plans = 0.0 if self.plans is None else sum(self.plans[i] for i in set(pick))
        return sum(self.us[i][group] for group, i in enumerate(pick)) + plans

    def mixed(self, margin: float) -> Candidates | None:
        """Return the fastest pick of several candidates, if no single one comes near it."""
        every, groups = range(len(self.us)), range(len(self.us[0]))
        if self.plans is None or len(groups) == 1:
            return None
        picks: set[Candidates] = set()
        for count in range(2, min(len(every), len(groups)) + 1):  # a group has one candidate
            for able in itertools.combinations(every, count):
                fastest = (min(able, key=lambda i: self.us[i][group]) for group in groups)
                picks.add(tuple(fastest))
        best = min(sorted(picks), key=self.of)
        alone = min(self.of((i,) * len(groups)) for i in every)
        return best if margin * self.of(best) < alone else None


def _times(
    model: CostModel,
    rows: Sequence[tuple[str, str, bool]],
    forms: Sequence[Form],
    numbers: Sequence[int],
    size: Pass,
) -> _Times | None:
    """Return the µs of every candidate, infinite where not measured; None if there is no choice."""
    us: list[list[float]] = []
    plans: list[float | None] = []
    for name, digest, graphs in rows:
        estimates: list[Estimate | None] = [
            model.estimate(name, digest, form, size, graphs=graphs) for form in forms
        ]
        known = [x for x in estimates if x is not None and x.measured]
        if len(known) == len(forms):
            counts = numbers or [1] * len(forms)
            us.append([n * x.us for n, x in zip(counts, known, strict=True)])
            own = [x.plan_us for x in known if x.plan_us is not None]
            plans.append(sum(own) if len(own) == len(forms) else None)
        elif not us:
            return None  # the chosen one
        else:
            us.append([math.inf] * len(forms))
            plans.append(0.0)
    if sum(times[0] < math.inf for times in us) < 2 or not forms:
        return None
    every = [plan for plan in plans if plan is not None]
    return _Times(us, every if numbers and len(every) == len(rows) else None)


def _mean(parts: Sequence[tuple[float, _Times]]) -> _Times:
    """Return the sum of the times of passes, weighed by their shares."""
    shares, every = zip(*parts, strict=True)
    us = [
        [_dot(shares, group) for group in zip(*candidate, strict=True)]
        for candidate in zip(*(x.us for x in every), strict=True)
    ]
    known = [x.plans for x in every if x.plans is not None]
    if len(known) < len(every):
        return _Times(us, None)
    return _Times(us, [_dot(shares, plans) for plans in zip(*known, strict=True)])


def _dot(shares: Sequence[float], times: Sequence[float]) -> float:
    return sum(share * us for share, us in zip(shares, times, strict=True))


def _cell(times: Sequence[float]) -> Cell:
    least = min(times)
    return Cell(times.index(least), tuple(t <= MARGIN * least for t in times))


def _graph(times: Sequence[float]) -> int:
    least = min(times)
    return 0 if times[0] <= CAPTURED_MARGIN * least else times.index(least)
