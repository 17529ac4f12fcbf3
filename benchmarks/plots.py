"""Draw a report as SVG: how near everyone comes to the floor, or the spread over the grid."""

from __future__ import annotations

import importlib
import pathlib
import re
from typing import Any

from benchmarks.results import Entry, Measured, Report, names

PANEL = (9.0, 2.6)  # inches


def plot(report: Report, path: pathlib.Path, source: str) -> None:
    """Write one SVG. source: said in it, so that a check sees what it was drawn from.

    Needs matplotlib, which nothing else here does.
    """
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    # the same bytes for the same numbers, and text that stays text
    with matplotlib.rc_context({"svg.hashsalt": report.suite, "svg.fonttype": "none"}):
        figure = _grid(report, pyplot) if report.suite == "grid" else _bars(report, pyplot)
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": source})
        pyplot.close(figure)


def _bars(report: Report, pyplot: Any) -> Any:
    """One panel a phase, one group of bars a case, one bar a contestant: its share of the floor."""
    phases = list(dict.fromkeys(m.phase for m in report.cases))
    shades = pyplot.get_cmap("tab20").colors
    colours = {name: shades[i % 20] for i, name in enumerate(names(report.cases))}
    widest = max(sum(m.phase == phase for m in report.cases) for phase in phases)
    width, height = PANEL
    figure, axes = pyplot.subplots(
        len(phases), 1, figsize=(width, height * len(phases)), squeeze=False, layout="constrained"
    )
    for axis, phase in zip(axes[:, 0], phases, strict=True):
        cases = [m for m in report.cases if m.phase == phase]
        peers = names(cases)
        bar = 0.8 / (1 + len(peers))
        for i, name in enumerate(("", *peers)):
            at = [x - 0.4 + bar * (i + 0.5) for x in range(len(cases))]
            shares = [100 * _share(_entry(m, name)) for m in cases]
            label, colour = name or cases[0].ours.name, "black" if not name else colours[name]
            axis.bar(at, shares, bar, label=label, color=colour)
        labels = [_in_lines(m.name.removeprefix(phase + " ")) for m in cases]
        axis.set_xticks(range(len(cases)), labels, fontsize=6)
        axis.set_xlim(-0.6, widest - 0.4)
        axis.set_ylabel("floor / time, %")
        axis.set_title(phase, loc="left")
        axis.legend(fontsize=6, ncols=2, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _grid(report: Report, pyplot: Any) -> Any:
    """One point a shape: ours / best over the time of the best peer."""
    figure, axis = pyplot.subplots(figsize=(PANEL[0], 1.6 * PANEL[1]), layout="constrained")
    for phase in dict.fromkeys(m.phase for m in report.cases):
        points = [
            (m.best_peer.us, ratio)
            for ratio, m in report.ranked
            if m.phase == phase and m.best_peer is not None
        ]
        axis.scatter([x for x, _ in points], [y for _, y in points], s=18, label=phase)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_xlabel("best peer, µs")
    axis.set_ylabel("ours / best peer (below 1: faster)")
    axis.legend()
    return figure


def _entry(m: Measured, name: str) -> Entry | None:
    return next((e for e in m.peers if e.name == name), None) if name else m.ours


def _in_lines(name: str) -> str:
    """Break "B16 L4096 q8 tree H32/8 D128 p64" before the queries, the heads and the page size."""
    return re.sub(r" (?=[qHp]\d)", "\n", name)


def _share(entry: Entry | None) -> float:
    return entry.roofline or 0.0 if entry is not None and entry.counts else 0.0
