"""Why a backend is not chosen, and the smallest change that makes it fit: tried, not guessed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from attn_core.capabilities import (
    BackendSpec,
    Capabilities,
    Device,
    Family,
    Phase,
    Requirements,
)
from attn_core.decision import Overrides, Selection
from attn_core.errors import AttnError, NoBackendError
from attn_core.libraries import Libraries
from attn_core.plugins import Registry
from attn_core.proofs import proved
from attn_core.situation import Situation
from attn_core.unmet import FLAG, Change, Unmet, unmet

LOOKS = 3000  # situations that the search looks at before it gives up


@dataclass(frozen=True)
class WhyNot:
    """The answer to "why not this backend".

    fits: it can be named as things are. chosen: the roles that it has in the decision as asked.
    reasons: (phase, what it lacks). naming: the flag that gives it a role. changes: the cheapest
    changes after which that flag is honoured, () where none is needed, None where nothing that a
    caller can change is enough. after: the situation with the changes and the flag, in which it
    serves. decision: the one asked about, as far as it came.
    """

    backend: str
    family: Family
    fits: bool
    chosen: tuple[str, ...]
    reasons: tuple[tuple[str, str], ...]
    naming: str
    changes: tuple[Change, ...] | None
    after: Situation | None
    decision: Selection
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Naming:
    """One way to give a backend a role: the overrides with it, its flag, and what it costs."""

    overrides: Overrides
    text: str
    phases: tuple[Phase, ...]
    drops: tuple[Change, ...] = ()
    cost: int = 0


def why_not(
    backend: str,
    requirements: Requirements,
    device: Device,
    registry: Registry,
    libraries: Libraries,
    overrides: Overrides | None = None,
    *,
    simulated: bool = False,
    family: Family = "softmax",
) -> WhyNot:
    """Answer why `backend` has no role, or not every one, and what would have to change.

    The suggested changes were run through select(), and the backend then served. An alias of a
    vision backend (--mm-attention-backend) asks about that role. Raises UnknownBackendError.
    """
    spec = registry.get(backend, family)
    here = Situation(requirements, device, libraries, overrides or Overrides(), simulated)
    failure = ""
    try:
        decision = here.select(registry)
    except NoBackendError as error:
        decision, failure = error.selection, str(error)
    roles = _roles(decision, spec)
    reasons = tuple(
        (v.phase.value, str(r)) for v in decision.verdicts if v.spec is spec for r in v.reasons
    )
    if not any(layer.family == family for layer in requirements.layers):
        reasons += (("", f"the model has no {family} attention layers"),)
    pair = (("pair", c) for c in decision.conflicts if spec.name in c)
    reasons = tuple(dict.fromkeys((*reasons, *pair)))
    module = registry.origins[(spec.family, spec.name)].module
    kinds = dict.fromkeys(x.kind for x in requirements.layers if x.family == family)
    said: tuple[str, ...] = () if spec.implemented else (f"{spec.name} is not implemented in 0.1",)

    def answer(naming: str, changes: tuple[Change, ...] | None, after: Situation | None) -> WhyNot:
        fits, notes = changes == (), said
        if after is not None:
            notes += tuple(proved(module, spec.name, kind, str(after.device)) for kind in kinds)
        return WhyNot(
            spec.name, family, fits, roles, reasons, naming, changes, after, decision, notes
        )

    if roles and not (family == "softmax" and len(set(roles) & {"prefill", "decode"}) == 1):
        return answer("", (), here)
    encodes = all(row.phases == {Phase.ENCODE} for row in spec.capabilities)
    vision_only = encodes or backend != spec.name
    found = _search(here, registry, spec, list(_namings(spec.name, here, family, vision_only)))
    if found is None:
        if not reasons:  # it fits alone: what fails is another role
            reasons = (("", failure or f"no change gives {spec.name} a role"),)
        return answer("", () if roles else None, None)
    naming, changes, after = found
    return answer(naming.text, changes, after)


def _roles(selection: Selection, spec: BackendSpec) -> tuple[str, ...]:
    if spec.family == "linear":
        linear = selection.linear
        return tuple(r for r in ("prefill", "decode") if linear and getattr(linear, r) == spec.name)
    every = ("prefill", "decode", "multimodal")
    return tuple(r for r in every if getattr(selection, r) == spec.name)


def _namings(name: str, here: Situation, family: Family, vision_only: bool) -> Iterator[_Naming]:
    """Yield the ways to give a backend a role, with the caller's flags that stand against each."""
    given = here.overrides
    if here.requirements.vision is not None and family == "softmax":
        old = given.mm_attention_backend
        yield _Naming(
            replace(given, mm_attention_backend=name),
            f"--mm-attention-backend {name}",
            (Phase.ENCODE,),
            () if old in (None, name) else (_drop("mm_attention_backend", old),),
            cost=0 if vision_only else 3,  # last: the question is about text
        )
    if vision_only:
        return
    linear = "linear_attn_" if family == "linear" else ""
    base = f"{linear}backend" if linear else "attention_backend"
    own = {
        phase: f"{linear}{phase.value}_backend" if linear else f"{phase.value}_attention_backend"
        for phase in (Phase.PREFILL, Phase.DECODE)
    }
    values = {f: getattr(given, f) for f in (base, *own.values())}
    drops = tuple(_drop(f, v) for f, v in values.items() if v not in (None, name))
    cleared: dict[str, Any] = dict.fromkeys(values)
    both = _with(given, {**cleared, base: name})
    yield _Naming(both, f"{_flag(base)} {name}", tuple(own), drops)
    for phase, option in own.items():
        text = f"{_flag(option)} {name}"
        other = next(o for o in own.values() if o != option)
        mine = tuple(d for d in drops if option in dict(d.values))
        asked = values[other] not in (None, name) and not mine  # the question is about this phase
        named = _with(given, {option: name})
        yield _Naming(named, text, (phase,), mine, cost=0 if asked else 1)
        if len(drops) > len(mine):  # … and the other phase is left to the selection
            yield _Naming(_with(given, {**cleared, option: name}), text, (phase,), drops, cost=1)


