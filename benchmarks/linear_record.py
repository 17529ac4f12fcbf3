"""The record of linear attention's benchmark: what stays of an earlier one, entries as text."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks.linear_cases import CASES

Record = dict[str, Any]


class Named(Protocol):
    """A case of a benchmark."""

    @property
    def name(self) -> str: ...


_NAMES = [case.name for case in CASES]


def in_order(cases: Sequence[Record]) -> list[Record]:
    """Return cases in the order in which all are run."""
    return sorted(cases, key=lambda x: _NAMES.index(x["name"]) if x["name"] in _NAMES else 0)


def kept(out: pathlib.Path, report: Record, cases: Sequence[Named]) -> list[Record]:
    """Return the cases of an earlier file that are not run now, each with the commit that ran it.

    Raises SystemExit where its device, its versions but for the commit, or its rounds are others.
    """
    if not out.exists():
        return []
    earlier: Record = json.loads(out.read_text())
    before, now = earlier["versions"], report["versions"]
    commit, before = before.get("commit"), {**before, "commit": now.get("commit")}
    pairs = {"versions": (before, now)}
    pairs |= {name: (earlier[name], report[name]) for name in ("device", "rounds")}
    for name, (old, new) in pairs.items():
        if old != new:
            raise SystemExit(f"{out}: {name} {old}, here {new}; run all cases, or name --out")
    again = {case.name for case in cases}
    others = [case for case in earlier["cases"] if case["name"] not in again]
    return [{"commit": commit, **case} for case in others]


def text(error: BaseException) -> str:
    """Keep the kind of an error and the beginning of what it says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def describe(record: Record) -> str:
    """Say an entry in one line."""
    if "error" in record:
        return f"  {record['name']:<20} {record['error']}"
    shown = (
        "us",
        "graph_us",
        "host_us",
        "out_error",
        "state_error",
        "gbs",
        "roofline",
        "prepare_s",
    )
    parts = [f"{name} {record[name]:.4g}" for name in shown if name in record]
    wrong = " WRONG" if record.get("wrong") else ""
    graph = f" graph: {record['graph_error']}" if "graph_error" in record else ""
    return f"  {record['name']:<20} " + "  ".join(parts) + wrong + graph


def best_us(record: Record) -> float | None:
    """Return the time of a right result: of a graph, where there is one."""
    if record.get("wrong") or "error" in record:
        return None
    time_us: float | None = record.get("graph_us", record.get("us"))
    return time_us


def rounded(value: Any) -> Any:
    """Keep four digits of a float."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
