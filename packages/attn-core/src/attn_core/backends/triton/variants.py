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


# Modules with kernels of their own, DECODE and PREFILL.
_OWN = {"sm90": "attn_core.backends.triton.hopper.launch"}


def kernels_of(arch: str) -> Kernels:
    """Return the kernels of "sm90", "gfx942" or another architecture."""
    portable = Kernels()
    if arch not in _OWN:
        return portable
    if not has_gluon():
        return portable
    own = importlib.import_module(_OWN[arch])
    return Kernels((*own.DECODE, *portable.decode), (*own.PREFILL, *portable.prefill))


def has_gluon() -> bool:
    """Say whether this Triton has Gluon for Hopper; one before 3.6 has not."""
    try:
        return (
            importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None
        )
    except ModuleNotFoundError:  # of the package that it is in
        return False
