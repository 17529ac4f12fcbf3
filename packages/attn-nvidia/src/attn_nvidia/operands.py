"""Tensors as kernels load them: 16 bytes at a time, and as FP8 beside FP8."""

from __future__ import annotations

import torch
from torch import Tensor

_E4M3_MAX = 448.0


def aligned(x: Tensor) -> Tensor:
    """Return x [T, H, D] itself where kernels can load 16 bytes at a time, else a copy.

    D is taken as a multiple of 16 bytes.
    """
    if not x.data_ptr() % 16:
        if x.is_contiguous():
            return x
        unit = 16 // x.element_size()
        if x.stride(2) == 1 and not (x.stride(0) % unit or x.stride(1) % unit):
            return x
    return x.clone(memory_format=torch.contiguous_format)


def rounded(q: Tensor) -> Tensor:
    """Return q as e4m3, saturated: what FP8 kernels multiply an FP8 cache by."""
    return q.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
