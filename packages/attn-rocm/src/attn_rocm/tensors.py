"""Queries, keys and values as AMD's kernels load them."""

from __future__ import annotations

import torch
from attn_core import UnsupportedError
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


def refuse_other_strides(name: str, keys: Tensor, values: Tensor) -> None:
    """Raise UnsupportedError for V of other strides than K, by which the decode kernel reads it."""
    if keys.stride() == values.stride():
        return
    raise UnsupportedError(
        f"pages {list(keys.shape)} of strides {list(keys.stride())}, those of V "
        f"{list(values.stride())}: decode of {name} reads V by the strides of K; create the pool "
        "with a tensor for each of K and V, as KVPool does, or name another backend"
    )
