"""Turn recorded results into the performance page and its plots: `python -m benchmarks.tables`."""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import statistics
import sys
from collections.abc import Iterable, Sequence

from benchmarks.plots import plot
from benchmarks.results import FOLDER, Entry, Measured, Report, load_all, names

REFERENCE = pathlib.Path(__file__).parent.parent / "docs" / "reference"
PAGE = REFERENCE / "performance.md"
IMAGES = REFERENCE / "performance"
COMPUTES = ("prefill", "extend")  # phases whose measure is TFLOP/s; of the others GB/s
SHOWN_FAILURES = 200  # characters of an error

_HEAD = """# Performance

Written from the files in benchmarks/results/ by `python -m benchmarks.tables`. Everything in one
table was measured side by side in one process by `python -m benchmarks.attention`: CUDA events, the
L2 flushed before each repetition, the median of up to 30; plans are made before, as an engine makes
them once a pass. Every result is compared with a float32 softmax, and a wrong one never counts as
best. "Ours / best" is our time over that of the fastest peer: below 1 ours is faster. "Floor" is
the share of the measured time that its traffic at the speed of a copy, or its work at the speed of
a bf16 matmul, would take at least; both speeds were measured in the same run. Reading alone can be
faster than copying, so a floor of a little over 100 % is possible.
"""
_NOTHING = "\nNo GPU result is recorded yet.\n"


def pages() -> dict[pathlib.Path, str]:
    """Return the text that the generated page should have. Needs neither torch nor matplotlib."""
    return {PAGE: page(load_all())}


def page(reports: dict[str, Report]) -> str:
    """Write the page of these reports, by file name."""
    if not reports:
        return _HEAD + _NOTHING
    return _HEAD + "".join(section(file, report) for file, report in reports.items())


def section(file: str, report: Report) -> str:
    """Write one report: what ran, the plot, a table for each phase, what did not run."""
    versions = ", ".join(f"{k} {v}" for k, v in report.versions.items() if v)
    lines = [
        f"\n## {report.device}: {report.suite}\n",
        f"{report.date[:10]}, {versions}. Copy {report.ceilings['copy_gbs']:.0f} GB/s, matmul "
        f"{report.ceilings['matmul_tflops']:.0f} TFLOP/s. Recorded in `{file}`.\n",
        *(f"{note}.\n" for note in report.notes),
        f"![{report.suite} on {report.device}]({IMAGES.name}/{image_name(file)})\n",
    ]
    if report.suite == "grid":
        lines += [_spread(report)]
    for phase in dict.fromkeys(m.phase for m in report.cases):
        cases = [m for m in report.cases if m.phase == phase]
        lines += [f"### {phase}\n" if report.suite != phase else "", _table(phase, cases)]
    return "\n".join(line for line in lines if line) + _failures(report.cases)


def _spread(report: Report) -> str:
    ratios = [ratio for ratio, _ in report.ranked]
    if not ratios:
        return f"{len(report.cases)} shapes, none of them with a peer.\n"
    worst, case = report.ranked[0]
    faster = sum(r <= 1 for r in ratios)
    return (
        f"{len(ratios)} of {len(report.cases)} shapes have a peer: ours is as fast or faster on "
        f"{faster}, the median of ours / best is {statistics.median(ratios):.2f}, the worst "
        f"{worst:.2f} ({case.name}).\n"
    )


def _table(phase: str, cases: Sequence[Measured]) -> str:
    computes = phase in COMPUTES
    peers = names(cases)
    unit = "TFLOP/s" if computes else "GB/s of K and V"
    rows = [["case", cases[0].ours.name, *peers, "best peer", "ours / best", "floor"]]
    rows += [["---"] * len(rows[0])]
    for m in cases:
        by_name = {e.name: e for e in m.peers}
        right = [e.us for e in (m.ours, *m.peers) if e.us is not None and e.counts]
        fastest = min(right, default=None)
        cells = [_cell(e, fastest, computes) for e in (m.ours, *(by_name.get(p) for p in peers))]
        best = m.best_peer.name if m.best_peer else "-"
        ratio = "-" if m.ratio is None else f"{m.ratio:.3f}"
        floor = "-" if m.ours.roofline is None else f"{m.ours.roofline:.0%}"
        rows.append([m.name.removeprefix(phase + " "), *cells, best, ratio, floor])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"µs; {unit}\n\n{table}\n"


def _cell(entry: Entry | None, fastest: float | None, computes: bool) -> str:
    if entry is None or entry.us is None:
        return "-"
    if entry.wrong:
        return "wrong"
    rate = entry.tflops if computes else entry.gbs
    digits = 0 if entry.us >= 100 else 1
    text = f"{entry.us:.{digits}f}; {rate or 0:.0f}"
    return f"**{text}**" if entry.us == fastest else text


def _failures(cases: Iterable[Measured]) -> str:
    """List what failed or was wrong, not what a peer does not take."""
    found: dict[str, list[str]] = {}
    for m in cases:
        for e in (m.ours, *m.peers):
            if e.wrong:
                found.setdefault(f"{e.name}: a wrong result", []).append(m.name)
            elif e.error and (e is m.ours or not e.error.startswith("refuses")):
                said = " ".join(e.error.replace("`", "'").split())[:SHOWN_FAILURES]
                found.setdefault(f"{e.name}: `{said}`", []).append(m.name)
    if not found:
        return ""
    lines = (f"- {what} ({', '.join(where)})" for what, where in found.items())
    return "\nNot measured, or wrong:\n\n" + "\n".join(lines) + "\n"


def image_name(file: str) -> str:
    return file.removesuffix(".json") + ".svg"


def digest(path: pathlib.Path) -> str:
    """Return what an image says it was drawn from."""
    return "sha256 " + hashlib.sha256(path.read_bytes()).hexdigest()


def stale_images(results: pathlib.Path = FOLDER, images: pathlib.Path = IMAGES) -> list[str]:
    """Name the results whose image is missing or was drawn from other numbers."""
    stale = []
    for file in load_all(results):
        image = images / image_name(file)
        if not image.exists() or digest(results / file) not in image.read_text():
            stale.append(file)
    return stale


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; 1: something is stale")
    check = parser.parse_args().check
    reports = load_all()
    stale = [str(path) for path, text in pages().items() if _read(path) != text]
    images = stale_images()
    for name in (*stale, *images):
        print(f"{'stale' if check else 'written'}: {name}")
    if check:
        return 1 if stale or images else 0
    for path, text in pages().items():
        path.write_text(text)
    for file in images:
        IMAGES.mkdir(parents=True, exist_ok=True)
        plot(reports[file], IMAGES / image_name(file), digest(FOLDER / file))
    return 0


def _read(path: pathlib.Path) -> str | None:
    return path.read_text() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
