"""A decision as text for people and as plain data for programs."""

from __future__ import annotations

from typing import Any

from attn_core.capabilities import Phase
from attn_core.decision import Selection, Verdict

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
