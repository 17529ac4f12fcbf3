"""Which version of NVIDIA's kernel libraries goes with which torch."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core import Pin, hookimpl

# sglang-kernel links torch's C++ ABI: one minor version of torch each (SGLang's own pins).
SGL_KERNEL = {"2.9": "0.4.1", "2.11": "0.4.5", "2.13": "0.4.8", "2.14": "0.4.10"}


@hookimpl
def attn_register_pins() -> Sequence[Pin]:
    """Return the pins of sglang-kernel, sgl-flash-mla, flash-attn-3 and flash-attn-4."""
    return [
        *(
            Pin(
                distribution="sglang-kernel",
                torch=f"=={torch}.*",
                version=f"=={version}",
                why=f"sglang-kernel {version} is built for torch {torch}",
            )
            for torch, version in SGL_KERNEL.items()
        ),
        Pin(
            distribution="sgl-flash-mla",
            torch=">=2.11",
            version="==1.0.0",
            options="--no-deps",
            why="its stable ABI loads beside torch 2.11 and newer, but its metadata would make pip "
            "replace torch",
        ),
        Pin(
            distribution="flash-attn-3",
            torch=">=2.8",
            version=">=3.0.0b1",
            indexed=False,
            why="built from the source of FlashAttention (its folder hopper); the project of that "
            "name on the index is an empty placeholder",
        ),
        Pin(
            distribution="flash-attn-4",
            torch=">=2.8",
            version="==4.0.0b18",
            options="--pre",
            why="only pre-releases are published, and fa4 calls a private function of this one; "
            "beside CUDA 13 it wants its extra cu13",
        ),
    ]
