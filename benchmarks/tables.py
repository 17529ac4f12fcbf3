"""Turn recorded results into the performance page with its plots: `python -m benchmarks.tables`."""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks import scaling_plot
from benchmarks.dual_chunk_table import dual_chunk_sections
from benchmarks.layer_calls_table import layer_calls_sections
from benchmarks.linear_table import linear_sections
from benchmarks.plots import LEFT, bar, plot, spread, time
from benchmarks.regret_table import regret_sections
from benchmarks.results import Entry, Measured, Report, load_all, names
from benchmarks.shortfalls import shortfalls_section
from benchmarks.sparse_table import sparse_sections
from benchmarks.tune_table import tune_sections

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGE = DOCS / "reference" / "performance.md"
SUMMARY = DOCS / "_static" / "speed.html"  # the plot of the home page
SUMMARISED = ".all"  # the record of every phase
# Phases whose measure is TFLOP/s; of the others GB/s.
COMPUTES = ("prefill", "extend", "stores-extend")
SHOWN_FAILURES = 200  # characters of an error

_HEAD = """# Performance

`python -m benchmarks.tables` writes this page from the files in benchmarks/results/. All figures of
one table were measured side by side in one process by `python -m benchmarks.attention`: CUDA
events, the L2 flushed before each repetition, the median of up to 30. Planning is not timed; an
engine plans once per pass. Every result is compared with a float32 softmax, and a wrong result
never counts as best. "Ours / best" is our time over that of the fastest peer; below 1 ours is
faster. A case has no ratio if a peer that supports its shape was not timed. "Floor" is a lower
bound of the time over the measured time: its memory traffic at copy bandwidth or its work at bf16
matmul throughput, both measured in the same run, whichever takes longer. Reading alone can be
faster than copying, so a floor slightly above 100 % is possible.
"""
_NOTHING = "\nNo GPU result is recorded yet.\n"


def pages() -> dict[pathlib.Path, str]:
    """Return the text that the generated files should have. Needs no torch."""
    reports = load_all()
    tuned = (regret_sections(), tune_sections())
    short = shortfalls_section(reports)
    kinds = (linear_sections(), sparse_sections(), dual_chunk_sections())
    sections = (*kinds, layer_calls_sections(), *tuned)
    written = {PAGE: page(reports, short) + "".join(sections), SUMMARY: summary(reports)}
    if (scaling := scaling_plot.newest()) is not None:
        written[DOCS.parent / scaling_plot.PLOT] = scaling_plot.plot(scaling)
    return written


def page(reports: dict[str, Report], short: str = "") -> str:
    """Write the page of these reports, by file name. short: what they fall short of, if known."""
    if not reports:
        return _HEAD + _NOTHING
    return _HEAD + short + "".join(section(file, report) for file, report in reports.items())


def summary(reports: dict[str, Report]) -> str:
    """Draw one line for each phase of the first report of all phases, "" where there is none."""
    for file, report in reports.items():
        if not title(file).endswith(SUMMARISED):
            continue
        bars = [
            spread(phase, ratios, f"reference/performance.html#{anchor(file, phase)}")
            for phase in dict.fromkeys(m.phase for m in report.cases)
            if (ratios := [m.ratio for m in report.cases if m.phase == phase and m.ratio])
        ]
        when = f"{report.device}, {report.date[:10]}"
        head = f"{when}: our time / the best peer's, geometric mean of each phase. {LEFT}"
        return plot(bars, head)
    return ""


def section(file: str, report: Report) -> str:
    """Write one report: what ran, a plot and a table for each phase, what did not run."""
    versions = ", ".join(f"{k} {v}" for k, v in report.versions.items() if v)
    command = f" by `{report.command.strip()}`" * bool(report.command)
    earlier = Counter(m.commit for m in report.cases if m.commit)
    lines = [
        f"\n## {report.device}: {title(file).rpartition('.')[2]}\n",
        f"{report.date[:10]}, {versions}. Copy {report.ceilings['copy_gbs']:.0f} GB/s, matmul "
        f"{report.ceilings['matmul_tflops']:.0f} TFLOP/s. Recorded in `{file}`{command}.\n",
        *(f"{note}.\n" for note in report.notes),
        *(f"{n} cases were timed at commit {commit}.\n" for commit, n in earlier.items()),
    ]
    if report.suite == "grid":
        lines += [_spread(report)]
    for phase in dict.fromkeys(m.phase for m in report.cases):
        cases = [m for m in report.cases if m.phase == phase]
        links = [anchor(file, phase, i) for i in range(1, len(cases) + 1)]
        drawn = plot(bar(m, f"#{link}") for m, link in zip(cases, links, strict=True))
        lines += [
            f"({anchor(file, phase)})=\n### {phase}\n",
            f"```{{raw}} html\n{drawn}```\n",
            _table(phase, cases, links),
        ]
    return "\n".join(line for line in lines if line) + _failures(report.cases)


