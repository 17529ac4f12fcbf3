"""Turn the records of linear attention into a part of the performance page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.plots import Bar, plot, time
from benchmarks.results import FOLDER

Record = dict[str, Any]
_SHOWN_FAILURES = 120  # characters of an error
_HEAD = """
## {device}: linear attention

{date}, {versions}. Copy {copy:.0f} GB/s. Recorded in `{file}` by `python -m benchmarks.linear`:
replayed CUDA graphs with a cold L2, the median over {rounds} rounds; tokens are bf16. Every result
is compared with the recurrence in float64. A case has key and value heads and the dtype of the
states in its name. In verify the peers keep a state after each draft; in commit "copied-states"
copies the accepted one.
"""


def linear_sections() -> str:
    """Write all records of linear attention on a GPU, a plot and a table for each operation."""
    return "".join(
        _section(path.name, json.loads(path.read_text()))
        for path in sorted(FOLDER.glob("linear.*.json"))
    )


def _section(file: str, report: Record) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items() if v)
    head = _HEAD.format(
        device=report["device"], date=report["date"], versions=versions, file=file,
        copy=report["ceilings"]["copy_gbs"], rounds=report["rounds"],
    )  # fmt: skip
    operations = dict.fromkeys(case["op"] for case in report["cases"])
    return head + "".join(
        _operation(op, [x for x in report["cases"] if x["op"] == op]) for op in operations
    )


def _operation(op: str, cases: Sequence[Record]) -> str:
    drawn = plot(_bar(op, case) for case in cases)
    peers = dict.fromkeys(e["name"] for case in cases for e in case["entries"][1:])
    rows = [["case", "ours", *peers, "ours / best", "floor"]]
    rows += [["---"] * len(rows[0])]
    for case in cases:
        times = {e["name"]: _microseconds(e) for e in case["entries"]}
        fastest = min((t for t in times.values() if t is not None), default=None)
        cells = []
        for name in ("ours", *peers):
            us = times.get(name)
            cells.append(
                f"**{time(us)}**" if us == fastest is not None else time(us) if us else "-"
            )
        ratio = f"{case['ratio']:.3f}" if case.get("ratio") else "-"
        rows.append([_label(op, case), *cells, ratio, time(case["floor_us"])])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"\n### Linear {op}\n\n```{{raw}} html\n{drawn}```\n\nµs\n\n{table}\n{_failures(cases)}"


def _microseconds(entry: Record) -> float | None:
    """Return the time of a right result, of a graph where one was captured."""
    us: float | None = entry.get("graph_us", entry.get("us"))
    return None if entry.get("wrong") else us


def _label(op: str, case: Record) -> str:
    name: str = case["name"]
    return name.replace(f" {op} ", " ")


def _bar(op: str, case: Record) -> Bar:
    text = "no ratio: no peer ran"
    if case.get("ratio"):
        times = {e["name"]: time(_microseconds(e)) for e in case["entries"]}
        text = f"{times['ours']} µs, {case['best_peer']} {times[case['best_peer']]} µs"
    return Bar(label=_label(op, case), ratio=case.get("ratio"), text=text)


def _failures(cases: Sequence[Record]) -> str:
    """List what a contestant raised, and what was wrong."""
    failures: dict[str, list[str]] = {}
    for case in cases:
        for e in case["entries"]:
            if "error" in e or e.get("wrong"):
                said = e.get("error", "a wrong result").replace("`", "'")[:_SHOWN_FAILURES]
                failures.setdefault(f"{e['name']}: `{said}`", []).append(case["name"])
    if not failures:
        return ""
    lines = (f"- {what} ({', '.join(names)})" for what, names in failures.items())
    return "\nNot measured, or wrong:\n\n" + "\n".join(lines) + "\n"
