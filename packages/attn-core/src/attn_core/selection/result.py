"""The parts of a selection: the caller's overrides, the verdicts and the decision itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from attn_core.errors import AttnError
from attn_core.selection.expected import Costs, Expected
from attn_core.selection.mismatch import Mismatch
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device
from attn_core.spec.kinds import Family, Phase, Role
from attn_core.spec.requirements import Requirements, StateBytes


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """The caller's decisions. A name is honoured or refused, never replaced.

    nsa_prefill_backend, nsa_decode_backend: the kernel of sparse MLA (DSA), a row's sub_backend.
    prefer: these names rank before all others if they fit, in this order.
    allow: no other backend may be selected.
    deny: these backends are never selected.
    prefer, allow and deny apply to every role.
    """

    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    mm_attention_backend: str | None = None
    linear_attn_backend: str | None = None
    linear_attn_prefill_backend: str | None = None
    linear_attn_decode_backend: str | None = None
    nsa_prefill_backend: str | None = None
    nsa_decode_backend: str | None = None
    prefer: tuple[str, ...] = ()
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()

    def flag(self, family: Family, phase: Phase) -> tuple[str, str | None]:
        """Return the flag that decides a phase and its value; a phase inherits the base flag."""
        if phase is Phase.ENCODE:
            return "--mm-attention-backend", self.mm_attention_backend
        if family == "linear":
            phase_field, base_field = f"linear_attn_{phase.value}_backend", "linear_attn_backend"
        else:
            phase_field, base_field = f"{phase.value}_attention_backend", "attention_backend"
        name = phase_field if getattr(self, phase_field) is not None else base_field
        return "--" + name.replace("_", "-"), getattr(self, name)

    def sub_backend(self, phase: Phase) -> tuple[str, str | None]:
        """Return the field that names the kernel of sparse MLA for a phase, and its value."""
        name = f"nsa_{phase.value}_backend"
        return name, getattr(self, name, None)  # an encoder has none


@dataclass(frozen=True)
class Verdict:
    """One backend judged for one phase. It fits if it has no reasons; notes never refuse."""

    spec: BackendSpec
    phase: Phase
    row: Capabilities
    reasons: tuple[Mismatch, ...] = ()
    notes: tuple[str, ...] = ()
    expected: Expected | None = None  # by the profile of this device

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def cost(self) -> int:
        return sum(min((c.cost for c in r.fixes), default=1000) for r in self.reasons)


@dataclass(frozen=True)
class Choice:
    """The backend of a role, the row that serves it, and why it was selected.

    notes: what the caller should know about this row. They never refuse.
    """

    backend: str
    row: Capabilities
    reason: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The decision: a choice per role, the properties of the pool, and all reasons.

    requirements: the requirements that were solved for.
    roles: "prefill" and "decode" if the model has softmax layers; "verify" and "draft" with
    speculation; "encode" with a vision tower; "linear_prefill", "linear_decode" and
    "linear_verify" with linear layers. A role is absent if the model keeps its own layers.
    page_size, kv_cache_dtype, layout: the caller creates the pool with them; nothing is applied.
    page_size is None without softmax layers. page_size_reason says why it was chosen.
    conflicts: pairs of backends that cannot share a cache, each in one sentence.
    runs_today: for each role whose row is declared but not implemented, the best implemented
    backend, or None if none fits.
    advice: sentences about what is slow here, with the flag that avoids it.
    alternatives: role → backends that may take over single passes where they were measured faster,
    over the same cache; costs: by which they are compared.
    """

    requirements: Requirements = field(default_factory=Requirements)
    roles: Mapping[Role, Choice] = field(default_factory=dict)
    page_size: int | None = None
    page_size_reason: str = ""
    kv_cache_dtype: str = "bf16"
    layout: str = "NHD"
    device: Device = field(default_factory=lambda: Device("cpu"))
    assumptions: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    conflicts: tuple[str, ...] = ()
    runs_today: Mapping[Role, str | None] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    alternatives: Mapping[Role, tuple[Choice, ...]] = field(default_factory=dict)
    costs: Costs | None = field(default=None, compare=False, repr=False)

    def backend(self, role: Role) -> str | None:
        """Return the name of a role's backend, or None if there is no such role."""
        return self.roles[role].backend if role in self.roles else None

    def explain(self) -> str:
        """Return the decision as text: roles, reasons, assumptions and rejected backends."""
        return explain(self)

    def to_json(self) -> dict[str, Any]:
        """Return the decision as plain data: the object that `attn select --json` prints."""
        return to_json(self)


