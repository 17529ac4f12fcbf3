"""Values as text for people."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from attn_core.capabilities import Capabilities, Device


def listing(values: Iterable[Any]) -> str:
    """Write a set for people: "32, 64", or "8, 16 … 256" for a long even row of numbers."""
    items = sorted(values)
    if len(items) > 4 and all(isinstance(x, int) for x in items):
        steps = {b - a for a, b in itertools.pairwise(items)}
        if len(steps) == 1:
            return f"{items[0]}, {items[1]} … {items[-1]}"
    return ", ".join(f"{x[0]}/{x[1]}" if isinstance(x, tuple) else str(x) for x in items)


def places(rows: Iterable[Capabilities]) -> str:
    """Name the devices that rows run on: "cuda:sm80, cuda:sm90"."""
    found = {Device(r.device, arch) for r in rows for arch in r.archs or {""}}
    order = sorted(found, key=lambda d: (d.type, len(d.arch or ""), d.arch or ""))
    return ", ".join(map(str, order))


def printable(text: str, most: int = 10_000) -> str:
    """Write control characters and lone surrogates as escapes; cut what is above `most` characters.

    Line ends and tabs stay. A text of a plugin or a config cannot steer a terminal then.
    """
    cut = text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
    shown = (c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in cut)
    return cut if cut.isprintable() else "".join(shown)
