"""Environment variables that a command reads, and a warning for those it does not read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attn_core.formatting import near

PREFIX = "ATTN_"


def variable(flag: str) -> str:
    """Return the variable of a flag: "--page-size" is ATTN_PAGE_SIZE."""
    return PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def unknown_variables(
    environ: Mapping[str, str], readable: Iterable[str], reader: str
) -> list[str]:
    """Return one sentence for every ATTN_* variable that `reader` does not read."""
    readable = tuple(readable)
    return [
        f"environment variable {name} is not read by {reader}: "
        + (near(name, readable, prefix=PREFIX) if readable else "it reads none")
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in readable
    ]
