"""Turn records of engine runs into tables of docs/how-to and the plot of README.md.

Both are "" where nothing is recorded. Needs no torch.
"""

from __future__ import annotations

import html
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.engines import choice_table, record
from benchmarks.engines.configurations import CONFIGURATIONS, OURS, Case
from benchmarks.results import FOLDER

NAMES = {"sglang": "SGLang", "vllm": "vLLM"}  # of engines
PLOT = "docs/_static/engines.svg"
SHOWN = 160  # characters of an error

_TABLE_HEAD = """## Step times

Milliseconds of one step of the engine (draft, verification, sampling and scheduling included) or of
a prefill, on {device}, {engine}, random weights. `python -m benchmarks.engines.run` measures
them: medians over the processes of a backend, the smallest and largest time in brackets. "Speed-up"
is the time of the best built-in backend over ours; "must" and "aim" are what we hold it against.
What has "-" in place of a time was not run yet; the speed-up then names the backend that it is of.
"""
_PLOT_HEAD = """Time of the best built-in backend over the time of attn_core, whole steps on one
{device} ([the figures](docs/how-to/sglang.md#step-times)):

![Speed-up of SGLang's steps by attn_core, case by case](docs/_static/engines.svg)
"""


def load_all(folder: pathlib.Path = FOLDER, engine: str = "sglang") -> list[dict[str, Any]]:
    """Read every record of an engine that has rows, in the order of the configurations."""
    records = [record.load(path) for path in sorted(folder.glob(f"{engine}.*.json"))]
    order = list(CONFIGURATIONS)
    known = [r for r in records if r.get("rows") and r["configuration"] in order]
    return sorted(known, key=lambda r: (r.get("device", ""), order.index(r["configuration"])))


def page(records: Iterable[Mapping[str, Any]]) -> str:
    """Write the head and a section for each record of an engine, "" for none."""
    reports = list(records)
    if not reports:
        return ""
    engine = CONFIGURATIONS[reports[0]["configuration"]].engine
    shown = f"{NAMES[engine]} {_versions(reports, engine)}"
    devices = _devices(reports)
    reports.sort(key=lambda each: devices.index(each["device"]) if each.get("device") else 0)
    head = _TABLE_HEAD.format(device=" and ".join(devices), engine=shown)
    tables = "".join("\n" + section(each, named=len(devices) > 1) for each in reports)
    return head + tables + choice_table.sections(reports)


def section(each: Mapping[str, Any], *, named: bool = False) -> str:
    """Write the table of one record and, below it, what was refused; "" where it has no rows.

    named: the title names the device, where a page has several.
    """
    if not each.get("rows"):
        return ""
    configuration = CONFIGURATIONS[each["configuration"]]
    title = configuration.title + (f", on {each['device']}" if named else "")
    names = list(dict.fromkeys([OURS, *configuration.peers, *(r["backend"] for r in each["rows"])]))
    rows = [["case", *names, "speed-up", "must", "aim"]]
    rows += [["---"] * len(rows[0])]
    for case in configuration.cases:
        ratio = record.speedup(record.medians(each, case.name))
        cells = [_cell(each, case, name) for name in names]
        shown = "-" if ratio is None else f"**{ratio:.2f}**"
        if ratio is not None and not _all_ran(each, case):
            shown = f"{ratio:.2f} of {record.best_peer(record.medians(each, case.name))}"
        rows.append([case.name, *cells, shown, f"{case.must:.2f}", f"{case.aim:.2f}"])
    lines = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    command = f"`python -m benchmarks.engines.run {each['configuration']}`"
    return f"### {title}\n\n{command}\n\n{lines}\n{_errors(each['rows'])}"


def over_gpus(records: Iterable[Mapping[str, Any]]) -> str:
    """Write one table of every case on several GPUs: its times, or that it was not run."""
    reports = list(records)
    head = ["engine, model and split", "case", "configuration", "on"]
    rows = [[*head, OURS, "best built-in", "speed-up", "must"]]
    rows += [["---"] * len(rows[0])]
    for name, configuration in CONFIGURATIONS.items():
        if configuration.gpus == 1:
            continue
        title = f"{NAMES[configuration.engine]}, {configuration.title}"
        known = [each for each in reports if each["configuration"] == name]
        for case in configuration.cases:
            ran = [each for each in known if any(r["case"] == case.name for r in each["rows"])]
            rows += [
                [title, case.name, f"`{name}`", *_over_gpus(each, case)] for each in ran or [{}]
            ]
    return "\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n\n"


def _over_gpus(each: Mapping[str, Any], case: Case) -> list[str]:
    """Return the device, our time, the best built-in one, the speed-up and what it must be."""
    must = f"{case.must:.2f}"
    if not each:
        return ["-", "not run", "not run", "-", must]
    times = record.medians(each, case.name)
    best, ratio = record.best_peer(times), record.speedup(times)
    built_in = f"{best} {_cell(each, case, best)}" if best else "not run"
    ours = _cell(each, case, OURS).replace("-", "not run")
    return [each["device"], ours, built_in, "-" if ratio is None else f"{ratio:.2f}", must]


