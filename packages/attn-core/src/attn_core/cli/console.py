"""Terminal output: a console without markup, tables that wrap instead of truncating, JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any, TextIO

from attn_core.formatting import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

NARROWEST = 7  # characters of a column; in a narrower one, words break into unreadable pieces


def console(stream: TextIO | None = None) -> Console:
    """Return a console that prints plugin texts as they are (no markup, no emoji)."""
    from rich.console import Console  # 70 ms that `attn select` does not pay

    stream = stream or sys.stdout
    width = None if stream.isatty() else shutil.get_terminal_size((160, 40)).columns
    return Console(
        file=stream, markup=False, emoji=False, highlight=False, soft_wrap=False, width=width
    )


def progress(*columns: ProgressColumn) -> Progress:
    """Return a transient progress bar on stderr. Without a terminal it prints nothing."""
    from rich.progress import Progress

    out = console(sys.stderr)
    return Progress(*columns, console=out, transient=True, disable=not out.is_interactive)


def print_table(header: list[str], rows: list[list[str]], title: str = "") -> None:
    """Print a table. Long cells wrap between words, and within a word only if necessary.

    Where that would leave a column fewer than NARROWEST characters, each row is a paragraph.
    """
    from rich.table import Table

    out = console()
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = _widths([header, *rows], out.width - 2 * (len(header) - 1))
    columns = zip(header, *rows, strict=True)
    words = [max((len(word) for c in cells for word in c.split()), default=0) for cells in columns]
    if any(width < min(NARROWEST, word) for width, word in zip(widths, words, strict=True)):
        _print_paragraphs(header, rows, title)
        return
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for name, width in zip(header, widths, strict=True):
        table.add_column(name, overflow="fold", width=width)
    for row in rows:
        table.add_row(*row)
    out.print(table)


def _print_paragraphs(header: list[str], rows: list[list[str]], title: str) -> None:
    """Print the first cell of each row, and below it the others with their titles."""
    lines = [title] if title else []
    for name, *cells in rows:
        pairs = zip(header[1:], cells, strict=True)
        lines += [name, *(f"  {t}  {c}" if t else f"  {c}" for t, c in pairs if c)]
    print_text("\n".join(lines))


def _widths(rows: list[list[str]], width: int) -> list[int]:
    """Give every column its longest word, then share what is left.

    Where the words do not fit, those of the widest columns break, names (the first column) last.
    """
    columns = list(zip(*rows, strict=True))
    minimum = [max(len(word) for cell in c for word in (cell.split() or [""])) for c in columns]
    natural = [max(map(len, c)) for c in columns]
    while sum(minimum) > max(width, len(columns)):
        widest = max(range(len(columns)), key=lambda i: (minimum[i] > 1, i > 0, minimum[i]))
        minimum[widest] -= 1
    spare_width = max(0, width - sum(minimum))
    wanting = sorted(range(len(columns)), key=lambda i: natural[i] - minimum[i])
    for left, i in zip(range(len(wanting), 0, -1), wanting, strict=True):
        share = min(natural[i] - minimum[i], spare_width // left)
        minimum[i], spare_width = minimum[i] + share, spare_width - share
    return minimum


def print_text(text: str) -> None:
    """Print lines as they are, one fact each.

    In a terminal, and where COLUMNS is set, they fold below their last column.
    """
    text = "\n".join(printable(line) for line in text.split("\n"))
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        print(text)
        return
    width = shutil.get_terminal_size().columns
    for line in text.splitlines():
        column = max((m.end() for m in re.finditer(" {2,}", line)), default=0)
        indent = " " * (column if column <= width // 2 else 4)
        folded = textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
        print("\n".join(folded))


def print_json(data: Any) -> None:
    """Print one JSON value. Characters that the stream cannot encode are escaped."""
    text = json.dumps(data, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(data, indent=2)
    print(text)
