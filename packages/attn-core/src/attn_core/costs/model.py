"""The cost of a pass near measured ones, with the bounds of the estimate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from attn_core.costs.host import Hosts, evened
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form, Pass, plain
from attn_core.costs.surface import Surface

SAME = 1 / 16  # lengths this close, relative, count as one
FARTHEST = 8.0  # doublings, of a measured form that still stands for the asked one
BEYOND = math.log(8)  # of each axis of a pass, outside of the smallest and the greatest measured


class Estimate(NamedTuple):
    """Expected microseconds of one call of one layer and their bounds.

    measured: passes of this very form were measured; else its heads, dims, pages or drafts are
    the nearest. plan_us: of planning the pass for such layers, None where not measured.
    """

    us: float
    low: float
    high: float
    measured: bool
    plan_us: float | None = None


_Axes = tuple[float, ...]
_Points = dict[Pass, Cost]


class _Kind(NamedTuple):
    """Which passes share a surface: a row's for one phase, whatever heads, dims and pages."""

    backend: str
    row: str
    form: Form
    phase: str
    tree: bool


@dataclass(frozen=True)
class CostModel:
    """Estimates costs from a profile; what lies far from all that was measured has no estimate."""

    profile: Profile

    @cached_property
    def _hosts(self) -> Hosts:
        return evened(self.profile.costs)

    @cached_property
    def _kinds(self) -> dict[_Kind, dict[tuple[Form, int], _Points]]:
        kinds: dict[_Kind, dict[tuple[Form, int], _Points]] = {}
        for (name, row, form, size), cost in self._hosts.costs.items():
            kind = kinds.setdefault(_Kind(name, row, plain(form), size.phase, size.tree), {})
            kind.setdefault((form, size.drafts), {})[size] = cost
        return kinds

    @cached_property
    def _surfaces(self) -> dict[_Kind, Surface]:
        return {}

    @cached_property
    def _bad(self) -> frozenset[tuple[str, str, Form]]:
        """Forms in which a row was wrong or failed, and never right."""
        return frozenset(k[:3] for k in self.profile.bad) - {k[:3] for k in self.profile.costs}

    @cached_property
    def _cache(self) -> dict[tuple[Key, bool], Estimate | None]:
        return {}

    def estimate(
        self, backend: str, row: str, form: Form, size: Pass, *, graphs: bool
    ) -> Estimate | None:
        """Return what a pass costs per layer; None where nothing near it was measured.

        row: the digest of the row. graphs: the pass is replayed in a CUDA graph; else a call takes
        no less than the host takes for it, at whatever speed.
        """
        key = (Key(backend, row, form, size), graphs)
        if key not in self._cache:
            near = sorted(self._near(backend, row, form, size), key=lambda x: x[0])
            covering = (x for x in near if _covers(x[3], size))
            best = next(covering, None)
            self._cache[key] = None if best is None else self._estimate(*best, form, size, graphs)
        return self._cache[key]

    def _near(
        self, backend: str, row: str, form: Form, size: Pass
    ) -> Iterator[tuple[float, _Kind, Form, _Points]]:
        own = [Key(backend, digest, form, size) for digest in (row, "")]
        if any(key in self.profile.bad or key[:3] in self._bad for key in own):
            return
        for kind, series in self._kinds.items():
            known = kind.backend == backend and kind.row in (row, "")
            if not known or (kind.phase, kind.tree) != (size.phase, size.tree):
                continue
            for (measured, drafts), points in series.items():
                far = form.distance(measured)
                if far is None:
                    continue
                if drafts != size.drafts:
                    far += abs(math.log2(max(drafts, 1) / max(size.drafts, 1)))
                if far <= FARTHEST:
                    yield far, kind, measured, points

    def _surface(self, kind: _Kind) -> Surface:
        if kind not in self._surfaces:
            series = self._kinds[kind].items()
            samples = [(form, x, c) for (form, _), points in series for x, c in points.items()]
            self._surfaces[kind] = Surface.fit(samples)
        return self._surfaces[kind]

    def _estimate(
        self, far: float, kind: _Kind, measured: Form, points: _Points, form: Form, size: Pass,
        graphs: bool,
    ) -> Estimate:  # fmt: skip
        """Return what was measured of this very pass, else what lies on the surface of its kind."""
        if far == 0 and size in points:
            us, low, high, host, plan = points[size]
        else:
            us, low, high, host, plan = self._surface(kind).at(_filled(form, measured), size)
        if not graphs:
            us, low, high = self._hosts.us(us, host), max(low, host), max(high, host)
        return Estimate(us, min(low, us), max(high, us), far == 0, plan)


def _filled(form: Form, measured: Form) -> Form:
    """Return the form; what it leaves open is as measured."""
    known = {n: v for n, v in vars(form).items() if v is not None}
    return replace(measured, **known)


def _covers(points: Mapping[Pass, Cost], size: Pass) -> bool:
    """Say whether every axis of a pass is within those of the points, or not far beyond them."""
    every = zip(*map(_axes, points), strict=True)
    reach = BEYOND + SAME
    return all(
        min(p) - reach <= x <= max(p) + reach for p, x in zip(every, _axes(size), strict=True)
    )


def _axes(size: Pass) -> _Axes:
    """Return the logarithms of the axes, and of all keys: a corner of the others may be far away.

    Drafts are a kind of pass, not an axis.
    """
    n, mean, longest, queries = size.axes
    axes = (n, mean, longest, 1 if size.drafts else queries, n * mean)
    return tuple(math.log(v) for v in axes)
