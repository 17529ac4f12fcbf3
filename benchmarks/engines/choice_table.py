"""The seven cases of prompts of log-normal lengths: measured choice beside one fixed backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.engines import record
from benchmarks.engines.configurations import CONFIGURATIONS, OURS

CHOICES = ("lognormal", "lognormal-eagle", "lognormal-fp8")
_HEAD = """
### Measured choice beside one fixed backend, on {device}

The cases above whose prompts are log-normal around 1,000 tokens, against the fastest built-in
backend that was timed. "Must" is 0.98 in every case, and more than 1 in the sum of their steps.

"""
_COLUMNS = ("case", "rounds", "attn_core took", "attn_core", "best", "its time", "speed-up", "must")


def sections(records: Iterable[Mapping[str, Any]]) -> str:
    """Write a section for each device that has such records; "" for none."""
    devices: dict[str, list[Mapping[str, Any]]] = {}
    for each in records:
        if each["configuration"] in CHOICES:
            devices.setdefault(each.get("device", ""), []).append(each)
    return "".join(_HEAD.format(device=name) + _table(result) for name, result in devices.items())


def _table(records: Iterable[Mapping[str, Any]]) -> str:
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    ours, best, below, listed, done = 0.0, 0.0, [], 0, 0
    for each in records:
        for case in CONFIGURATIONS[each["configuration"]].cases:
            listed += 1
            name = f"{each['configuration']}, {case.name}"
            times = record.medians(each, case.name)
            ratio, peer = record.speedup(times), record.best_peer(times)
            cells = [name, _rounds(each, case.name), _took(each, case.name)]
            cells += [_ms(times.get(OURS)), peer or "-", _ms(times.get(peer or ""))]
            shown = "-" if ratio is None else f"{ratio:.3f}"
            lines.append(_line([*cells, shown, f"{case.must:.2f}"]))
            if ratio is None or peer is None:
                continue
            ours, best, done = ours + times[OURS], best + times[peer], done + 1
            if ratio < case.must:
                below.append(f"{name} ({ratio:.4f})")
    if done:
        cells = [f"sum of {done} of {listed}", "", "", _ms(ours), "", _ms(best)]
        lines.append(_line([*cells, f"**{best / ours:.3f}**", "1"]))
    message = f"\nBelow its must: {', '.join(below)}.\n" if below else ""
    return "\n".join(lines) + "\n" + message


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _rows(each: Mapping[str, Any], case: str) -> list[Mapping[str, Any]]:
    return [r for r in each["rows"] if (r["case"], r["backend"]) == (case, OURS) and "ms" in r]


def _rounds(each: Mapping[str, Any], case: str) -> str:
    return str(len(_rows(each, case)) or "-")


def _took(each: Mapping[str, Any], case: str) -> str:
    """Return the backends that were chosen, each with its roles; alternatives are not recorded."""
    chosen: dict[str, str] = next((r["chosen"] for r in _rows(each, case) if r.get("chosen")), {})
    roles: dict[str, list[str]] = {}
    for role, name in chosen.items():
        roles.setdefault(name, []).append(role)
    if len(roles) == 1:
        return next(iter(roles))
    return "; ".join(f"{name} ({', '.join(of)})" for name, of in roles.items()) or "-"
