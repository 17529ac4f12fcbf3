"""Draw our time beside the best peer's, case by case, as HTML that a page takes in as it is."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.results import Measured

LOW, HIGH = 0.25, 2.0  # ratios at the two ends of the axis, which is logarithmic
TICKS = (0.25, 0.5, 1.0, 2.0)
LEFT = "Left of 1 ours is faster."
HEAD = f"Our time / the best peer's. {LEFT}"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One line of a plot: what was measured, ours / best, and both times or why there are none.

    href: the line of the table that the label leads to.
    """

    label: str
    ratio: float | None
    text: str
    href: str = ""


def bar(m: Measured, href: str) -> Bar:
    """Return the line of a case."""
    label = m.name.removeprefix(m.phase + " ")
    best = m.best_peer
    if m.ratio is not None and best is not None:
        text = f"{time(m.ours.us)} µs, {best.name} {time(best.us)} µs"
    elif m.untimed:
        text = f"no ratio: {', '.join(m.untimed)} not timed"
    else:
        text = "no ratio: no peer, or no result of ours"
    return Bar(label=label, ratio=m.ratio, text=text, href=href)


def plot(bars: Iterable[Bar], head: str = HEAD) -> str:
    """Write bars from 1 to each ratio, one below the other, under an axis and what it shows."""
    ticks = "".join(f'<i style="left:{place(t):.1f}%">{t:g}</i>' for t in TICKS)
    lines = [
        '<div class="attn-plot">',
        f'<p class="head">{html.escape(head)}</p>',
        f'<p class="axis"><span></span><span class="ticks">{ticks}</span><span></span></p>',
        *(_line(each) for each in bars),
        "</div>",
    ]
    return "\n".join(lines) + "\n"


def _line(each: Bar) -> str:
    label = html.escape(each.label)
    if each.href:
        label = f'<a href="{html.escape(each.href)}">{label}</a>'
    marks, figure = "", ""
    if each.ratio is not None:
        at, one = place(each.ratio), place(1.0)
        side = "faster" if each.ratio <= 1 else "slower"
        left, width = min(at, one), abs(at - one)
        marks = f'<i class="{side}" style="left:{left:.1f}%;width:{width:.1f}%"></i>'
        figure = f"<b>{each.ratio:.2f}</b> "
    return (
        f'<p><span>{label}</span><span class="bar">{marks}</span>'
        f"<span>{figure}{html.escape(each.text)}</span></p>"
    )


def place(ratio: float) -> float:
    """Return where a ratio lies between the ends of the axis, in percent of its width."""
    share = math.log(ratio / LOW) / math.log(HIGH / LOW)
    return 100 * min(1.0, max(0.0, share))


def time(us: float | None) -> str:
    """Return microseconds with three digits or more."""
    if us is None:
        return "-"
    return f"{us:.{0 if us >= 100 else 1}f}"


def spread(label: str, ratios: Sequence[float], href: str) -> Bar:
    """Return the line of several cases: their geometric mean, and the best and the worst."""
    mean = math.exp(sum(math.log(r) for r in ratios) / len(ratios))
    shapes = f"{len(ratios)} shape{'s' * (len(ratios) > 1)}"
    text = shapes if len(ratios) == 1 else f"{min(ratios):.2f} to {max(ratios):.2f}, {shapes}"
    return Bar(label=label, ratio=mean, text=text, href=href)
