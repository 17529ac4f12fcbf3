"""The cost of a pass between measured points, with the bounds of the estimate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form, Pass

SAME = 1 / 16  # lengths this close, relative, count as one
FARTHEST = 2.0  # doublings, of a measured form that still stands for the asked one
WEIGHTS = (1.0, 0.5, 0.5, 1.0)  # of the axes in the work: mean and longest grow together


class Estimate(NamedTuple):
    """Expected microseconds of one call of one layer and their bounds.

    measured: this shape was measured itself; else its heads, pages or drafts are the nearest.
    """

    us: float
    low: float
    high: float
    measured: bool


_Points = dict[Pass, Cost]


@dataclass(frozen=True)
class CostModel:
    """Estimates costs from a profile; what lies outside of what was measured has no estimate."""

    profile: Profile

    @cached_property
    def _series(self) -> dict[tuple[str, str], dict[tuple[Form, str, int, bool], _Points]]:
        series: dict[tuple[str, str], dict[tuple[Form, str, int, bool], _Points]] = {}
        for (name, row, form, size), cost in self.profile.costs.items():
            kinds = series.setdefault((name, row), {})
            kinds.setdefault((form, size.phase, size.drafts, size.tree), {})[size] = cost
        return series

    @cached_property
    def _cache(self) -> dict[tuple[Key, bool], Estimate | None]:
        return {}

    def estimate(
        self, backend: str, row: str, form: Form, size: Pass, *, graphs: bool
    ) -> Estimate | None:
        """Return what a pass costs per layer; None where nothing near it was measured.

        row: the digest of the row. graphs: the pass is replayed in a CUDA graph; else a call takes
        no less than the host takes for it.
        """
        key = (Key(backend, row, form, size), graphs)
        if key not in self._cache:
            self._cache[key] = self._estimate(*key[0], graphs)
        return self._cache[key]

    def _estimate(
        self, backend: str, row: str, form: Form, size: Pass, graphs: bool
    ) -> Estimate | None:
        for far, points in sorted(self._near(backend, row, form, size), key=lambda x: x[0]):
            between = _interpolated(points, size, graphs)
            if between is not None:
                return Estimate(*between, measured=far == 0)
        return None

    def _near(
        self, backend: str, row: str, form: Form, size: Pass
    ) -> Iterator[tuple[float, _Points]]:
        for digest in (row, ""):
            for (measured, phase, drafts, tree), points in self._series.get(
                (backend, digest), {}
            ).items():
                far = form.distance(measured)
                if far is None or (phase, tree) != (size.phase, size.tree):
                    continue
                if drafts != size.drafts:
                    far += abs(math.log2(max(drafts, 1) / max(size.drafts, 1)))
                if far <= FARTHEST:
                    yield far, points


def _interpolated(points: _Points, size: Pass, graphs: bool) -> tuple[float, float, float] | None:
    """Interpolate between the nearest point below and the nearest point above, in logarithms.

    Below: no axis is greater; above: none is smaller. The time of an attention kernel is taken to
    lie between a power of the work and a fixed part plus a part that grows with the work: the
    bounds are both interpolations, in logarithms and linear, widened by the quartiles of the two
    points. A kernel that gets faster with more work, by another split or tile, may lie outside.
    """
    x = _axes(size)
    at = [(_axes(p), _time(cost, graphs)) for p, cost in points.items()]
    below = [(_gap(a, x), a, c) for a, c in at if all(i <= j + SAME for i, j in _zip(a, x))]
    above = [(_gap(x, a), a, c) for a, c in at if all(i >= j - SAME for i, j in _zip(a, x))]
    if not below or not above:
        return None
    low, high = min(below, key=_first), min(above, key=_first)
    rise, total = low[0], low[0] + high[0]
    slack = math.exp(_gap(x, low[1]) + _gap(high[1], x))  # lengths that only count as one
    share = rise / total if total else 0.0
    (a, a_low, a_high), (b, b_low, b_high) = low[2], high[2]
    us = a * (b / a) ** share
    work = (math.exp(rise) - 1) / (math.exp(total) - 1) if total else 0.0
    linear = a + (b - a) * work
    noise_low = (a_low / a) ** (1 - share) * (b_low / b) ** share
    noise_high = (a_high / a) ** (1 - share) * (b_high / b) ** share
    return us, min(us, linear) * noise_low / slack, max(us, linear) * noise_high * slack


def _first(item: tuple[float, tuple[float, ...], tuple[float, float, float]]) -> tuple[object, ...]:
    return item[0], item[1]


def _time(cost: Cost, graphs: bool) -> tuple[float, float, float]:
    """Return median and quartiles; without a graph the host's time is a floor."""
    if graphs:
        return cost.us, cost.low, cost.high
    return max(cost.us, cost.host_us), max(cost.low, cost.host_us), max(cost.high, cost.host_us)


def _axes(size: Pass) -> tuple[float, ...]:
    """Return the logarithms of the axes; drafts are a kind of pass, not an axis."""
    n, mean, longest, queries = size.axes
    return tuple(math.log(v) for v in (n, mean, longest, 1 if size.drafts else queries))


def _zip(a: tuple[float, ...], b: tuple[float, ...]) -> Iterator[tuple[float, float]]:
    return zip(a, b, strict=True)


def _gap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return sum(w * max(0.0, j - i) for w, (i, j) in zip(WEIGHTS, _zip(a, b), strict=True))
