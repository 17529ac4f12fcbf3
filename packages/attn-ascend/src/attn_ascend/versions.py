"""Which versions of Ascend's libraries go with which torch."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core import Pin, hookimpl


@hookimpl
def attn_register_pins() -> Sequence[Pin]:
    """Return the pins of torch-npu, one minor version of torch each, and of triton-ascend."""
    return [
        *(
            Pin(
                distribution="torch-npu",
                torch=f"=={torch}.*",
                version=f"=={torch}.*",
                why="torch-npu needs exactly its own torch, and CANN: without CANN it breaks "
                "`import torch`",
            )
            for torch in ("2.11", "2.13", "2.14")
        ),
        Pin(
            distribution="triton-ascend",
            torch=">=2.8",
            version=">=3.2",
            replaces="triton",
            why="it owns the module `triton`: uninstall triton first, the two cannot coexist",
        ),
    ]
