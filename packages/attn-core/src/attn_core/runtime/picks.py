"""Say in a short table which backend takes which passes."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Sequence

from attn_core.costs.shapes import forms
from attn_core.costs.table import Bucket, Candidates, Cell, Table
from attn_core.runtime.adaptive import tables
from attn_core.selection.result import Selection, label
from attn_core.spec.kinds import Role


def picks(selection: Selection) -> str:
    """Return which backend takes which passes, by which profile; "" where nothing is picked.

    A column is a longest request, a row a number of requests, both up to the next power of two.
    """
    found = tables(selection)
    if not found or selection.costs is None:
        return ""
    profile = selection.costs.model.profile
    now = datetime.datetime.now(datetime.UTC)
    where = f" on {profile.device}" if profile.device else ""
    lines = [
        f"passes are picked by what was measured{where}: profile {profile.digest}, "
        f"{profile.age(now)}; ATTN_ADAPTIVE=0 keeps one backend"
    ]
    for role, made in found.items():
        lines += _grid(selection, role, made)
    return "\n".join(lines)


def _grid(selection: Selection, role: Role, made: Table) -> Iterator[str]:
    names = [c.backend for c in (selection.roles[role], *selection.alternatives[role])]
    groups = [form.layer for form in forms(selection.requirements, selection.page_size)]
    names += [_mixed(names, groups, pick) for pick in made.mixed]
    legend = ", ".join(f"{i} {name}" for i, name in enumerate(names, 1))
    prompts = ", whole prompts" if role == "prefill" else ""
    yield f"  {label(role)}{prompts}: {legend}; not measured, so 1: ·"
    lengths = sorted({longest for _, longest, _ in made.cells})
    graphs = "  graphs" * bool(made.graphs)
    yield f"  {'requests':>10} |" + "".join(f"{_short(b):>6}" for b in lengths) + graphs
    for requests in sorted({x[0] for x in made.cells} | set(made.graphs)):
        shown = "".join(f"{_at(role, made, requests, b):>6}" for b in lengths)
        graph = f"{made.graphs[requests] + 1:>8}" if requests in made.graphs else ""
        yield f"  {_short(requests):>10} |{shown}{graph}"
    behind = [cell for (_, longest, q), cell in made.cells.items() if q < longest]
    if role == "prefill" and behind:
        counts = Counter(names[_winner(cell)] for cell in behind)
        said = ", ".join(f"{n} {name}" for name, n in counts.most_common())
        yield f"  chunks and prompts behind a prefix, of {len(behind)} sizes: {said}"


def _mixed(names: Sequence[str], groups: Sequence[str], pick: Candidates) -> str:
    return " and ".join(
        f"{names[i]} ({'; '.join(g for g, of in zip(groups, pick, strict=True) if of == i)})"
        for i in dict.fromkeys(pick)
    )


def _at(role: Role, made: Table, requests: int, longest: int) -> str:
    queries = {q for _, _, q in made.cells}
    sizes: list[Bucket] = [(requests, longest, q) for q in queries]
    if role == "prefill":
        sizes = [(requests, longest, longest)]
    cell = next((made.cells[size] for size in sizes if size in made.cells), None)
    return "·" if cell is None else str(_winner(cell) + 1)


def _winner(cell: Cell) -> int:
    return 0 if cell.near[0] else cell.best


def _short(bits: int) -> str:
    """Write the least number of so many bits: "64", "4k"."""
    least = (1 << bits) >> 1
    return f"{least >> 10}k" if least >= 1024 else str(least)
