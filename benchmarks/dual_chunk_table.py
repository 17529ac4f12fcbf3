"""Turn the records of dual chunk attention into a part of the performance page; torch-free."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.plots import time
from benchmarks.results import FOLDER

Record = dict[str, Any]
_HEAD = """
## {device}: dual chunk attention

{date}, {versions}. Recorded in `{file}` by `python -m benchmarks.dual_chunk`, in the shape of
Qwen2.5-7B-Instruct-1M (chunks of 253,952 tokens). {baseline} is plain attention over as many keys.
Results are compared with the definition in float32. L is the keys of a request, q its new tokens.

µs; times the baseline's

"""
_SPARSE_HEAD = """
## {device}: sparse prefill

{date}, {versions}. Recorded in `{file}` by `python -m benchmarks.vertical_slash`: a prompt of
{tokens} tokens over lists of keys that are drawn from a seed. "Faster" is dense over our kernel,
and in brackets with choosing lines and listing keys. By a straight line through these times sparse
prefill takes as long as dense at density {even}.

µs

"""


def dual_chunk_sections() -> str:
    """Write all records of dual chunk attention and of its sparse prefill, a table each."""
    dense = (_dense(p.name, json.loads(p.read_text())) for p in _files("dual_chunk"))
    sparse = (_sparse(p.name, json.loads(p.read_text())) for p in _files("vertical_slash"))
    return "".join((*dense, *sparse))


def _files(name: str) -> list[Any]:
    return sorted(FOLDER.glob(f"{name}.*.json"))


def _named(file: str, report: Record) -> Record:
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items() if v)
    return {**report, "file": file, "versions": versions}


def _dense(file: str, report: Record) -> str:
    names = list(dict.fromkeys(e["name"] for case in report["cases"] for e in case["entries"]))
    rows = [["case", *names], ["---"] * (len(names) + 1)]
    for case in report["cases"]:
        entries = {e["name"]: e for e in case["entries"]}
        rows.append([case["name"], *(_cell(entries.get(name)) for name in names)])
    return _HEAD.format(**_named(file, report)) + _table(rows)


def _cell(entry: Record | None) -> str:
    if entry is None or "us" not in entry or entry.get("wrong"):
        return "wrong" if entry and entry.get("wrong") else "-"
    ratio = f"; {entry['ratio']:.3f}" if "ratio" in entry else ""
    return time(entry["us"]) + ratio


def _sparse(file: str, report: Record) -> str:
    names = list(dict.fromkeys(e["name"] for case in report["cases"] for e in case["entries"]))
    rows = [["density", *names, "choosing lines", "listing keys", "faster"]]
    rows += [["---"] * len(rows[0])]
    for case in report["cases"]:
        entries = {e["name"]: e for e in case["entries"]}
        cells = [_cell(entries.get(name)) for name in names]
        faster = "-"
        if "times_as_fast" in case:
            faster = f"{case['times_as_fast']:.2f} ({case['times_as_fast_with_choice']:.2f})"
        apart = [time(case["choose_us"]), time(case["lists_us"])]
        rows.append([f"{case['density']:g}", *cells, *apart, faster])
    even = report.get("break_even_density")
    shown = {**_named(file, report), "even": even, "tokens": f"{report['shape']['tokens']:,}"}
    return _SPARSE_HEAD.format(**shown) + _table(rows)


def _table(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
