"""Which version of AMD's kernel libraries goes with which torch."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core import Pin, hookimpl


@hookimpl
def attn_register_pins() -> Sequence[Pin]:
    """Return the pin of AITER."""
    return [
        Pin(
            distribution="amd-aiter",
            torch=">=2.8",
            version=">=0.1.7.dev0",
            options="--pre",
            module="aiter",
            why="only a pre-release is published; the package named aiter is another project",
        )
    ]
