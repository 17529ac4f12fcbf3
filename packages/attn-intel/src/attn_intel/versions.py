"""Which kernels of intel_amx, intel_xpu and ipex are here, and which go with which torch."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core import Pin, hookimpl

from attn_intel.cpu.build import COMMAND, KERNELS, compiled_library


@hookimpl
def attn_register_pins() -> Sequence[Pin]:
    """Return the pins of intel_amx's compiled kernels and of two libraries."""
    return [
        Pin(
            distribution=KERNELS,
            torch=">=2.8",
            version=">=0",
            indexed=False,
            why="compiled kernels that attn-intel's wheel for x86-64 Linux brings; elsewhere, with "
            f"a C compiler, `{COMMAND}` compiles them once",
        ),
        Pin(
            distribution="vllm-xpu-kernels",
            torch="==2.14.*",
            version="==0.1.16.2",
            why="built for torch 2.14.0+xpu",
        ),
        Pin(
            distribution="intel-extension-for-pytorch",
            torch="==2.8.*",
            version="==2.8.0",
            why="the last release, which imports beside torch 2.8 alone",
        ),
    ]


@hookimpl
def attn_register_libraries() -> Sequence[str]:
    """Return intel_amx's compiled kernels, where this source of them was compiled."""
    return [] if compiled_library() is None else [KERNELS]
