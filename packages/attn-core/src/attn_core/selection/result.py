"""What a selection is made of: the caller's overrides, the verdicts and the decision itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core.errors import AttnError
from attn_core.selection.mismatch import Mismatch
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device
from attn_core.spec.kinds import Family, Phase
from attn_core.spec.requirements import Requirements


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What the caller decides: a name is honoured or refused, never replaced.

    prefer: an order; the names in it rank before all others where they fit. allow: nothing else
    may be chosen. deny: never chosen. The three hold for every role.
    """

    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    mm_attention_backend: str | None = None
    linear_attn_backend: str | None = None
    linear_attn_prefill_backend: str | None = None
    linear_attn_decode_backend: str | None = None
    prefer: tuple[str, ...] = ()
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()

    def flag(self, family: Family, phase: Phase) -> tuple[str, str | None]:
        """Return the flag that decides a phase and its value; a phase inherits the base."""
        if phase is Phase.ENCODE:
            return "--mm-attention-backend", self.mm_attention_backend
        if family == "linear":
            own, base = f"linear_attn_{phase.value}_backend", "linear_attn_backend"
        else:
            own, base = f"{phase.value}_attention_backend", "attention_backend"
        used = own if getattr(self, own) is not None else base
        return "--" + used.replace("_", "-"), getattr(self, used)


@dataclass(frozen=True)
class Verdict:
    """One backend weighed for one phase; no reasons = it fits. notes never refuse."""

    spec: BackendSpec
    phase: Phase
    row: Capabilities
    reasons: tuple[Mismatch, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def cost(self) -> int:
        return sum(min((c.cost for c in r.changes), default=1000) for r in self.reasons)


@dataclass(frozen=True)
class LinearSelection:
    """The kernels of linear layers; verify is None without speculation."""

    prefill: str
    decode: str
    verify: str | None = None


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The decision: names per role, what the pool must be, and why.

    requirements: what was asked for. verify and draft are None without speculation; multimodal
    without a vision tower; linear without linear layers, or where the model keeps its own. rows:
    the chosen row per role. conflicts: pairs that were refused, each in one sentence. runs_today:
    per role whose backend is declared and not implemented, the best implemented one, None where
    none fits. advice: sentences about what is slow here, with the flag that avoids it. Nothing is
    applied: the caller creates the pool with page_size, kv_cache_dtype and layout.
    """

    requirements: Requirements = field(default_factory=Requirements)
    prefill: str | None = None
    decode: str | None = None
    verify: str | None = None
    draft: str | None = None
    multimodal: str | None = None
    linear: LinearSelection | None = None
    page_size: int | None = None
    kv_cache_dtype: str = "bf16"
    layout: str = "NHD"
    device: Device = field(default_factory=lambda: Device("cpu"))
    assumptions: tuple[str, ...] = ()
    why: Mapping[str, str] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    conflicts: tuple[str, ...] = ()
    rows: Mapping[str, Capabilities] = field(default_factory=dict)
    runs_today: Mapping[str, str | None] = field(default_factory=dict)
    advice: tuple[str, ...] = ()

    def explain(self) -> str:
        """Write the decision for people: roles, why, what was assumed, what was rejected."""
        return explain(self)

    def to_json(self) -> dict[str, Any]:
        """Return the decision as plain data, the object that `attn select --json` prints."""
        return to_json(self)


class NoBackendError(AttnError):
    """No backend fits; `selection` is the decision as far as it came, with every verdict."""

    def __init__(self, message: str, selection: Selection) -> None:
        super().__init__(message)
        self.selection = selection


ROLES = ("prefill", "decode", "verify", "draft", "multimodal")


def to_json(selection: Selection, error: str | None = None) -> dict[str, Any]:
    """Return the decision as plain data; `error` is added where no backend was found."""
    linear = selection.linear
    data: dict[str, Any] = {role: getattr(selection, role) for role in ROLES}
    data |= {
        "linear": None
        if linear is None
        else {"prefill": linear.prefill, "decode": linear.decode, "verify": linear.verify},
        "page_size": selection.page_size,
        "kv_cache_dtype": selection.kv_cache_dtype,
        "layout": selection.layout,
        "device": str(selection.device),
        "runtime": selection.device.runtime,
        "assumptions": list(selection.assumptions),
        "why": dict(selection.why),
        "conflicts": list(selection.conflicts),
        "runs_today": dict(selection.runs_today),
        "advice": list(selection.advice),
        "verdicts": [_verdict(v) for v in selection.verdicts],
    }
    return data | ({} if error is None else {"error": error})


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "backend": verdict.spec.name,
        "family": verdict.spec.family,
        "phase": verdict.phase.value,
        "fits": verdict.fits,
        "reasons": [str(r) for r in verdict.reasons],
        "notes": list(verdict.notes),
    }


def explain(selection: Selection) -> str:
    """Write the decision: who runs what and why, the pool, assumptions, everybody's verdict."""
    lines = [f"on {selection.device}"]
    for role in ROLES:
        name = getattr(selection, role)
        if name is not None:
            lines.append(f"  {role:<11}{name:<16}{_why(selection, role)}")
    if selection.linear is not None:
        for role in ("prefill", "decode", "verify"):
            name = getattr(selection.linear, role)
            if name is not None:
                lines.append(f"  linear {role:<8}{name:<12}{_why(selection, f'linear {role}')}")
    if selection.page_size is not None:
        lines.append(f"  {'page size':<11}{selection.page_size:<16}{selection.why['page_size']}")
        lines.append(f"  {'kv cache':<11}{selection.kv_cache_dtype}, layout {selection.layout}")
    if "notes" in selection.why:
        lines.append(f"  {'note':<11}{selection.why['notes']}")
    lines += [f"  {'advice':<11}{a}" for a in selection.advice]
    lines += [f"  {'assumed':<11}{a}" for a in selection.assumptions]
    lines += [f"  {'conflict':<11}{c}" for c in selection.conflicts]
    rest = [v for v in selection.verdicts if not _serves(selection, v)]
    if rest:
        lines.append("others:")
    for v in rest:
        text = "; ".join(map(str, v.reasons)) or f"fits, priority {v.row.priority}"
        family = "linear " if v.spec.family == "linear" else ""
        lines.append(f"  {family}{v.phase.value:<8} {v.spec.name:<22}{text}")
    return "\n".join(lines)


def _why(selection: Selection, role: str) -> str:
    """Say why a role has its backend, and where that is only declared, what runs today."""
    why = selection.why.get(role, "")
    if role not in selection.runs_today:
        return why
    today = selection.runs_today[role] or "nothing that is implemented"
    return f"{why}; runs today: {today}" if why else f"runs today: {today}"


def _serves(selection: Selection, verdict: Verdict) -> bool:
    """Say whether this verdict is the one of a chosen backend."""
    if verdict.spec.family == "linear":
        chosen = getattr(selection.linear, verdict.phase.value, None)
    else:
        role = "multimodal" if verdict.phase is Phase.ENCODE else verdict.phase.value
        chosen = getattr(selection, role)
    return bool(verdict.spec.name == chosen)
