"""Which kernels each architecture has, the best first."""

from __future__ import annotations

import importlib
import importlib.util
from typing import NamedTuple

from attn_core.backends.triton.kernel import Kernel
from attn_core.backends.triton.portable.launch import PortableDecode, PortablePrefill
from attn_core.backends.triton.schedule import SplitKV, Tiles


class Kernels(NamedTuple):
    """The kernels of an architecture. The last one of each part takes every shape and cache."""

    decode: tuple[Kernel[SplitKV], ...] = (PortableDecode(),)
    prefill: tuple[Kernel[Tiles], ...] = (PortablePrefill(),)


# Modules with kernels of their own, DECODE and PREFILL, and what of Triton they need.
_OWN = {
    "sm90": (
        "attn_core.backends.triton.hopper.launch",
        "triton.experimental.gluon.language.nvidia.hopper",
    )
}


def kernels_of(arch: str) -> Kernels:
    """Return the kernels of "sm90", "gfx942" or another architecture."""
    portable = Kernels()
    if arch not in _OWN:
        return portable
    module, required = _OWN[arch]
    if not _found(required):  # a Triton before 3.6
        return portable
    own = importlib.import_module(module)
    return Kernels((*own.DECODE, *portable.decode), (*own.PREFILL, *portable.prefill))


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
