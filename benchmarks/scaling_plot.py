"""Draw how intel_amx's time falls with the number of threads, as SVG."""

from __future__ import annotations

import html
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks.results import FOLDER

PLOT = "docs/_static/cpu-scaling.svg"
COLOURS = ("#2a78c8", "#2a9d4a", "#d1603d", "#8a5cc2", "#b8860b", "#4a9aa5")
LEFT, TOP, WIDTH, HEIGHT = 60, 20, 380, 300


def newest(folder: pathlib.Path = FOLDER) -> dict[str, Any] | None:
    """Return the record of the most threads, None where there is none."""
    result = [json.loads(p.read_text()) for p in folder.glob("intel_amx_cpu.*.scaling.json")]
    return max(result, key=lambda r: max(x["threads"] for x in r["results"]), default=None)


def speedups(report: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return case → threads → time with the fewest threads over the time with these."""
    times: dict[str, dict[int, float]] = {}
    for result in report["results"]:
        shape = result["shape"]
        name = f"{shape['name']}, {shape['batch']} x {shape['length']}"
        if "page" in shape:
            name += f", {shape['heads']} heads"
        [ms] = [v for k, v in result["median_ms"].items() if k.startswith("intel_amx")]
        times.setdefault(name, {})[result["threads"]] = ms
    return {name: {n: of[min(of)] / ms for n, ms in of.items()} for name, of in times.items()}


def plot(report: Mapping[str, Any]) -> str:
    """Draw a line for each case and, dashed, as many times as fast as there are threads."""
    result = speedups(report)
    threads = sorted({n for of in result.values() for n in of})
    fewest, most = threads[0], threads[-1]
    drawn = [most / fewest, *(x for of in result.values() for x in of.values())]
    lowest, highest = min(drawn), max(drawn)

    def at(n: float, times: float) -> tuple[float, float]:
        x = LEFT + WIDTH * math.log(n / fewest) / (math.log(most / fewest) or 1)
        return x, TOP + HEIGHT * math.log(highest / times) / (math.log(highest / lowest) or 1)

    def line(points: Mapping[int, float], colour: str, more: str = "") -> str:
        path = " ".join("{:.1f},{:.1f}".format(*at(n, x)) for n, x in sorted(points.items()))
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" {more}/>'

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 370" width="760" height="370" '
        'font-family="sans-serif" font-size="13" fill="#777">',
        line({n: n / fewest for n in threads}, "#777", 'stroke-dasharray="4"'),
    ]
    for n in threads:
        x, y = at(n, n / fewest)
        parts += [
            f'<text x="{x:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{n}</text>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{n / fewest:g}</text>',
        ]
    for number, (name, of) in enumerate(result.items()):
        colour, y = COLOURS[number % len(COLOURS)], TOP + 20 * number + 10
        parts += [
            line(of, colour),
            f'<rect x="470" y="{y - 9}" width="14" height="10" fill="{colour}"/>',
            f'<text x="490" y="{y}">{html.escape(name)}</text>',
        ]
    parts += [
        f'<text x="{LEFT}" y="{TOP + HEIGHT + 42}">threads; left: times as fast as with '
        f"{fewest}; dashed: as many times as there are threads</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
