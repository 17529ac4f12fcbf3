"""Text out: one console without markup, tables that fold instead of cutting, plain JSON."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def console(stream: TextIO | None = None) -> Console:
    """Return a console that prints plugin texts as they are (no markup, no emoji)."""
    from rich.console import Console  # 70 ms that `attn select` does not pay

    stream = stream or sys.stdout
    width = None if stream.isatty() else max(100, shutil.get_terminal_size((160, 40)).columns)
    return Console(
        file=stream, markup=False, emoji=False, highlight=False, soft_wrap=False, width=width
    )


def print_table(header: list[str], lines: list[list[str]], title: str = "") -> None:
    """Print a table; long cells fold."""
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for line in lines:
        table.add_row(*line)
    console().print(table)


def print_json(data: Any) -> None:
    """Print one JSON value."""
    print(json.dumps(data, indent=2, ensure_ascii=False))
