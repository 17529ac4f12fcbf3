"""Format values for people."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable
from typing import Any

FEW = 8  # names that are listed whole


def listing(values: Iterable[Any]) -> str:
    """Write a set for people: "32, 64", or "8, 16 … 256" for a long even row of numbers."""
    items = sorted(values)
    if len(items) > 4 and all(isinstance(x, int) for x in items):
        steps = {b - a for a, b in itertools.pairwise(items)}
        if len(steps) == 1:
            return f"{items[0]}, {items[1]} … {items[-1]}"
    return ", ".join(f"{x[0]}/{x[1]}" if isinstance(x, tuple) else str(x) for x in items)


def printable(text: str, most: int = 10_000) -> str:
    """Write control characters and lone surrogates as escapes; cut what is above `most` characters.

    Line ends and tabs stay. A text of a plugin or a config cannot steer a terminal then.
    """
    cut = text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
    shown = (c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in cut)
    return cut if cut.isprintable() else "".join(shown)


def near(name: object, known: Iterable[str], *, prefix: str = "") -> str:
    """Suggest the known names closest to `name`, or list all if they are few or none is close.

    prefix: the common prefix of all names, ignored when they are compared.
    """
    name = str(name)  # it may be what a caller took for a name, as a torch.dtype
    ends = sorted({k.removeprefix(prefix) for k in known})
    close = difflib.get_close_matches(name.removeprefix(prefix), ends, n=3, cutoff=0.5)
    if close and len(ends) > FEW:
        return f"did you mean {' or '.join(prefix + end for end in close)}?"
    return f"known: {', '.join(prefix + end for end in ends)}" if ends else "none is known"
