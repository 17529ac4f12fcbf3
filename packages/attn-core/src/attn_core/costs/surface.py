"""A row's time over all sizes of a pass: a trend, corrected by the measured passes around one."""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from attn_core.costs.profile import Cost
from attn_core.costs.shapes import Form, Pass
from attn_core.costs.trend import Trend, features

# How much each axis may change before a measured pass says little about another, in logarithms:
# requests, mean length, longest over mean, queries a request, rows of queries that share a KV head,
# query heads, KV heads, head dim, window, page size.
SCALES = (2.0, 1.5, 0.8, 1.0, 1.5, 1.5, 3.0, 1.0, 1.5, 5.0)
NEAREST = 12  # measured passes that correct an estimate
BOUNDING = 8  # of them, those whose deviations from the trend bound it
NUGGET = 0.03  # variance of a measurement over that of a deviation from the trend

Axes = tuple[float, ...]
Sample = tuple[Form, Pass, Cost]


@dataclass(frozen=True)
class Surface:
    """points: the axes of each measured pass, with its time and quartiles over the trend's."""

    trend: Trend
    points: Sequence[tuple[Axes, tuple[float, float, float], float, float | None]]

    @staticmethod
    def fit(samples: Sequence[Sample]) -> Surface:
        """Fit the trend to all samples and keep how each deviates from it."""
        works = [features(form, size) for form, size, _ in samples]
        trend = Trend.fit([(x, c.us) for x, (_, _, c) in zip(works, samples, strict=True)])
        points = []
        for x, (form, size, cost) in zip(works, samples, strict=True):
            base = trend.us(x)
            off = math.log(cost.us / base), math.log(cost.low / base), math.log(cost.high / base)
            points.append((_axes(form, size), off, cost.host_us, cost.plan_us))
        return Surface(trend, points)

    def at(self, form: Form, size: Pass) -> tuple[float, float, float, float, float | None]:
        """Return µs, their bounds, the µs of the host, and those of a plan where they are known.

        The correction is simple kriging of the logarithm with an exponential covariance: points
        that lie together share their weight, and far from all of them the trend alone stays.
        """
        here, base = _axes(form, size), math.log(self.trend.us(features(form, size)))
        near = heapq.nsmallest(NEAREST, self.points, key=lambda p: math.dist(here, p[0]))
        shares = _shares(here, [p[0] for p in near])
        us = base + sum(w * p[1][0] for w, p in zip(shares, near, strict=True))
        bounds = [p[1] for p in near[:BOUNDING]]
        low, high = base + min(d[1] for d in bounds), base + max(d[2] for d in bounds)
        host = statistics.median(p[2] for p in near)
        plans = [p[3] for p in near if p[3] is not None]
        plan = statistics.median(plans) if plans else None
        return math.exp(us), math.exp(min(low, us)), math.exp(max(high, us)), host, plan


def _axes(form: Form, size: Pass) -> Axes:
    n, mean, longest, queries = size.axes
    heads, kv_heads, dim = form.q_heads or 1, form.kv_heads or 1, form.head_dim or 1
    values = (
        n, mean, longest / mean, queries, queries * heads / kv_heads, heads, kv_heads, dim,
        form.window or 1, form.page_size or 1,
    )  # fmt: skip
    return tuple(math.log(v) / s for v, s in zip(values, SCALES, strict=True))


def _shares(here: Axes, near: Sequence[Axes]) -> list[float]:
    """Return the weight of each point: solve (covariance of the points) x = (that with here).

    The matrix is symmetric and positive definite, so elimination needs no pivots.
    """
    rows = [[math.exp(-math.dist(a, b)) for b in (*near, here)] for a in near]
    for i, row in enumerate(rows):
        row[i] += NUGGET
    count = len(rows)
    for i, row in enumerate(rows):
        for other in rows[i + 1 :]:
            ratio = other[i] / row[i]
            other[i:] = [a - ratio * b for a, b in zip(other[i:], row[i:], strict=True)]
    solution = [0.0] * count
    for i in reversed(range(count)):
        rest = sum(rows[i][j] * solution[j] for j in range(i + 1, count))
        solution[i] = (rows[i][-1] - rest) / rows[i][i]
    return solution
