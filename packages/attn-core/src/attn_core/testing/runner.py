"""Run the checks of a backend and summarise them per cell of the support matrix."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from attn_core.errors import AttnError
from attn_core.plugins.dependencies import Libraries
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device
from attn_core.spec.kinds import LINEAR_KINDS, Kind, Phase
from attn_core.testing.harness import Bench
from attn_core.testing.plan import PlannedCheck, usable_rows
from attn_core.testing.tolerance import CheckFailed, Measure
from attn_core.tools.matrix import CELLS

Status = Literal["passed", "failed", "skipped"]

# How torch names the devices that the rows name otherwise.
_TORCH_TYPES = {"rocm": "cuda"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a check; `detail` is why it failed or was skipped."""

    planned: PlannedCheck
    status: Status
    measure: Measure = field(default_factory=Measure)
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class CellReport:
    """One cell of the matrix: checks run and failed, the worst error beside its budget.

    skipped: reason → number of checks. problem: why the declaration of this cell is not proved,
    "" where it is, or where nothing is declared.
    """

    declared: bool
    cases: int
    failed: int
    worst: float
    budget: float
    skipped: Mapping[str, int]
    problem: str = ""


def torch_device(device: Device) -> torch.device:
    """Return the torch device of a Device. Raises RuntimeError, torch's, for an unknown type."""
    return torch.device(_TORCH_TYPES.get(device.type, device.type))


def run_check(
    planned: PlannedCheck, spec: BackendSpec, device: torch.device, *, arch: str | None = None
) -> Measure:
    """Put one check to its row, on a torch device. Raises CheckFailed with the fault in words.

    arch: the Device's, for backends whose kernels differ by it.

    An error of the backend itself is a fault too: what a row declares, it must not refuse. Raises
    unittest.SkipTest where the device lacks the memory for it.
    """
    if planned.row is None:
        raise ValueError(f"{planned.check.id} has no row: {planned.reason}")
    bench = Bench(
        spec=spec,
        row=planned.row,
        torch_device=device,
        arch=arch,
        deterministic=planned.check.needs.deterministic,
        shared_prefix=planned.check.needs.shared_prefix,
    )
    try:
        with torch.no_grad():
            return planned.check.run(bench)
    except unittest.SkipTest:
        raise
    except CheckFailed as failure:
        raise CheckFailed(f"{planned.check.id}: {failure}") from failure
    except Exception as error:  # foreign code: whatever it raises is the finding
        kind = "refused" if isinstance(error, AttnError) else type(error).__name__
        raise CheckFailed(f"{planned.check.id}: declared, but {kind}: {error}") from error


def run_all(
    checks: Sequence[PlannedCheck],
    spec: BackendSpec,
    device: torch.device,
    step: Callable[[PlannedCheck], None] = lambda planned: None,
    *,
    arch: str | None = None,
) -> list[Outcome]:
    """Run every check that has a row; `step` is called before each."""
    outcomes = []
    for planned in checks:
        step(planned)
        if planned.row is None:
            outcomes.append(Outcome(planned=planned, status="skipped", detail=planned.reason))
            continue
        try:
            measure = run_check(planned, spec, device, arch=arch)
        except unittest.SkipTest as reason:
            outcomes.append(Outcome(planned=planned, status="skipped", detail=str(reason)))
        except CheckFailed as failure:
            outcomes.append(Outcome(planned=planned, status="failed", detail=str(failure)))
        else:
            outcomes.append(Outcome(planned=planned, status="passed", measure=measure))
    return outcomes


Report = dict[Kind, dict[str, CellReport]]  # kind → cell of the matrix


def report(
    outcomes: Sequence[Outcome], spec: BackendSpec, device: Device, libraries: Libraries
) -> Report:
    """Sum outcomes up per kind and cell; a declared cell that nothing proved is a problem."""
    kinds = dict.fromkeys(o.planned.kind for o in outcomes)
    return {
        kind: _cells([o for o in outcomes if o.planned.kind == kind],
                     kind, usable_rows(spec, kind, device, libraries))
        for kind in kinds
    }  # fmt: skip


OF_TOWERS = ("multimodal", "encoder")  # a vision tower has no store, whatever its row names
OF_STORES = ("fp8_kv", "fp4_kv")  # and neither has what reads no cache


def _cells(
    outcomes: Sequence[Outcome], kind: Kind, rows: Sequence[Capabilities]
) -> dict[str, CellReport]:
    models = [r for r in rows if r.phases != {Phase.ENCODE}]
    serving = [r for r in models if r.absorbed]  # over a cache
    rows_of_cell = dict.fromkeys(OF_TOWERS, rows) | dict.fromkeys(OF_STORES, serving)
    declares = {
        name: any(declares(r) for r in rows_of_cell.get(name, models))
        for name, declares in CELLS[kind].items()
    }
    reports = {}
    if kind not in LINEAR_KINDS:
        declares = {"page_sizes": bool(serving), **declares}
    for cell, declared in declares.items():
        covering = [o for o in outcomes if cell in o.planned.check.cells]
        finished = [o for o in covering if o.status != "skipped"]
        failed = [o for o in finished if o.status == "failed"]
        largest = max((o.measure for o in finished), key=lambda m: m.ratio, default=Measure())
        skipped: dict[str, int] = {}
        for o in covering:
            if o.status == "skipped":
                skipped[o.detail] = skipped.get(o.detail, 0) + 1
        problem = failed[0].detail if failed else ""
        if declared and not finished:
            problem = "declared, but no check could be run: " + "; ".join(skipped or ["no case"])
        reports[cell] = CellReport(
            declared=declared,
            cases=len(finished),
            failed=len(failed),
            worst=largest.error,
            budget=largest.budget,
            skipped=skipped,
            problem=problem,
        )
    return reports


def summary(outcomes: Sequence[Outcome], cells: Report) -> dict[str, Any]:
    """Return plain data for JSON: the cells and every failure in words."""
    return {
        "passed": sum(o.status == "passed" for o in outcomes),
        "failures": [o.detail for o in outcomes if o.status == "failed"],
        "skipped": sum(o.status == "skipped" for o in outcomes),
        "kinds": {k: {c: vars(r) for c, r in reports.items()} for k, reports in cells.items()},
    }


def problems(cells: Report) -> list[str]:
    """List the declared cells that are not proved, with the reason."""
    return [
        f"{kind}, {cell}: {r.problem}"
        for kind, reports in cells.items()
        for cell, r in reports.items()
        if r.problem
    ]
