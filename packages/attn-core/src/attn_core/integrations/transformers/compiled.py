"""What torch.compile sees of an enabled model: its code, with each attention as one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.linear import LinearLayer

_F = TypeVar("_F", bound=Callable[..., Any])


def between(function: _F) -> _F:
    """Run a function as it is, and let torch.compile have what it calls."""
    wrapped: _F = torch.compiler.disable(function, recursive=False)  # type: ignore[no-untyped-call]
    return wrapped


def eager(function: _F) -> _F:
    """Run a function and all that it calls as they are: lengths and pages are Python's."""
    wrapped: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return wrapped


def attend(
    query: Tensor, key: Tensor, value: Tensor | None, layer: AttentionLayer, pool: int
) -> Tensor:
    """Attend as Pass.attend, in one operator; pool: the number of the model's PagedCache."""
    b, hq, t, _ = query.shape
    out = query.new_empty(b, t, hq, layer.v_head_dim)
    torch.ops.attn_core.attention(out, query, key, value, pool, layer.layer_id)
    return out


def choose(
    q_index: Tensor, k_index: Tensor, weights: Tensor, layer: AttentionLayer, pool: int
) -> Tensor:
    """Select keys as Pass.choose, in one operator."""
    assert layer.index_topk is not None
    out = q_index.new_empty(*q_index.shape[:2], layer.index_topk, dtype=torch.int32)
    torch.ops.attn_core.attention(out, q_index, k_index, weights, pool, layer.layer_id)
    return out


def attend_linear(qkv: Tensor, f: Tensor, b: Tensor, layer: LinearLayer, pool: int) -> Tensor:
    """Run a linear layer as Pass.attend_linear, convolution included, in one operator."""
    out = qkv.new_empty(*qkv.shape[:2], layer.num_v_heads, layer.head_v_dim)
    torch.ops.attn_core.attention(out, qkv, f, b, pool, layer.layer_id)
    return out