def logprobs(folder: pathlib.Path = FOLDER) -> str:
    """Write how far logprobs on two GPUs are from those on one, by benchmarks.engines.parallel."""
    head = ["engine", "split", "on", "date", OURS, "the engine's own", "compared"]
    rows = [head, ["---"] * len(head)]
    for path in sorted(folder.glob("*-parallel.*.json")):
        known, engine = record.load(path), NAMES[path.name.partition("-")[0]]
        for row in known["rows"]:
            if "ours" not in row:  # an engine of it failed: row["wrong"] says why
                continue
            flags = " ".join(
                f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
                for name, value in row["arguments"].items()
            )
            ours, peer = (f"{row[x]['mean']:.4f} ({row[x]['worst']:.2f})" for x in ("ours", "peer"))
            own = f"{row['peer_backend']} {peer}"
            numbers = str(row["ours"]["compared"])
            rows.append([engine, f"`{flags}`", known["device"], row["date"], ours, own, numbers])
    return "\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n\n"


def readme(records: Iterable[Mapping[str, Any]]) -> str:
    """Write what README.md says, "" where no case has a speed-up."""
    plotted = _plotted(records)
    if not speedups(plotted):
        return ""
    return _PLOT_HEAD.format(device=" and ".join(_devices(plotted)))


def speedups(records: Iterable[Mapping[str, Any]]) -> list[tuple[str, Case, float]]:
    """Return (configuration, case, best built-in / ours) of every case that all peers ran."""
    ratios = []
    for each in records:
        for case in CONFIGURATIONS[each["configuration"]].cases:
            ratio = record.speedup(record.medians(each, case.name))
            if ratio is not None and _all_ran(each, case):
                ratios.append((each["configuration"], case, ratio))
    return ratios


def plot(records: Iterable[Mapping[str, Any]]) -> str:
    """Draw a bar for each case from 1 to its speed-up, with a tick at "must"; SVG, "" for none."""
    ratios = speedups(_plotted(records))
    if not ratios:
        return ""
    low = min(0.9, *(ratio for *_, ratio in ratios))
    high = max(1.1, *(max(ratio, case.must) for _, case, ratio in ratios))
    left, width, line = 210, 420, 22

    def place(ratio: float) -> float:
        return left + width * (ratio - low) / (high - low)

    height = line * len(ratios) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{height}" '
        f'viewBox="0 0 720 {height}" font-family="sans-serif" font-size="13" fill="#777">',
        f'<line x1="{place(1):.1f}" x2="{place(1):.1f}" y1="4" y2="{height - 22}" stroke="#777"/>',
    ]
    for number, (name, case, ratio) in enumerate(ratios):
        y = line * number + 8
        start, end = sorted((place(1), place(ratio)))
        colour = "#2a9d4a" if ratio >= 1 else "#d1603d"
        must = place(case.must)
        parts += [
            f'<text x="{left - 10}" y="{y + 11}" text-anchor="end">'
            f"{html.escape(f'{name} {case.name}')}</text>",
            f'<rect x="{start:.1f}" y="{y}" width="{end - start:.1f}" height="13" '
            f'fill="{colour}"/>',
            f'<line x1="{must:.1f}" x2="{must:.1f}" y1="{y - 2}" y2="{y + 15}" stroke="#777" '
            'stroke-dasharray="2"/>',
            f'<text x="{left + width + 14}" y="{y + 11}">{ratio:.2f}</text>',
        ]
    parts += [
        f'<text x="{left}" y="{height - 6}">right of the line attn_core is faster; dashed: what it '
        "must reach</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _all_ran(each: Mapping[str, Any], case: Case) -> bool:
    """Say whether every built-in backend has a time or a failure; the engine's triton is none."""
    ran = {row["backend"] for row in each["rows"] if row["case"] == case.name}
    return set(CONFIGURATIONS[each["configuration"]].peers) - {"triton"} <= ran


def _cell(each: Mapping[str, Any], case: Case, backend: str) -> str:
    rows = [r for r in each["rows"] if (r["case"], r["backend"]) == (case.name, backend)]
    timed = [r for r in rows if "ms" in r]
    if not timed:
        return "failed" if rows else "-"
    ms = record.medians({"rows": timed}, case.name)[backend]
    low = min(r["spread_ms"][0] for r in timed)
    high = max(r["spread_ms"][1] for r in timed)
    return f"{_number(ms)} ({_number(low)} … {_number(high)})"


def _number(ms: float) -> str:
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def _errors(rows: Iterable[Mapping[str, Any]]) -> str:
    cases: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "error" in row:
            said = " ".join(row["error"].replace("`", "'").split())[:SHOWN]
            names = cases.setdefault((row["backend"], said), [])
            if row["case"] not in names:
                names.append(row["case"])
    lines = [f"- {b}: `{said}` ({', '.join(names)})" for (b, said), names in cases.items()]
    return "\nNot measured:\n\n" + "\n".join(lines) + "\n" if lines else ""


def _devices(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Name the devices, the one of most records first."""
    counted = Counter(str(r["device"]) for r in records if r.get("device"))
    return [name for name, _ in counted.most_common()]


def _plotted(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records of the device that has most of them: a plot is of one."""
    reports = list(records)
    device = next(iter(_devices(reports)), None)
    return [each for each in reports if each.get("device") == device]


def _versions(records: Iterable[Mapping[str, Any]], engine: str) -> str:
    rows = [row for each in records for row in each["rows"]]
    return ", ".join(sorted({str(row["versions"][engine]) for row in rows}))
