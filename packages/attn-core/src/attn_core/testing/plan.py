"""Assign each check to a row of a backend, or say why no row can take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

from attn_core.errors import BackendNotImplementedError, UnsupportedError
from attn_core.plugins.dependencies import Libraries
from attn_core.selection.compatibility import mismatches
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device
from attn_core.spec.kinds import LINEAR_KINDS, Kind, Phase
from attn_core.spec.requirements import LayerRequirements, Requirements
from attn_core.testing.checks import Check, templates
from attn_core.testing.linear_checks import linear_templates

KINDS: tuple[Kind, ...] = get_args(Kind)  # the suite has cases for all of them


@dataclass(frozen=True, kw_only=True)
class PlannedCheck:
    """A check and the row that it is put to, or the reason why no row has it."""

    check: Check
    kind: Kind
    row: Capabilities | None
    reason: str = ""


def usable_rows(
    spec: BackendSpec, kind: Kind, device: Device, libraries: Libraries
) -> tuple[Capabilities, ...]:
    """Return the rows of a kind that can run here, none where it has no such rows.

    Raises UnsupportedError with the reason where it has rows and none of them runs here.
    """
    rows, reasons = [], []
    for row in (r for r in spec.capabilities if r.kind == kind and spec.creator(r)):
        gaps = mismatches(row, Requirements(layers=()), device, libraries, Phase.PREFILL)
        reasons.append("; ".join(str(g) for g in gaps if g.need in _HERE))
        if not reasons[-1]:
            rows.append(row)
    if reasons and not rows:
        reason = min(reasons, key=len)
        raise UnsupportedError(f"{spec.name} ({kind}) cannot run here: {reason}")
    return tuple(rows)


_HERE = frozenset({"device", "runtime", "library"})


def plan(
    spec: BackendSpec,
    device: Device,
    libraries: Libraries,
    *,
    kinds: tuple[Kind, ...] = KINDS,
    passes: int = 200,
    reduced: bool = False,
) -> list[PlannedCheck]:
    """List every check of these kinds, each with the first row that declares what it needs.

    passes: of each random session. reduced: every feature in one place only, the base page and
    the finest dtype that goes with its store. Raises BackendNotImplementedError for a backend that
    is only declared, UnsupportedError where the suite has no cases for it or it cannot run on
    `device`.
    """
    if not spec.implemented:
        raise BackendNotImplementedError(
            f"{spec.name} is declared but not implemented in 0.1, so there is nothing to check"
        )
    planned: dict[tuple[Kind, str], PlannedCheck] = {}
    unsupported: list[UnsupportedError] = []
    for kind in kinds:
        try:
            rows = usable_rows(spec, kind, device, libraries)
        except UnsupportedError as error:  # of no matter where another kind runs
            unsupported.append(error)
            continue
        make = linear_templates if kind in LINEAR_KINDS else templates
        for template in make(kind, rows, passes=passes, reduced=reduced) if rows else ():
            one = _assigned(kind, template, rows, device, libraries)
            # two cases may turn into one on a row that takes a single shape
            planned.setdefault((kind, one.check.id), one)
    if not planned and unsupported:
        raise unsupported[0]
    if not planned:
        kinds_declared = sorted({r.kind for r in spec.capabilities})
        raise UnsupportedError(
            f"{spec.name} has rows of kind {', '.join(kinds_declared)}; the suite has cases for "
            f"{', '.join(kinds)}"
        )
    # the longest last: a fault is found sooner elsewhere
    return sorted(planned.values(), key=lambda p: p.check.feature == "session")


def _assigned(
    kind: Kind,
    template: Callable[[Capabilities], Check],
    rows: tuple[Capabilities, ...],
    device: Device,
    libraries: Libraries,
) -> PlannedCheck:
    """Put a check to the first row that has all it needs, or say what the nearest lacks."""
    options, wrong_phase = [], []
    for row in rows:
        check = template(row)
        if not row.phases & set(check.phases):  # its gap explains nothing where others have one
            wrong_phase.append((check, row))
            continue
        missing = _lacks(row, check, device, libraries)
        if not missing:
            return PlannedCheck(check=check, kind=kind, row=row)
        options.append((check, missing))
    options = options or [(c, _lacks(row, c, device, libraries)) for c, row in wrong_phase]
    check, missing = min(options, key=lambda option: len(option[1]))
    return PlannedCheck(check=check, kind=kind, row=None, reason="; ".join(missing))


def _lacks(
    row: Capabilities, check: Check, device: Device, libraries: Libraries
) -> tuple[str, ...]:
    """Say what a row lacks for a check, in the fewest words over its phases."""
    needs = check.needs
    if row.with_linear_layers:
        needs = replace(needs, layers=(*needs.layers, LayerRequirements(kind="gdn")))
    drafts = needs.speculation is not None
    per_phase = [
        tuple(map(str, mismatches(row, needs, device, libraries, phase, speculates=drafts)))
        for phase in check.phases
    ]
    missing_features = max(per_phase, key=len) if check.every else min(per_phase, key=len)
    if check.layout is not None and check.layout not in row.layouts:
        missing_features = (
            *missing_features,
            f"layout {check.layout} (supports {', '.join(sorted(row.layouts))})",
        )
    flaw = check.flaw(row)
    return missing_features if flaw is None else (*missing_features, flaw)
