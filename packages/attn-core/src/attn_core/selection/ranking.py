"""Judge every row for a phase: its verdict, its rank, and the error if nothing fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from attn_core.formatting import listing
from attn_core.plugins.dependencies import Libraries
from attn_core.plugins.profiles import costs
from attn_core.plugins.registry import Registry
from attn_core.selection.compatibility import mismatches
from attn_core.selection.mismatch import Fix, FixCost, Mismatch
from attn_core.selection.result import Overrides, Verdict
from attn_core.selection.sub_backends import flag_of, sub_backend_gaps
from attn_core.spec.capabilities import BackendSpec, Capabilities, places
from attn_core.spec.device import Device
from attn_core.spec.kinds import Family, Phase
from attn_core.spec.requirements import Requirements

Profile = Mapping[tuple[str, str], float]  # (backend, phase) → measured cost, any one unit


def shipped_profile(needs: Requirements, device: Device, registry: Registry) -> Profile:
    """Return what plugins measured on this device for what these requirements make a phase do.

    Costs are relative to the fastest backend. Empty for a device without a profile, in
    deterministic mode, and for layers of other kinds than "mha": nothing of the sort was measured.
    """
    if device.name is None or needs.deterministic:
        return {}
    if any(x.kind != "mha" or x.encoder for x in needs.softmax_layers):
        return {}
    known = costs((origin.module for origin in registry.origins.values()), device.name)
    profile: dict[tuple[str, str], float] = {}
    for phase in (Phase.PREFILL, Phase.DECODE):
        tasks = [known.get(task, {}) for task in _tasks(needs, phase)]
        sums = {
            name: sum(t[name] for t in tasks) for name in tasks[0] if all(name in t for t in tasks)
        }
        fastest = min(sums.values(), default=1.0)
        profile |= {(name, phase.value): cost / fastest for name, cost in sums.items()}
    return profile


def _tasks(needs: Requirements, phase: Phase) -> list[str]:
    """Name what a phase does as profiles do: "decode", "decode fp8", "verify chain" …

    Where decode verifies, no request decodes one token; a prefill that verifies does both.
    """
    drafts, store = needs.speculation, needs.store_dtype.partition("_")[0]
    tasks = [phase.value]
    if drafts is not None and drafts.mode == phase.value:
        verify = "verify tree" if drafts.topk > 1 else "verify chain"
        tasks = [verify] if phase is Phase.DECODE else [phase.value, verify]
    return [task if store in ("bf16", "fp16") else f"{task} {store}" for task in tasks]


@dataclass(frozen=True)
class RowJudge:
    """The arguments of one select() call, and the rules that judge and rank a row under them."""

    needs: Requirements
    device: Device
    registry: Registry
    libraries: Libraries
    overrides: Overrides
    profile: Profile
    simulated: bool

    def weigh(self, family: Family, phase: Phase) -> tuple[Verdict, ...]:
        """Return the verdict on every row of a family for a phase."""
        spec_mode = self.needs.speculation and self.needs.speculation.mode
        return tuple(
            Verdict(
                spec,
                phase,
                row,
                mismatches(
                    row,
                    self.needs,
                    self.device,
                    self.libraries,
                    phase,
                    speculates=family == "softmax" and spec_mode == phase.value,
                )
                + self._policy(spec, row)
                + sub_backend_gaps(row, phase, self.overrides),
                tuple(n for n in (_not_built(spec, row), _ragged_only(spec, row), row.note) if n),
                self.profile.get((spec.name, phase.value)),
            )
            for spec in self.registry.family(family)
            for row in spec.capabilities
        )

    def _policy(self, spec: BackendSpec, row: Capabilities) -> tuple[Mismatch, ...]:
        gaps = []
        allow, deny, name = self.overrides.allow, self.overrides.deny, spec.name
        if spec.creator(row) is None and not self.simulated:
            gaps.append(Mismatch("implementation", f"{name} is declared", "not implemented in 0.1"))
        if allow is not None and name not in allow:
            fix = Fix("overrides", (("allow", (*allow, name)),), FixCost.NAME, f"--allow {name}")
            gaps.append(Mismatch("allow", name, f"--allow has {', '.join(allow)}", (fix,)))
        if name in deny:
            rest = tuple(d for d in deny if d != name)
            fix = Fix("overrides", (("deny", rest),), FixCost.NAME, f"no --deny {name}")
            gaps.append(Mismatch("deny", name, "--deny has it", (fix,)))
        return tuple(gaps)

    def rank(self, verdict: Verdict) -> tuple[float, ...]:
        """Rank fitting rows, best first: by preference, then measured cost, then priority."""
        prefer, name = self.overrides.prefer, verdict.spec.name
        place = prefer.index(name) if name in prefer else len(prefer)
        cost = verdict.measured
        measured = (0, cost) if cost is not None else (1, 0)  # what is measured ranks first
        return (place, *measured, -verdict.row.priority)

    def named(self, family: Family, phase: Phase) -> str | None:
        """Return the name that the caller gave for this phase, after checking that it exists."""
        name = self.overrides.flag(family, phase)[1]
        return None if name is None else self.registry.get(name, family).name

    def candidates(self, verdicts: tuple[Verdict, ...], family: Family) -> list[Verdict]:
        """Return the verdicts that may be selected, best first, ties by name."""
        name = self.named(family, verdicts[0].phase) if verdicts else None
        fitting = [v for v in verdicts if v.fits and name in (None, v.spec.name)]
        return sorted(fitting, key=lambda v: (self.rank(v), v.spec.name))

    def reason(self, chosen: Verdict, family: Family) -> str:
        """Say why `chosen` was selected for its phase."""
        flag, name = self.overrides.flag(family, chosen.phase)
        field, kernel = self.overrides.sub_backend(chosen.phase)
        if kernel is not None and family == "softmax":
            return f"{kernel}, named by {flag_of(field)}"
        if chosen.row.sub_backend:
            unnamed = replace(chosen, row=replace(chosen.row, sub_backend=""))
            return f"{chosen.row.sub_backend}, {self.reason(unnamed, family)}"
        if name is not None:
            return f"named by {flag}"
        if chosen.spec.name in self.overrides.prefer:
            return "preferred by --prefer"
        if chosen.measured is not None:
            return f"measured fastest of those that fit{self._where()}"
        return f"highest priority of those that fit ({chosen.row.priority})"

    def _where(self) -> str:
        return f" on {self.device.name}" if self.device.name else ""


def _not_built(spec: BackendSpec, row: Capabilities) -> str:
    return "" if spec.creator(row) else f"{spec.name} is not implemented in 0.1"


def _ragged_only(spec: BackendSpec, row: Capabilities) -> str:
    """Say what a caller has to do where a row of MLA has no pass over the cache."""
    if row.absorbed:
        return ""
    return (
        f"{spec.name} prefills MLA without its cache: write new latents with write_kv, then call "
        "forward_ragged on the heads before absorption (192/128) and merge a prefix in chunks by "
        "log-sum-exp"
    )


def best_per_backend(verdicts: tuple[Verdict, ...], s: RowJudge) -> tuple[Verdict, ...]:
    """Keep one row per backend: the best that fits, else the one closest to fitting."""
    best: dict[tuple[str, str], Verdict] = {}
    for v in sorted(verdicts, key=lambda v: (not v.fits, _distance(v), s.rank(v))):
        best.setdefault((v.phase.value, v.spec.name), v)
    for key, v in best.items():
        best[key] = replace(v, reasons=tuple(_everywhere(r, v, verdicts) for r in v.reasons))
    return tuple(
        sorted(
            best.values(),
            key=lambda v: (list(Phase).index(v.phase), not v.fits, s.rank(v), v.spec.name),
        )
    )


def _distance(verdict: Verdict) -> tuple[bool, bool, int]:
    """Order what does not fit: rows of another kind last, before them those of another device."""
    needs = {r.need for r in verdict.reasons}
    return "kind" in needs, "device" in needs, verdict.cost


def _everywhere(reason: Mismatch, verdict: Verdict, verdicts: tuple[Verdict, ...]) -> Mismatch:
    """Let a refused kind or device name those of all rows of the backend, not of the nearest."""
    if reason.need == "kind":
        kinds = {v.row.kind for v in verdicts if v.spec is verdict.spec}
        return replace(reason, supported=f"supports {listing(kinds)}")
    if reason.need != "device":
        return reason
    fitting = (v.row for v in verdicts if v.spec is verdict.spec and v.phase in v.row.phases)
    rows = [row for row in fitting if row.kind == verdict.row.kind]
    return replace(reason, supported=f"supports {places(rows)}") if rows else reason


def nothing_fits(s: RowJudge, verdicts: tuple[Verdict, ...], phase: Phase) -> str:
    family: Family = verdicts[0].spec.family if verdicts else "softmax"
    flag, named = s.overrides.flag(family, phase)
    if named is not None:
        name = s.registry.get(named, family).name
        near = [v for v in verdicts if v.phase is phase and v.spec.name == name]
        reasons = "; ".join(str(r) for v in near for r in v.reasons)
        return f"{flag} {named} cannot run {phase.value} on {s.device}: {reasons}"
    near = sorted((v for v in verdicts if v.phase is phase), key=_distance)[:3]
    shown = "; ".join(f"{v.spec.name}: {', '.join(str(r) for r in v.reasons)}" for v in near)
    return (
        f"no backend fits {phase.value} on {s.device}"
        + (f"; nearest are {shown}" if shown else ": none is declared")
        + "; `attn why-not BACKEND` says what to change"
    )
