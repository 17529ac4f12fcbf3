"""What a selection is made of: the caller's overrides, the verdicts and the decision itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core.capabilities import BackendSpec, Capabilities, Device, Family, Phase, Requirements
from attn_core.changes import Unmet


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
    reasons: tuple[Unmet, ...] = ()
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
        from attn_core.explain import explain

        return explain(self)

    def to_json(self) -> dict[str, Any]:
        """Return the decision as plain data, the object that `attn select --json` prints."""
        from attn_core.explain import to_json

        return to_json(self)
