"""The expected cost of a row in a phase: measured times, weighed by a workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_core.costs.model import CostModel, Estimate
from attn_core.costs.shapes import REPLAYED, Form, Pass, row_key, shares
from attn_core.costs.workload import Workload
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import Requirements

LEAST = 0.5  # of a workload's requests: where fewer have measured passes, priorities decide


@dataclass(frozen=True)
class Part:
    """One kind of pass: its share in a request, and its estimate for a layer, on average."""

    size: Pass
    weight: float
    estimate: Estimate


@dataclass(frozen=True)
class Expected:
    """What attention costs in a phase, in µs per request and layer, on average over all layers.

    parts: the passes that were measured. covered: the share of the workload's requests that they
    serve, from 0 to 1; the others have no estimate for any backend that fits, and are left out for
    all.
    """

    parts: tuple[Part, ...]
    covered: float = 1.0

    @property
    def us(self) -> float:
        return sum(p.weight * p.estimate.us for p in self.parts)

    @property
    def low(self) -> float:
        return sum(p.weight * p.estimate.low for p in self.parts)

    @property
    def high(self) -> float:
        return sum(p.weight * p.estimate.high for p in self.parts)

    @property
    def measured(self) -> bool:
        """Whether this layer's own shape was measured, not one near it."""
        return all(p.estimate.measured for p in self.parts)

    def surely_below(self, other: Expected) -> bool:
        """Say whether the order holds wherever both lie within their bounds."""
        return self.measured and other.measured and self.high < other.low

    def __str__(self) -> str:
        return f"{micros(self.us)} ({micros(self.low)} to {micros(self.high)})"

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the sums and every part."""
        return {
            "us": self.us,
            "low": self.low,
            "high": self.high,
            "measured": self.measured,
            "covered": self.covered,
            "passes": [
                {"pass": str(p.size), "weight": p.weight, **_plain(p.estimate)} for p in self.parts
            ],
        }


def _plain(estimate: Estimate) -> dict[str, Any]:
    return {name: getattr(estimate, name) for name in ("us", "low", "high", "measured")}


def micros(us: float) -> str:
    """Write microseconds with three digits: "41.2 µs", "3.41 ms"."""
    value, unit = (us, "µs") if us < 1000 else (us / 1000, "ms")
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"


@dataclass(frozen=True)
class Costs:
    """What the rows cost that may serve these requirements, by one profile and one workload."""

    model: CostModel
    workload: Workload
    needs: Requirements

    def parts(
        self, spec: BackendSpec, row: Capabilities, phase: Phase, page_size: int | None
    ) -> list[Part]:
        """Return the passes of a phase that have an estimate for a row, on pages of this size."""
        if not self.model.profile.costs or spec.family != "softmax" or phase is Phase.ENCODE:
            return []
        layers, digest = shares(self.needs, page_size), row_key(row)
        parts = []
        for size, weight in self.workload.passes(phase, self.needs.speculation) if layers else ():
            graphs = row.cuda_graph in REPLAYED[size.phase]
            estimate = self._mean(spec.name, digest, layers, size, graphs)
            if estimate is not None:
                parts.append(Part(size, weight, estimate))
        return parts

    def _mean(
        self, name: str, digest: str, layers: Mapping[Form, float], size: Pass, graphs: bool
    ) -> Estimate | None:
        """Return the mean over layers, form → its share of them; None if one has no estimate."""
        us = low = high = 0.0
        measured = True
        for form, share in layers.items():
            one = self.model.estimate(name, digest, form, size, graphs=graphs)
            if one is None:
                return None
            us, low, high = us + share * one.us, low + share * one.low, high + share * one.high
            measured = measured and one.measured
        return Estimate(us, low, high, measured)

    def expected(
        self, rows: list[tuple[BackendSpec, Capabilities]], phase: Phase, page_size: int | None
    ) -> list[Expected | None]:
        """Return what each row costs, over the passes of the one that was measured in most.

        None for a row that was not measured in all of these: it cannot be compared. None for all
        where these passes serve few of the workload's requests: one small batch that was measured
        says nothing about a large one.
        """
        by_row = [self.parts(spec, row, phase, page_size) for spec, row in rows]
        passes = self.workload.passes(phase, self.needs.speculation)
        whole = sum(weight * size.requests for size, weight in passes) or 1.0

        def served(parts: list[Part]) -> float:
            return sum(p.weight * p.size.requests for p in parts) / whole

        most = max(by_row, key=served, default=[])
        wanted, covered = {p.size for p in most}, served(most)
        shares: list[Expected | None] = []
        for parts in by_row:
            both = tuple(p for p in parts if p.size in wanted)
            compares = covered >= LEAST and len(both) == len(wanted)
            shares.append(Expected(both, covered) if compares else None)
        return shares

    def on_pages(
        self, spec: BackendSpec, row: Capabilities, phase: Phase, page: int | None, of: Expected
    ) -> Expected:
        """Return the same passes as `of` on pages of another size."""
        wanted = {p.size for p in of.parts}
        parts = tuple(p for p in self.parts(spec, row, phase, page) if p.size in wanted)
        return Expected(parts, of.covered) if len(parts) == len(wanted) else of
