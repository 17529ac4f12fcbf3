"""Which version of Intel's kernel libraries goes with which torch."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core import Pin, hookimpl


@hookimpl
def attn_register_pins() -> Sequence[Pin]:
    """Return the pins of sglang-kernel-cpu, intel-extension-for-pytorch and vllm-xpu-kernels."""
    return [
        Pin(
            distribution="sglang-kernel-cpu",
            torch=">=2.8",
            version=">=0.4",
            indexed=False,
            why="built from SGLang's source for CPUs; no index has it",
        ),
        Pin(
            distribution="intel-extension-for-pytorch",
            torch="==2.8.*",
            version="==2.8.0",
            why="the last release before the project was archived; it refuses any other torch",
        ),
        Pin(
            distribution="vllm-xpu-kernels",
            torch="==2.14.*",
            version="==0.1.16.2",
            why="built for torch 2.14.0+xpu",
        ),
    ]