class NoBackendError(AttnError):
    """No backend fits. `selection` is the decision as far as it got, with every verdict."""

    def __init__(self, message: str, selection: Selection) -> None:
        super().__init__(message)
        self.selection = selection

    def __reduce__(self) -> tuple[Any, ...]:  # `args` alone, which pickle takes, lack the selection
        return type(self), (str(self), self.selection)


SOFTMAX_ROLES: tuple[Role, ...] = ("prefill", "decode", "verify", "draft", "encode")
LINEAR_ROLES: tuple[Role, ...] = ("linear_prefill", "linear_decode", "linear_verify")


def role_of(family: Family, phase: Phase) -> Role:
    """Return the role in which a backend of this family serves a phase."""
    return cast("Role", f"linear_{phase.value}" if family == "linear" else phase.value)


def label(role: Role) -> str:
    """Return a role as the commands print it: "multimodal", "linear prefill"."""
    return "multimodal" if role == "encode" else role.replace("_", " ")


def to_json(selection: Selection, error: str | None = None) -> dict[str, Any]:
    """Return the decision as plain data; `error` is added if no backend was found."""
    linear = [selection.backend(role) for role in LINEAR_ROLES]
    data: dict[str, Any] = {label(role): selection.backend(role) for role in SOFTMAX_ROLES}
    data |= {
        "linear": dict(zip(("prefill", "decode", "verify"), linear, strict=True))
        if any(linear)
        else None,
        "states": [{"kind": kind, **x._asdict()} for kind, x in _states(selection)],
        "page_size": selection.page_size,
        "kv_cache_dtype": selection.kv_cache_dtype,
        "layout": selection.layout,
        "device": str(selection.device),
        "runtime": selection.device.runtime,
        "assumptions": list(selection.assumptions),
        "why": _reasons(selection),
        "conflicts": list(selection.conflicts),
        "alternatives": {
            label(role): [c.backend for c in others]
            for role, others in selection.alternatives.items()
        },
        "runs_today": {label(role): name for role, name in selection.runs_today.items()},
        "advice": list(selection.advice),
        "verdicts": [_verdict(v) for v in selection.verdicts],
    }
    return data | ({} if error is None else {"error": error})


def _reasons(selection: Selection) -> dict[str, str]:
    """Return every reason by what it is for: a role, the page size, the notes of all rows."""
    reasons = {label(role): c.reason for role, c in selection.roles.items() if c.reason}
    if selection.page_size is not None:
        reasons["page_size"] = selection.page_size_reason
    return reasons | ({"notes": notes} if (notes := notes_of(selection)) else {})


def notes_of(selection: Selection) -> str:
    """Return what the caller should know of the chosen rows, each sentence once."""
    sentences: list[str] = []
    groups: tuple[tuple[Role, ...], ...] = (
        ("prefill", "decode"),
        ("encode",),
        ("linear_prefill", "linear_decode"),
    )
    for group in groups:
        chosen = [(r, selection.roles[r]) for r in group if r in selection.roles]
        same = len(chosen) > 1 and len({(c.backend, c.row.note) for _, c in chosen}) == 1
        for role, c in chosen:
            name = c.backend if same else f"{c.backend} ({role.removeprefix('linear_')})"
            sentences += [f"{name}: {note}" if note == c.row.note else note for note in c.notes]
    return "; ".join(dict.fromkeys(sentences))


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "backend": verdict.spec.name,
        "family": verdict.spec.family,
        "phase": verdict.phase.value,
        "fits": verdict.fits,
        "reasons": [str(r) for r in verdict.reasons],
        "notes": list(verdict.notes),
        "expected": None if verdict.expected is None else verdict.expected.to_json(),
    }


