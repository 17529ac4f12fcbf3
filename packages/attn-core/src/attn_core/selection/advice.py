"""Advice beside a selection: what is implemented today, and which flag avoids what is slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attn_core.errors import AttnError
from attn_core.selection.mismatch import Fix, FixCost, apply_fix
from attn_core.selection.ranking import RowJudge
from attn_core.selection.result import Choice, NoBackendError, Overrides, Selection, role_of
from attn_core.spec.kinds import Family, Phase, Role

Solve = Callable[[RowJudge], Selection]
TRIES = 24  # flags that are tried one by one, cheapest first
SHOWN = 2  # of those that help


def runs_today(s: RowJudge, chosen: Selection, solve: Solve) -> dict[Role, str | None]:
    """Return the best implemented backend, or None, for each role whose backend is only declared.

    All roles are solved together again, because they still share one cache.
    """
    declared = [role for role, c in chosen.roles.items() if not _creator(s, role, c)]
    if not declared:
        return {}
    try:
        implemented = solve(replace(s, simulated=False, overrides=_implemented(s)))
    except AttnError:
        return dict.fromkeys(declared)
    return {role: implemented.backend(role) for role in declared}


def _creator(s: RowJudge, role: Role, choice: Choice) -> str | None:
    family: Family = "linear" if role.startswith("linear") else "softmax"
    return s.registry.get(choice.backend, family).creator(choice.row)


def _implemented(s: RowJudge) -> Overrides:
    """Return the overrides without the names of backends that are only declared."""
    names: dict[str, Any] = {}
    for field, value in vars(s.overrides).items():
        if field.startswith("nsa_"):  # names of kernels, not of backends
            continue
        family: Family = "linear" if field.startswith("linear_attn") else "softmax"
        if isinstance(value, str) and not s.registry.get(value, family).implemented:
            names[field] = None
    return replace(s.overrides, **names)


def advice(s: RowJudge, chosen: Selection, solve: Solve) -> tuple[str, ...]:
    """Say what is slow on this accelerator and which flag, already tried, avoids it."""
    if s.device.type == "cpu":
        return ()
    sentences = [_reference(s, chosen, solve, phase) for phase in (Phase.PREFILL, Phase.DECODE)]
    return tuple(text for text in (*sentences, _float32(s, chosen, solve)) if text)


def _references(s: RowJudge, chosen: Selection) -> set[Phase]:
    """Return the phases that a reference backend serves without being named for it."""
    return {
        phase
        for phase in (Phase.PREFILL, Phase.DECODE)
        if (choice := chosen.roles.get(role_of("softmax", phase))) is not None
        and choice.row.priority <= 0
        and s.named("softmax", phase) is None
    }


def _reference(s: RowJudge, chosen: Selection, solve: Solve, phase: Phase) -> str:
    slow = _references(s, chosen)
    if phase not in slow:
        return ""
    fixes = {
        fix
        for verdict in s.weigh("softmax", phase)
        if all(reason.need != "kind" for reason in verdict.reasons)  # no flag changes the layers
        for reason in verdict.reasons
        for fix in reason.fixes
        if fix.target in ("requirements", "speculation") and fix.cost < FixCost.MACHINE
    }
    helping = []
    for fix in sorted(fixes, key=lambda c: (c.cost, c.text))[:TRIES]:
        solved = _solved(s, fix, solve)
        if solved is not None and _references(s, solved) <= slow - {phase}:
            helping.append(fix)
        if len(helping) == SHOWN or (helping and helping[0].cost < fix.cost):
            break
    ways = " or ".join(c.text for c in helping if c.cost == helping[0].cost)
    name = chosen.backend(role_of("softmax", phase))
    return (
        f"{phase.value} runs on {name}, a reference that is written to be right and not fast: "
        f"many times slower than a kernel on {s.device}; "
        + (f"to avoid it: {ways}" if ways else "no single flag avoids it")
    )


def _float32(s: RowJudge, chosen: Selection, solve: Solve) -> str:
    if s.needs.dtype != "fp32" or "prefill" not in chosen.roles:
        return ""
    fix = Fix("requirements", (("dtype", "bf16"),), 0, "--dtype bf16")
    solved = _solved(s, fix, solve)
    if solved is None:
        return ""
    gains = []
    if chosen.kv_cache_dtype == "fp32":
        gains.append("halves the cache")
    serving = [(x.backend("prefill"), x.backend("decode")) for x in (chosen, solved)]
    if serving[0] != serving[1]:
        gains.append("runs prefill on {} and decode on {}".format(*serving[1]))
    subject = "the model is float32, and so is its KV cache"
    if chosen.kv_cache_dtype != "fp32":
        subject = "the model is float32"
    return f"{subject}: {fix.text} {' and '.join(gains)}" if gains else ""


def _solved(s: RowJudge, fix: Fix, solve: Solve) -> Selection | None:
    try:
        return solve(replace(s, needs=apply_fix(s.needs, fix)))
    except NoBackendError:
        return None