def _with(overrides: Overrides, values: dict[str, Any]) -> Overrides:
    return replace(overrides, **values)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _drop(field: str, value: object) -> Change:
    return Change("overrides", ((field, None),), FLAG, f"no {_flag(field)} {value}")


def _search(
    here: Situation, registry: Registry, spec: BackendSpec, namings: list[_Naming]
) -> tuple[_Naming, tuple[Change, ...], Situation] | None:
    """Find the cheapest changes after which a naming is honoured: uniform-cost search."""
    tie = itertools.count()
    queue: list[tuple[int, int, _Naming, tuple[Capabilities, ...], tuple[Change, ...]]] = []
    for naming in namings:
        start = _lists(here.overrides, spec.name)
        cost = naming.cost + sum(c.cost for c in (*naming.drops, *start))
        for rows in _row_sets(spec, naming.phases):
            heapq.heappush(queue, (cost, next(tie), naming, rows, start))
    seen: set[tuple[int, tuple[int, ...], frozenset[Change]]] = set()
    tried: set[tuple[int, frozenset[Change]]] = set()
    for _ in range(LOOKS):
        if not queue:
            return None
        cost, _, naming, rows, changes = heapq.heappop(queue)
        key = (id(naming), tuple(map(id, rows)), frozenset(changes))
        if key in seen:
            continue
        seen.add(key)
        after = replace(here, overrides=naming.overrides).apply(changes)
        gaps = _gaps(after, spec, rows, naming.phases)
        if not gaps:
            if (key[0], key[2]) in tried:
                continue
            tried.add((key[0], key[2]))
            try:
                selection = after.select(registry)
                changes = _with_page((*naming.drops, *changes), selection)
                return naming, changes, after
            except AttnError:
                page = after.requirements.page_size
                free = Change("requirements", (("page_size", None),), FLAG, "no --page-size")
                options: tuple[Change, ...] = (free,) if page is not None else ()
        else:
            options = gaps[0].changes
        for option in options:
            more = (*changes, option)
            heapq.heappush(queue, (cost + option.cost, next(tie), naming, rows, more))
    return None


