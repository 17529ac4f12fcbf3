"""Queries as AMD's kernels load them: dense, 16 bytes at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_heads(q: Tensor) -> Tensor:
    """Return q [T, H, D] itself where a kernel that knows its token stride alone can load it.

    That is where the heads of a token lie one after the other, at multiples of 16 bytes. Else a
    dense copy.
    """
    unit = 16 // q.element_size()
    token, head, column = q.stride()
    if column == 1 and head == q.shape[2] and not (token % unit or q.data_ptr() % 16):
        return q
    return q.clone(memory_format=torch.contiguous_format)
