"""Diagnose why a backend is not selected, and find the smallest fix that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from attn_core.costs.profile import Profile
from attn_core.costs.workload import Workload
from attn_core.plugins.dependencies import Libraries
from attn_core.plugins.evidence import proved
from attn_core.plugins.registry import Registry
from attn_core.selection.fix_search import Apply, Goal, Search, drop
from attn_core.selection.inputs import SelectionInputs
from attn_core.selection.mismatch import Fix, FixCost
from attn_core.selection.result import NoBackendError, Overrides, Selection, role_of
from attn_core.spec.capabilities import BackendSpec
from attn_core.spec.device import Device, torch_build
from attn_core.spec.kinds import Family, Phase
from attn_core.spec.requirements import Requirements


@dataclass(frozen=True)
class WhyNot:
    """The answer to "why not this backend?".

    fits: the backend can be named without any other change.
    chosen: the roles that it has in the decision as requested.
    reasons: (phase, what it lacks).
    naming: the flag that gives it a role, or "" if none is needed.
    fixes: the cheapest fixes that get it selected; () if none is needed, None if nothing that a
    caller can change is enough.
    after: the inputs with the fixes and the flag, for which it is selected.
    decision: the selection as requested, as far as it could be solved.
    """

    backend: str
    family: Family
    fits: bool
    chosen: tuple[str, ...]
    reasons: tuple[tuple[str, str], ...]
    naming: str
    fixes: tuple[Fix, ...] | None
    after: SelectionInputs | None
    decision: Selection
    notes: tuple[str, ...] = ()

    @property
    def named(self) -> tuple[Fix, ...]:
        """The flag of `naming` as a fix, to apply together with the others."""
        option, _, name = self.naming.removeprefix("--").partition(" ")
        values = ((option.replace("-", "_"), name),)
        return (Fix("overrides", values, FixCost.NAME, self.naming),) if name else ()


def why_not(
    backend: str,
    requirements: Requirements,
    device: Device,
    registry: Registry,
    libraries: Libraries,
    overrides: Overrides | None = None,
    profile: Profile | None = None,
    *,
    workload: Workload | None = None,
    simulated: bool = False,
    family: Family = "softmax",
    apply: Apply | None = None,
) -> WhyNot:
    """Answer why `backend` lacks some or all roles, and what would have to change.

    The suggested fixes were run through select(): with them the backend is selected, and without
    any one of them it is not. An alias of a vision backend (--mm-attention-backend) asks about that
    role.
    profile, workload: measured costs and what weighs them, as select() takes them.
    apply: how fixes are applied, by default to these inputs; a command line applies them to its
    flags.
    Raises UnknownBackendError.
    """
    spec = registry.get(backend, family)
    overrides, workload = overrides or Overrides(), workload or Workload()
    inputs = SelectionInputs(
        requirements, device, libraries, overrides, simulated, profile, workload
    )
    failure = ""
    try:
        decision = inputs.select(registry)
    except NoBackendError as error:
        decision, failure = error.selection, str(error)
    roles = () if failure else _roles(decision, spec)  # half a decision gives nobody a role
    reasons = tuple(
        (v.phase.value, str(r)) for v in decision.verdicts if v.spec is spec for r in v.reasons
    )
    if not any(layer.family == family for layer in requirements.layers):
        reasons += (("", f"the model has no {family} attention layers"),)
    pair = (("pair", c) for c in decision.conflicts if spec.name in c)
    reasons = tuple(dict.fromkeys((*reasons, *pair)))
    module = registry.origins[(spec.family, spec.name)].module
    spec_notes: tuple[str, ...] = (
        () if spec.implemented else (f"{spec.name} is not implemented in 0.1",)
    )

    def answer(naming: str, fixes: tuple[Fix, ...] | None, fixed: SelectionInputs | None) -> WhyNot:
        fits, notes = fixes == (), spec_notes
        if fixed is not None:
            layers = fixed.requirements.layers
            kinds = dict.fromkeys(x.kind for x in layers if x.family == family)
            notes += tuple(proved(module, spec.name, kind, str(fixed.device)) for kind in kinds)
        return WhyNot(
            spec.name, family, fits, roles, reasons, naming, fixes, fixed, decision, notes
        )

    if roles and not (family == "softmax" and len(set(roles) & {"prefill", "decode"}) == 1):
        return answer("", (), inputs)
    encodes = all(row.phases == {Phase.ENCODE} for row in spec.capabilities)
    vision_only = encodes or backend != spec.name
    torch = None if simulated else torch_build().get("version")
    search = Search(spec, registry, apply or inputs.apply, torch)
    result = search.run(_goals(spec.name, inputs, family, roles, vision_only))
    if result is None:
        if not reasons:  # it fits alone: what fails is another role
            reasons = (("", failure or f"no fix gives {spec.name} a role"),)
        return answer("", () if roles else None, None)
    fixes, fixed = result
    flags = {_flag(f.name) for f in fields(Overrides) if f.name.endswith("backend")}
    naming = next((c for c in fixes if c.text.partition(" ")[0] in flags), None)
    remaining = tuple(c for c in fixes if c is not naming)
    return answer(naming.text if naming else "", remaining, fixed)


def _roles(selection: Selection, spec: BackendSpec) -> tuple[str, ...]:
    """Return the roles of a backend, each as `--json` spells it within its family."""
    phases = (p for p in Phase if selection.backend(role_of(spec.family, p)) == spec.name)
    return tuple("multimodal" if p is Phase.ENCODE else p.value for p in phases)


def _goals(
    name: str, inputs: SelectionInputs, family: Family, roles: tuple[str, ...], vision_only: bool
) -> Iterator[Goal]:
    """Yield the ways to give a backend a role that it has not, with and without a flag for it."""
    o = inputs.overrides

    def goals(
        phases: tuple[Phase, ...], field: str, other_fields: tuple[str, ...], cost: int
    ) -> Any:
        """Name the backend by `field`.

        other_fields: those that would still name another backend for one of the phases.
        """
        drops = tuple(
            drop(f, getattr(o, f)) for f in other_fields if getattr(o, f) not in (None, name)
        )
        if not drops and all(o.flag(family, p)[1] in (None, name) for p in phases):
            yield Goal(phases, (), cost)
        naming = Fix("overrides", ((field, name),), FixCost.NAME, f"{_flag(field)} {name}")
        yield Goal(phases, (*drops, naming), cost)

    text = {Phase.PREFILL, Phase.DECODE} if not vision_only else set()
    linear = "linear_attn_" if family == "linear" else ""
    base = f"{linear}backend" if linear else "attention_backend"
    phase_fields = {
        phase: f"{linear}{phase.value}_backend" if linear else f"{phase.value}_attention_backend"
        for phase in (Phase.PREFILL, Phase.DECODE)
    }
    if text and not set(roles) & {"prefill", "decode"}:
        yield from goals(tuple(phase_fields), base, tuple(phase_fields.values()), 0)
    for phase, field in phase_fields.items():
        if not text or phase.value in roles:
            continue
        other_field = next(f for f in phase_fields.values() if f != field)
        # another backend is named for the other phase: then the question is about this one
        other_named = getattr(o, other_field) not in (None, name) and getattr(o, field) in (
            None,
            name,
        )
        yield from goals((phase,), field, (), 0 if other_named else 1)
    if family == "softmax" and (vision_only or inputs.requirements.vision is not None):
        # last for a backend of text: the question is about text
        cost = 0 if vision_only else 3
        yield from goals((Phase.ENCODE,), "mm_attention_backend", (), cost)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def describe(answer: WhyNot, command: str = "") -> str:
    """Return the answer as text. command: the whole command line that selects the backend."""
    name = f"{answer.backend} (linear)" if answer.family == "linear" else answer.backend
    decision, lines = answer.decision, []
    if answer.chosen:
        lines.append(f"{name} is chosen for {' and '.join(answer.chosen)}")
    elif answer.fits:
        lines.append(f"{name} fits, but is not chosen")
        for phase in (Phase.PREFILL, Phase.DECODE):
            choice = decision.roles.get(role_of(answer.family, phase))
            if choice is not None:
                lines.append(f"  {phase.value:<8} {choice.backend}: {choice.reason}")
    else:
        lines.append(f"{name} does not fit")
    lines += [f"  {phase:<8} {reason}" for phase, reason in answer.reasons]
    if answer.fixes is None:
        lines.append("nothing that can be changed here makes it fit")
    elif answer.fixes or answer.naming:
        lines.append("smallest change:" if answer.fixes else "to use it:")
        lines += [f"  {c.text}" for c in answer.fixes]
        lines += [f"  {answer.naming}"] if answer.naming else []
        lines += ["as one command:", f"  {command}"] if command else []
    lines += [f"note: {note}" for note in answer.notes]
    return "\n".join(lines)
