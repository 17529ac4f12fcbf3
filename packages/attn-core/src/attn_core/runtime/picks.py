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
    by_role = tables(selection)
    if not by_role or selection.costs is None:
        return ""
    profile = selection.costs.model.profile
    now = datetime.datetime.now(datetime.UTC)
    where = f" on {profile.device}" if profile.device else ""
    lines = [
        f"passes are picked by what was measured{where}: profile {profile.digest}, "
        f"{profile.age(now)}; ATTN_ADAPTIVE=0 keeps one backend"
    ]
    for role, by_size in by_role.items():
        lines += _grid(selection, role, by_size)
    return "\n".join(lines)


def _grid(selection: Selection, role: Role, by_size: Table) -> Iterator[str]:
    names = [c.backend for c in (selection.roles[role], *selection.alternatives[role])]
    groups = [form.layer for form in forms(selection.requirements, selection.page_size)]
    names += [_mixed(names, groups, pick) for pick in by_size.mixed]
    legend = ", ".join(f"{i} {name}" for i, name in enumerate(names, 1))
    prompts = ", whole prompts" if role == "prefill" else ""
    yield f"  {label(role)}{prompts}: {legend}; not measured, so 1: ·"
    lengths = sorted({longest for _, longest, _ in by_size.cells})
    graphs = "  graphs" * bool(by_size.graphs)
    yield f"  {'requests':>10} |" + "".join(f"{_short(b):>6}" for b in lengths) + graphs
    for requests in sorted({x[0] for x in by_size.cells} | set(by_size.graphs)):
        shown = "".join(f"{_at(role, by_size, requests, b):>6}" for b in lengths)
        graph = f"{by_size.graphs[requests] + 1:>8}" if requests in by_size.graphs else ""
        yield f"  {_short(requests):>10} |{shown}{graph}"
    behind = [cell for (_, longest, q), cell in by_size.cells.items() if q < longest]
    if role == "prefill" and behind:
        counts = Counter(names[_winner(cell)] for cell in behind)
        shares = ", ".join(f"{n} {name}" for name, n in counts.most_common())
        yield f"  chunks and prompts behind a prefix, of {len(behind)} sizes: {shares}"


def _mixed(names: Sequence[str], groups: Sequence[str], pick: Candidates) -> str:
    return " and ".join(
        f"{names[i]} ({'; '.join(g for g, of in zip(groups, pick, strict=True) if of == i)})"
        for i in dict.fromkeys(pick)
    )


def _at(role: Role, by_size: Table, requests: int, longest: int) -> str:
    queries = {q for _, _, q in by_size.cells}
    sizes: list[Bucket] = [(requests, longest, q) for q in queries]
    if role == "prefill":
        sizes = [(requests, longest, longest)]
    cell = next((by_size.cells[size] for size in sizes if size in by_size.cells), None)
    return "·" if cell is None else str(_winner(cell) + 1)


def _winner(cell: Cell) -> int:
    return 0 if cell.near[0] else cell.best


def _short(bits: int) -> str:
    """Write the least number of so many bits: "64", "4k"."""
    least = (1 << bits) >> 1
    return f"{least >> 10}k" if least >= 1024 else str(least)
