"""Inputs with other strides: q, k and v as a model's fused projection leaves them.

Any strides are legal if the last one is 1. The memory between the numbers holds NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

# fused: slices of one projection, [T, (Hq + Hkv) · D + Hkv · Dv]. apart: each head beside numbers
# of another tensor, as [T, H, 3, D] leaves it. heads-first: [H, T, D] transposed. values-apart: V
# alone is a slice, as in MLA, where one projection makes it beside the keys' part without RoPE.
Strides = Literal["packed", "fused", "apart", "heads-first", "values-apart"]


def restrided(strides: Strides, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return queries, keys and values, [T, heads, dim] each, in other strides."""
    widths = [x.shape[1] * x.shape[2] for x in tensors]
    return [
        _one(strides, x, sum(widths[:i]), sum(widths), is_v=i == 2) for i, x in enumerate(tensors)
    ]


def _one(strides: Strides, x: Tensor, index: int, width: int, *, is_v: bool) -> Tensor:
    tokens, heads, dim = x.shape
    if strides == "fused":
        row_size = heads * dim  # alone, it is half of a row
        rows = x.new_full((tokens, width if width > row_size else 2 * row_size), torch.nan)
        view = rows[:, index : index + row_size].view(x.shape)
    elif strides == "apart" or (strides == "values-apart" and is_v):
        view = x.new_full((tokens, heads, 2 * dim), torch.nan)[..., dim:]
    elif strides == "heads-first":
        view = x.new_empty(heads, tokens, dim).transpose(0, 1)
    else:
        return x
    return view.copy_(x)