def explain(selection: Selection) -> str:
    """Return the decision as text: backends with reasons, the pool, assumptions, all verdicts."""
    name = f" ({selection.device.name})" if selection.device.name else ""
    lines = [f"on {selection.device}{name}"]
    for roles, width in ((SOFTMAX_ROLES, 11), (LINEAR_ROLES, 15)):
        for role in (x for x in roles if x in selection.roles):
            name, reason = selection.roles[role].backend, _reason_text(selection, role)
            lines.append(f"  {label(role):<{width}}{name:<{26 - width}} {reason}")
    lines += [f"  {'state':<11}{_state_text(selection, *x)}" for x in _states(selection)]
    if selection.page_size is not None:
        lines.append(f"  {'page size':<11}{selection.page_size:<16}{selection.page_size_reason}")
        lines.append(f"  {'kv cache':<11}{selection.kv_cache_dtype}, layout {selection.layout}")
    if notes := notes_of(selection):
        lines.append(f"  {'note':<11}{notes}")
    lines += [
        f"  {'by pass':<11}{label(role)}: {', '.join(c.backend for c in others)} may take over "
        "passes of sizes at which they were measured faster"
        for role, others in selection.alternatives.items()
    ]
    lines += [f"  {'advice':<11}{a}" for a in selection.advice]
    lines += [f"  {'assumed':<11}{a}" for a in selection.assumptions]
    lines += [f"  {'conflict':<11}{c}" for c in selection.conflicts]
    others = [v for v in selection.verdicts if not _is_selected(selection, v)]
    lines += ["others:"] * bool(others)
    for v in others:
        text = "; ".join(map(str, v.reasons)) or _place(v)
        family = "linear " if v.spec.family == "linear" else ""
        lines.append(f"  {family}{v.phase.value:<8} {v.spec.name:<22}{text}")
    return "\n".join(lines)


def _place(verdict: Verdict) -> str:
    """Say what ranks a row that fits and was not selected."""
    if verdict.expected is None:
        return f"fits, priority {verdict.row.priority}"
    return f"fits, measured: {verdict.expected} per request and layer"


def _states(selection: Selection) -> Iterator[tuple[str, StateBytes]]:
    """Yield each kind of linear layer that a selected backend runs, and what a request takes."""
    needs = selection.requirements
    drafts = needs.speculation.num_draft_tokens if needs.speculation else 0
    for layer in needs.linear_layers if selection.backend("linear_decode") else ():
        sizes = layer.state_bytes(drafts, dtype=needs.dtype)
        if sizes is not None:
            yield layer.kind, sizes


def _state_text(selection: Selection, kind: str, sizes: StateBytes) -> str:
    """Say what a request takes in one linear layer."""
    state, conv, records = (size / 1e6 for size in sizes)
    text = f"per request and {kind} layer: {state:.2f} MB in fp32, {state / 2:.2f} MB in bf16"
    text += f"; convolution {conv:.2f} MB" if conv else ""
    speculation = selection.requirements.speculation
    drafts = speculation.num_draft_tokens if speculation else 0
    return text + (f"; {drafts} drafts add {records:.2f} MB" if drafts else "")


def _reason_text(selection: Selection, role: Role) -> str:
    """Say why a role has its backend, and where that is only declared, what runs today."""
    reason = selection.roles[role].reason
    if role not in selection.runs_today:
        return reason
    implemented = selection.runs_today[role] or "nothing that is implemented"
    return f"{reason}; runs today: {implemented}" if reason else f"runs today: {implemented}"


def _is_selected(selection: Selection, verdict: Verdict) -> bool:
    """Say whether this verdict is the one of a chosen backend."""
    role = role_of(verdict.spec.family, verdict.phase)
    return selection.backend(role) == verdict.spec.name
