"""The trend of a kernel's time over its work, fitted to measured passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_core.costs.shapes import Form, Pass

SKEW = 0.8  # mean square of log-normal lengths over the square of their mean: (longest / mean)^0.8
SWEEPS, STILL = 500, 1e-9  # of the fit: at most so many, and the relative change that ends it
LEAST_US = 1e-3  # what is shorter counts as this long
RIDGE = 0.1  # of the normal equations, where samples are fewer than kinds of work

Features = tuple[float, ...]


def features(form: Form, size: Pass) -> Features:
    """Return what a kernel's time is made of: launch, programs, bytes, products, tail.

    These are 1, requests x KV heads, numbers of K and V, products of queries and keys, numbers of
    queries and outputs, and the longest request's keys. New tokens of a prefill are taken to be
    spread over requests as their lengths are.
    """
    n, mean, longest, queries = size.axes
    heads, kv_heads = form.q_heads or 1, form.kv_heads or 1
    dims = (form.head_dim or 1, form.v_head_dim or 1)
    width = dims[0] if form.kind == "mla" else sum(dims)
    prefix = max(mean - queries, 0.0)
    uneven = (longest / mean) ** SKEW if size.phase == "prefill" else 1.0
    seen = prefix + queries * uneven / 2
    if form.window is not None:
        mean, seen = min(mean, form.window + queries), min(seen, form.window)
        longest = min(longest, form.window + queries)
    rows = n * queries * heads
    return (1.0, n * kv_heads, n * mean * kv_heads * width, rows * seen, rows * sum(dims), longest)


@dataclass(frozen=True)
class Trend:
    """Microseconds a unit of each kind of work, none of them negative."""

    per_unit: Features

    @staticmethod
    def fit(samples: Sequence[tuple[Features, float]]) -> Trend:
        """Fit (features, µs) by least squares of the relative error, with no negative part.

        Fewer samples than kinds of work do not tell which one takes the time. Ridge regression then
        gives each a part of it: otherwise a single sample would count as launch alone, and a
        backend that was measured once as equally fast at any size. The method is coordinate descent
        over the normal equations.
        """
        samples = [(x, max(us, LEAST_US)) for x, us in samples]
        kinds = range(len(samples[0][0]))
        scale = [max(x[i] / us for x, us in samples) for i in kinds]
        rows = [[x[i] / us / scale[i] for i in kinds] for x, us in samples]
        gram = [[sum(r[i] * r[j] for r in rows) for j in kinds] for i in kinds]
        if len(samples) < len(kinds):
            for i in kinds:
                gram[i][i] += RIDGE
        right = [sum(r[i] for r in rows) for i in kinds]
        weights = [0.0 for _ in kinds]
        for _ in range(SWEEPS):
            moved = 0.0
            for i in kinds:
                rest = sum(gram[i][j] * weights[j] for j in kinds if j != i)
                value = max(0.0, (right[i] - rest) / gram[i][i])
                moved, weights[i] = max(moved, abs(value - weights[i])), value
            if moved < STILL:
                break
        return Trend(tuple(x / s for x, s in zip(weights, scale, strict=True)))

    def us(self, x: Features) -> float:
        return max(LEAST_US, sum(a * b for a, b in zip(self.per_unit, x, strict=True)))
