"""Which kernels each architecture has, the best first."""

from __future__ import annotations

import importlib
import importlib.util
from typing import NamedTuple

from attn_core.backends.triton.kernel import Kernel, NewTokensKernel
from attn_core.backends.triton.portable.launch import PortableDecode, PortablePrefill
from attn_core.backends.triton.schedule import SplitKV, Tiles


class Kernels(NamedTuple):
    """The kernels of an architecture. The last one of each part takes every shape and cache.

    new_tokens: over K and V of the pass itself, if there is one.
    """

    decode: tuple[Kernel[SplitKV], ...] = (PortableDecode(),)
    prefill: tuple[Kernel[Tiles], ...] = (PortablePrefill(),)
    new_tokens: NewTokensKernel | None = None


# Modules with kernels of their own: DECODE, PREFILL and NEW_TOKENS.
_OWN = {"sm90": "attn_core.backends.triton.hopper.new_tokens"}


def kernels_of(arch: str) -> Kernels:
    """Return the kernels of "sm90", "gfx942" or another architecture."""
    portable = Kernels()
    if arch not in _OWN:
        return portable
    if not has_gluon():
        return portable
    module = importlib.import_module(_OWN[arch])
    return Kernels(
        (*module.DECODE, *portable.decode), (*module.PREFILL, *portable.prefill), module.NEW_TOKENS
    )


def has_gluon() -> bool:
    """Say whether this Triton has Gluon for Hopper; one before 3.6 has not."""
    try:
        return (
            importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None
        )
    except ModuleNotFoundError:  # of the package that it is in
        return False
