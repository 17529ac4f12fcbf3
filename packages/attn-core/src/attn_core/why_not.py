"""Why a backend is not chosen, and the smallest change that makes it fit: verified, not guessed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from attn_core.capabilities import Capabilities, Device, Family, Phase, Requirements
from attn_core.decision import Overrides, Selection
from attn_core.errors import AttnError, NoBackendError, UnknownBackendError
from attn_core.libraries import Libraries
from attn_core.plugins import Registry
from attn_core.selection import select
from attn_core.unmet import Change, Unmet, unmet

TRIES = 200  # combinations of changes that are tried for one pair of rows


@dataclass(frozen=True)
class WhyNot:
    """The answer to "why not this backend".

    fits: it can be named as things are. chosen: the automatic choice has it in some role.
    reasons: what it lacks per phase. changes: the cheapest set of changes after which it can be
    named, () where none is needed, None where nothing that a caller can change is enough.
    selection: the decision in which the backend serves (after the changes), if any.
    """

    backend: str
    fits: bool
    chosen: tuple[str, ...]
    automatic: Selection | None
    reasons: tuple[tuple[str, str], ...]
    changes: tuple[Change, ...] | None
    selection: Selection | None


@dataclass(frozen=True)
class Situation:
    """Everything that select() decides from, so that a change can be applied to it."""

    requirements: Requirements
    device: Device
    libraries: Libraries
    overrides: Overrides
    simulated: bool = False

    def apply(self, changes: tuple[Change, ...]) -> Situation:
        """Return the situation after `changes`; another device is a simulated one."""
        needs, device, overrides = self.requirements, self.device, self.overrides
        libraries = dict(self.libraries)
        for change in changes:
            values: dict[str, Any] = dict(change.values)
            if change.target == "requirements":
                needs = replace(needs, **values)
            elif change.target == "device":
                device = replace(device, **values)
            elif change.target == "libraries":
                libraries.update(values)
            elif change.target == "overrides":
                overrides = replace(overrides, **values)
            elif "layers" in values:
                kept = tuple(x for x in needs.layers if x.family != change.target)
                needs = replace(needs, layers=kept)
            else:
                layers = [
                    replace(x, **values) if x.family == change.target else x for x in needs.layers
                ]
                needs = replace(needs, layers=tuple(dict.fromkeys(layers)))
        moved = (device.type, device.arch) != (self.device.type, self.device.arch)
        return Situation(needs, device, libraries, overrides, self.simulated or moved)

    def select(self, registry: Registry) -> Selection:
        """Run select() on it."""
        return select(
            self.requirements,
            self.device,
            registry,
            self.libraries,
            self.overrides,
            simulated=self.simulated,
        )


def why_not(
    backend: str,
    requirements: Requirements,
    device: Device,
    registry: Registry,
    libraries: Libraries,
    overrides: Overrides | None = None,
    *,
    simulated: bool = False,
) -> WhyNot:
    """Answer why `backend` is not the automatic choice and what would have to change.

    Every suggested set of changes was run through select() and made the backend serve.
    Raises UnknownBackendError.
    """
    family = _family(backend, registry, requirements)
    name = registry.get(backend, family).name
    here = Situation(requirements, device, libraries, overrides or Overrides(), simulated)
    automatic: Selection | None
    try:
        automatic = here.select(registry)
        verdicts = automatic.verdicts
    except NoBackendError as error:
        automatic, verdicts = None, error.selection.verdicts
    roles = _roles(automatic, name, family) if automatic else ()
    reasons = tuple(
        (v.phase.value, str(r))
        for v in verdicts
        if v.spec.name == name and v.spec.family == family
        for r in v.reasons
    )
    if roles:
        return WhyNot(name, True, roles, automatic, reasons, (), automatic)

    best: tuple[Any, ...] | None = None
    for order, (names, extra) in enumerate(_namings(name, family, here.overrides)):
        asked = replace(here, overrides=names)
        for some in _change_sets(asked, registry, name, family):
            changes = (*extra, *some)
            key = (sum(c.cost for c in changes), len(changes), order)
            if best is not None and key >= best[0]:
                continue
            try:
                result = asked.apply(some).select(registry)
            except AttnError:
                continue
            best = (key, (asked, extra, some), result)
    if best is None:
        return WhyNot(name, False, (), automatic, reasons, None, None)
    _, (asked, extra, some), result = best
    for change in some:  # one change may have made another superfluous
        fewer = tuple(c for c in some if c is not change)
        try:
            result = asked.apply(fewer).select(registry)
            some = fewer
        except AttnError:
            continue
    changes = _with_page((*extra, *some), result)
    return WhyNot(name, not changes, (), automatic, reasons, changes, result)


def _family(backend: str, registry: Registry, needs: Requirements) -> Family:
    """Pick the family of a name that both have: softmax, unless only linear knows it."""
    try:
        registry.get(backend, "softmax")
    except UnknownBackendError:
        if needs.linear_layers or any(k == ("linear", backend) for k in registry.backends):
            return "linear"
        raise
    return "softmax"


def _roles(selection: Selection, name: str, family: Family) -> tuple[str, ...]:
    if family == "linear":
        linear = selection.linear
        return tuple(r for r in ("prefill", "decode") if linear and getattr(linear, r) == name)
    return tuple(r for r in ("prefill", "decode", "multimodal") if getattr(selection, r) == name)


def _namings(
    name: str, family: Family, given: Overrides
) -> Iterator[tuple[Overrides, tuple[Change, ...]]]:
    """Name the backend for both phases, then, as a change of its own, for one of them."""
    prefix = "linear_attn" if family == "linear" else ""
    both = "linear_attn_backend" if prefix else "attention_backend"
    per_phase = {
        p: f"linear_attn_{p}_backend" if prefix else f"{p}_attention_backend"
        for p in ("prefill", "decode")
    }
    cleared = _with(given, dict.fromkeys((both, *per_phase.values())))
    yield _with(cleared, {both: name}), ()
    for phase, option in per_phase.items():
        flag = f"--{option.replace('_', '-')} {name}"
        change = Change("overrides", ((option, name),), 1, f"{flag} (for {phase} only)")
        yield _with(cleared, {option: name}), (change,)


def _with(overrides: Overrides, values: dict[str, Any]) -> Overrides:
    return replace(overrides, **values)


def _change_sets(
    asked: Situation, registry: Registry, name: str, family: Family
) -> Iterator[tuple[Change, ...]]:
    """Yield sets of changes that close every gap of some rows of the backend, cheapest first."""
    spec = registry.get(name, family)
    real = not spec.implemented and not asked.simulated  # then only another device helps
    phases = [p for p in (Phase.PREFILL, Phase.DECODE) if asked.overrides.flag(family, p)[1]]
    lists = _lists(asked.overrides, name)
    rows = [[r for r in spec.capabilities if p in r.phases] for p in phases]
    for chosen in itertools.product(*rows):
        gaps = _gaps(asked, chosen, phases, family)
        if any(not gap.changes for gap in gaps):
            continue
        if real and not any(gap.need == "device" for gap in gaps):
            continue
        options = itertools.product(*(gap.changes for gap in gaps))
        sets = [tuple(dict.fromkeys((*lists, *some))) for some in itertools.islice(options, TRIES)]
        yield from sorted(sets, key=lambda some: sum(c.cost for c in some))


def _gaps(
    asked: Situation, rows: tuple[Capabilities, ...], phases: list[Phase], family: Family
) -> tuple[Unmet, ...]:
    spec = asked.requirements.speculation
    return tuple(
        dict.fromkeys(
            gap
            for row, phase in zip(rows, phases, strict=True)
            for gap in unmet(
                row,
                asked.requirements,
                asked.device,
                asked.libraries,
                phase,
                speculates=family == "softmax" and spec is not None and spec.mode == phase.value,
            )
        )
    )


def _lists(overrides: Overrides, name: str) -> tuple[Change, ...]:
    """Return the changes that let --allow and --deny pass the backend."""
    changes = []
    if overrides.allow is not None and name not in overrides.allow:
        allow = (*overrides.allow, name)
        changes.append(Change("overrides", (("allow", allow),), 1, f"--allow {name}"))
    if name in overrides.deny:
        rest = tuple(d for d in overrides.deny if d != name)
        changes.append(Change("overrides", (("deny", rest),), 1, f"no --deny {name}"))
    return tuple(changes)


def _with_page(changes: tuple[Change, ...], result: Selection) -> tuple[Change, ...]:
    """Put the page size that was chosen in the place of "no --page-size"."""
    page = result.page_size
    named = Change("requirements", (("page_size", page),), 1, f"--page-size {page}")
    return tuple(named if c.values == (("page_size", None),) else c for c in changes)


def describe(answer: WhyNot) -> str:
    """Write the answer for people."""
    name, lines = answer.backend, []
    if answer.chosen:
        return f"{name} is chosen for {' and '.join(answer.chosen)}"
    if answer.fits:
        auto = answer.automatic
        lines.append(f"{name} fits, but is not the automatic choice")
        if auto is not None:
            lines += [f"  {r}: {getattr(auto, r)}, {auto.why[r]}" for r in ("prefill", "decode")]
        lines.append(f"to use it: --attention-backend {name}")
        return "\n".join(lines)
    lines.append(f"{name} does not fit")
    lines += [f"  {phase:<8} {reason}" for phase, reason in answer.reasons]
    if answer.changes is None:
        lines.append("nothing that can be changed here makes it fit")
    else:
        lines.append("smallest change that makes it fit:")
        lines += [f"  {c.text}" for c in answer.changes]
        if any(c.target == "libraries" for c in answer.changes):
            lines.append("`attn doctor` prints the version that fits the torch installed")
    return "\n".join(lines)