def title(file: str) -> str:
    """Return the device and the phases of a file of results: "nvidia-h200.all"."""
    return file.removeprefix("attention.").removesuffix(".json")


def anchor(file: str, phase: str, number: int | None = None) -> str:
    """Return the name by which a page leads to a phase of a record, or to one of its cases."""
    place = f"{title(file)}-{phase}".replace(".", "-")
    return place if number is None else f"{place}-{number}"


def _spread(report: Report) -> str:
    ratios = [ratio for ratio, _ in report.ranked]
    if not ratios:
        return f"{len(report.cases)} shapes, none of them with a ratio.\n"
    worst, case = report.ranked[0]
    faster = sum(r <= 1 for r in ratios)
    return (
        f"{len(ratios)} of {len(report.cases)} shapes have a ratio: ours is as fast or faster on "
        f"{faster}, the median of ours / best is {statistics.median(ratios):.2f}, the worst "
        f"{worst:.2f} ({case.name}).\n"
    )


def _table(phase: str, cases: Sequence[Measured], links: Sequence[str]) -> str:
    computes = phase in COMPUTES
    peers = names(cases)
    unit = "TFLOP/s" if computes else "GB/s of K and V"
    rows = [["case", cases[0].ours.name, *peers, "best peer", "ours / best", "floor"]]
    rows += [["---"] * len(rows[0])]
    for m, link in zip(cases, links, strict=True):
        by_name = {e.name: e for e in m.peers}
        right = [e.us for e in (m.ours, *m.peers) if e.us is not None and e.counts]
        fastest = None if m.untimed else min(right, default=None)
        cells = [_cell(e, fastest, computes) for e in (m.ours, *(by_name.get(p) for p in peers))]
        best = m.best_peer.name if m.best_peer and not m.untimed else "-"
        ratio = "-" if m.ratio is None else f"{m.ratio:.3f}"
        floor = "-" if m.ours.roofline is None else f"{m.ours.roofline:.0%}"
        name = f'<a id="{link}"></a>{m.name.removeprefix(phase + " ")}'
        rows.append([name, *cells, best, ratio, floor])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"µs; {unit}\n\n{table}\n"


def _cell(entry: Entry | None, fastest: float | None, computes: bool) -> str:
    if entry is None or entry.us is None:
        return "not timed" if entry is not None and entry.skipped else "-"
    if entry.wrong:
        return "wrong"
    rate = entry.tflops if computes else entry.gbs
    text = f"{time(entry.us)}; {rate or 0:.0f}"
    return f"**{text}**" if entry.us == fastest else text


def _failures(cases: Iterable[Measured]) -> str:
    """List what failed or was wrong, not what a peer does not take."""
    names_by_failure: dict[str, list[str]] = {}
    for m in cases:
        for e in (m.ours, *m.peers):
            if e.wrong:
                names_by_failure.setdefault(f"{e.name}: a wrong result", []).append(m.name)
            elif e.error and (e is m.ours or not e.refuses):
                message = " ".join(e.error.replace("`", "'").split())[:SHOWN_FAILURES]
                names_by_failure.setdefault(f"{e.name}: `{message}`", []).append(m.name)
    if not names_by_failure:
        return ""
    lines = (f"- {what} ({', '.join(names)})" for what, names in names_by_failure.items())
    return "\nNot measured, or wrong:\n\n" + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; 1: something is stale")
    check = parser.parse_args().check
    stale = {path: text for path, text in pages().items() if _read(path) != text}
    for path, text in stale.items():
        print(f"{'stale' if check else 'written'}: {path}")
        if not check:
            path.write_text(text)
    return 1 if stale and check else 0


def _read(path: pathlib.Path) -> str | None:
    return path.read_text() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
