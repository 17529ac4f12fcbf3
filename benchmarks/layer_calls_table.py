"""Turn the records of what a layer's call costs the host into a part of the page; torch-free."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.plots import time
from benchmarks.results import FOLDER

Record = dict[str, Any]
_HEAD = """
## {device}: calls of layers on the host

{date}, {versions}. Recorded in `{file}` by `{command}`: the host's time of a layer's eager call
through the dispatcher, its writes included, where the host is slower than the GPU; medians, and
from the 20th to the 80th percentile. {rounds}A name without a backend is triton's. A plan is made
once a pass. Wanted is {limit:g} µs for a call of triton.

| call | µs | of the calls | launches of ours |
| --- | ---: | --- | ---: |
"""


def layer_calls_sections() -> str:
    """Write all records of layers' calls, a table each."""
    files = sorted(FOLDER.glob("layer_calls.*.json"))
    return "".join(_section(path.name, json.loads(path.read_text())) for path in files)


def _section(file: str, report: Record) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items() if v)
    turns = max((len(x.get("rounds", ())) for x in report["calls"]), default=0)
    head = _HEAD.format(
        device=report["device"], date=report["date"][:10], versions=versions, file=file,
        command=report["command"].partition(" --out")[0].strip(), limit=report["limit_us"],
        rounds=f"The fastest of {turns} rounds over all calls. " if turns > 1 else "",
    )  # fmt: skip
    return head + "".join(map(_row, report["calls"]))


def _row(call: Record) -> str:
    spread = f"{time(call['p20'])} to {time(call['p80'])}"
    return f"| {call['name']} | {time(call['us'])} | {spread} | {call['launches']} |\n"