def _row_sets(spec: BackendSpec, phases: tuple[Phase, ...]) -> Iterator[tuple[Capabilities, ...]]:
    """Yield a row per phase; rows of two kinds or two devices never serve together."""
    able = [[r for r in spec.capabilities if p in r.phases] for p in phases]
    for rows in itertools.product(*able):
        first = rows[0]
        if all(
            r.kind == first.kind
            and (r.device == first.device or "any" in (r.device, first.device))
            and (not r.archs or not first.archs or r.archs & first.archs)
            for r in rows
        ):
            yield rows


def _gaps(
    asked: Situation, spec: BackendSpec, rows: tuple[Capabilities, ...], phases: tuple[Phase, ...]
) -> list[Unmet]:
    speculation = asked.requirements.speculation
    mode = speculation.mode if speculation is not None and spec.family == "softmax" else None
    gaps = [
        gap
        for row, phase in zip(rows, phases, strict=True)
        for gap in unmet(
            row,
            asked.requirements,
            asked.device,
            asked.libraries,
            phase,
            speculates=mode == phase.value,
        )
    ]
    if not spec.implemented and not asked.simulated and not any(g.need == "device" for g in gaps):
        gaps.insert(0, Unmet("implementation", spec.name, "not implemented in 0.1"))
    # the fewest ways out first: a gap that nothing closes ends the branch at once
    return sorted(dict.fromkeys(gaps), key=lambda g: len(g.changes))


def _lists(overrides: Overrides, name: str) -> tuple[Change, ...]:
    """Return the changes that let --allow and --deny pass the backend."""
    changes = []
    if overrides.allow is not None and name not in overrides.allow:
        allow = (*overrides.allow, name)
        changes.append(Change("overrides", (("allow", allow),), 1, f"add {name} to --allow"))
    if name in overrides.deny:
        rest = tuple(d for d in overrides.deny if d != name)
        changes.append(Change("overrides", (("deny", rest),), 1, f"take {name} from --deny"))
    return tuple(changes)


def _with_page(changes: tuple[Change, ...], result: Selection) -> tuple[Change, ...]:
    """Put the page size that was chosen in the place of "no --page-size"."""
    page = result.page_size
    named = Change("requirements", (("page_size", page),), FLAG, f"--page-size {page}")
    return tuple(named if c.values == (("page_size", None),) else c for c in changes)


def describe(answer: WhyNot) -> str:
    """Write the answer for people."""
    name = f"{answer.backend} (linear)" if answer.family == "linear" else answer.backend
    decision, lines = answer.decision, []
    if answer.chosen:
        lines.append(f"{name} is chosen for {' and '.join(answer.chosen)}")
    elif answer.fits:
        lines.append(f"{name} fits, but is not chosen")
        for role in ("prefill", "decode"):
            chosen = getattr(decision.linear if answer.family == "linear" else decision, role, None)
            key = f"linear {role}" if answer.family == "linear" else role
            if chosen is not None:
                lines.append(f"  {role:<8} {chosen}: {decision.why.get(key, '')}")
    else:
        lines.append(f"{name} does not fit")
    lines += [f"  {phase:<8} {reason}" for phase, reason in answer.reasons]
    if answer.changes is None:
        lines.append("nothing that can be changed here makes it fit")
    elif answer.naming:
        lines.append("smallest change:" if answer.changes else "to use it:")
        lines += [f"  {c.text}" for c in answer.changes]
        lines.append(f"  {answer.naming}")
        if any(c.target == "libraries" for c in answer.changes):
            lines.append("`attn doctor` prints the version that fits the torch installed")
    lines += [f"note: {note}" for note in answer.notes]
    return "\n".join(lines)
