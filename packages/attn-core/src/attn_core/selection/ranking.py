"""Judge every row for a phase: its verdict, its rank, and the error if nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import attn_core
from attn_core.costs import store
from attn_core.costs.profile import Profile
from attn_core.costs.shapes import row_key
from attn_core.formatting import listing
from attn_core.plugins.dependencies import Libraries
from attn_core.plugins.registry import Registry
from attn_core.selection.compatibility import mismatches
from attn_core.selection.expected import Costs, Expected, micros
from attn_core.selection.known_bad import known_bad_gaps
from attn_core.selection.mismatch import Fix, FixCost, Mismatch
from attn_core.selection.result import Overrides, Verdict
from attn_core.selection.sub_backends import flag_of, sub_backend_gaps
from attn_core.spec.capabilities import BackendSpec, Capabilities, places
from attn_core.spec.device import Device
from attn_core.spec.kinds import Family, Phase
from attn_core.spec.requirements import Requirements


def shipped_profile(
    device: Device, registry: Registry, libraries: Libraries
) -> tuple[Profile, str]:
    """Return what plugins ship for this device, and a sentence that says what is refused, and why.

    A profile is refused if torch, attn-core, a plugin or a library has another version here. One
    that is not known agrees, and one that is not here runs nothing.
    """
    profile, refused = Profile(), dict[str, None]()
    if device.name is None:
        return profile, ""
    origins = registry.origins.values()
    packages = {"attn-core": attn_core.__version__, **{o.distribution: o.version for o in origins}}
    for own in store.shipped((origin.module for origin in origins), device.name):
        known = {**libraries, **packages}.items()
        installed = {n: v for n, v in known if n in own.environment}
        measured = Profile(environment={name: own.environment[name] for name in installed})
        if differs := measured.differences(installed):
            refused[f"the profile of {device.name} is not used: {', '.join(differs)}"] = None
        else:
            profile = profile.merged(own)
    text = "; ".join(refused)
    return profile, f"{text}; `attn tune` measures this machine" if refused else ""


@dataclass(frozen=True)
class RowJudge:
    """The arguments of one select() call, and the rules that judge and rank a row under them."""

    needs: Requirements
    device: Device
    registry: Registry
    libraries: Libraries
    overrides: Overrides
    costs: Costs
    simulated: bool

    def weigh(self, family: Family, phase: Phase) -> tuple[Verdict, ...]:
        """Return the verdict on every row of a family for a phase."""
        spec_mode = self.needs.speculation and self.needs.speculation.mode
        verdicts = tuple(
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
                + tuple(known_bad_gaps(spec, row, self.needs, self.device, self.libraries, phase))
                + sub_backend_gaps(row, phase, self.overrides),
                tuple(n for n in (_not_built(spec, row), _ragged_only(spec, row), row.note) if n),
            )
            for spec in self.registry.family(family)
            for row in spec.capabilities
        )
        fitting = [(v.spec, v.row) for v in verdicts if v.fits]
        costs = iter(self.costs.expected(fitting, phase, self.needs.page_size))
        return tuple(replace(v, expected=next(costs)) if v.fits else v for v in verdicts)

    def _policy(self, spec: BackendSpec, row: Capabilities) -> tuple[Mismatch, ...]:
        gaps = []
        allow, deny, name = self.overrides.allow, self.overrides.deny, spec.name
        failed = not self.simulated and self.registry.failed
        if failed and (failure := failed.get((spec.family, name, row_key(row)))):
            retry = f"`attn check {name}` says more, `attn doctor --probe` tries again"
            gaps.append(Mismatch("probe", f"its probe failed {failure}", retry))
        if spec.creator(row) is None and not self.simulated:
            gaps.append(Mismatch("implementation", f"{name} is declared", "not implemented in 0.1"))
        if allow is not None and name not in allow:
            fix = Fix("overrides", (("allow", (*allow, name)),), FixCost.NAME, f"--allow {name}")
            gaps.append(Mismatch("allow", name, f"--allow has {', '.join(allow)}", (fix,)))
        if name in deny:
            remaining = tuple(d for d in deny if d != name)
            fix = Fix("overrides", (("deny", remaining),), FixCost.NAME, f"no --deny {name}")
            gaps.append(Mismatch("deny", name, "--deny has it", (fix,)))
        return tuple(gaps)

    def rank(self, verdict: Verdict, unmeasured: float = 0.0) -> tuple[float, ...]:
        """Rank fitting rows, best first: by preference, then expected cost, then priority.

        unmeasured: µs that stand for the cost of a row that has none.
        """
        prefer, name = self.overrides.prefer, verdict.spec.name
        place = prefer.index(name) if name in prefer else len(prefer)
        cost = verdict.expected
        # what is measured ranks first
        measured = (1, unmeasured) if cost is None else (0, cost.us)
        return (place, *measured, -verdict.row.priority)

    def on_pages(self, verdict: Verdict, page: int) -> Verdict:
        """Return the verdict with what it costs on pages of this size."""
        cost = verdict.expected
        if cost is None or self.needs.page_size is not None:
            return verdict
        cost = self.costs.on_pages(verdict.spec, verdict.row, verdict.phase, page, cost)
        return replace(verdict, expected=cost)

    def named(self, family: Family, phase: Phase) -> str | None:
        """Return the name that the caller gave for this phase, after checking that it exists."""
        name = self.overrides.flag(family, phase)[1]
        return None if name is None else self.registry.get(name, family).name

    def candidates(self, verdicts: tuple[Verdict, ...], family: Family) -> list[Verdict]:
        """Return the verdicts that may be selected, best first, ties by name."""
        name = self.named(family, verdicts[0].phase) if verdicts else None
        fitting = [v for v in verdicts if v.fits and name in (None, v.spec.name)]
        return sorted(fitting, key=lambda v: (self.rank(v), v.spec.name))

    def reason(self, chosen: Verdict, family: Family, others: Sequence[Verdict] = ()) -> str:
        """Say why `chosen` was selected for its phase; others: those that fit, too."""
        flag, name = self.overrides.flag(family, chosen.phase)
        field, kernel = self.overrides.sub_backend(chosen.phase)
        if kernel is not None and family == "softmax":
            return f"{kernel}, named by {flag_of(field)}"
        if chosen.row.sub_backend:
            unnamed = replace(chosen, row=replace(chosen.row, sub_backend=""))
            return f"{chosen.row.sub_backend}, {self.reason(unnamed, family, others)}"
        if name is not None:
            return f"named by {flag}"
        if chosen.spec.name in self.overrides.prefer:
            return "preferred by --prefer"
        if chosen.expected is not None:
            return self._measured(chosen, chosen.expected, others)
        return f"highest priority of those that fit ({chosen.row.priority})"

    def _measured(self, chosen: Verdict, cost: Expected, others: Sequence[Verdict]) -> str:
        """Say what the choice costs, how much less that is than the next, and how sure it is."""
        device = f" on {self.device.name}" if self.device.name else ""
        text = f"measured{device}: {cost} per request and layer"
        measured_others = [
            v for v in others if v.spec.name != chosen.spec.name and v.expected is not None
        ]
        if not measured_others:
            return f"{text}; no other that fits was measured in these passes"
        next_best = min(measured_others, key=lambda v: v.expected.us if v.expected else 0.0)
        assert next_best.expected is not None
        other_cost = next_best.expected
        saving = 1 - cost.us / other_cost.us
        if saving < 0:
            return (
                f"{text}; with {next_best.spec.name} this phase alone takes {micros(other_cost.us)}"
            )
        certainty = "sure" if cost.surely_below(other_cost) else "not sure"
        return f"{text}, {100 * saving:.0f} % less than {next_best.spec.name} ({certainty})"


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
    flag, requested = s.overrides.flag(family, phase)
    if requested is not None:
        name = s.registry.get(requested, family).name
        nearest = [v for v in verdicts if v.phase is phase and v.spec.name == name]
        reasons = "; ".join(str(r) for v in nearest for r in v.reasons)
        return f"{flag} {requested} cannot run {phase.value} on {s.device}: {reasons}"
    nearest = sorted((v for v in verdicts if v.phase is phase), key=_distance)[:3]
    reasons_text = "; ".join(
        f"{v.spec.name}: {', '.join(str(r) for r in v.reasons)}" for v in nearest
    )
    return (
        f"no backend fits {phase.value} on {s.device}"
        + (f"; nearest are {reasons_text}" if reasons_text else ": none is declared")
        + _flags(s, nearest[0] if nearest else None)
        + "; `attn why-not BACKEND` says what to change"
    )


def _flags(s: RowJudge, nearest: Verdict | None) -> str:
    """Say which flags let a kernel of sparse MLA that the caller named fit."""
    if nearest is None or s.overrides.sub_backend(nearest.phase)[1] is None:
        return ""
    ways = [
        [f.text for f in r.fixes if f.text.startswith("--") and f.cost < FixCost.INSTALL]
        for r in nearest.reasons
    ]
    texts = " ".join(dict.fromkeys(texts[0] for texts in ways if texts))
    return f"; add {texts} for {nearest.spec.name}" if all(ways) else ""
