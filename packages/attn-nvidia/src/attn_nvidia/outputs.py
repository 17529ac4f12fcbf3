"""What a kernel fills and what the caller gets, `out` [T, Hq, Dv] where that was given."""

from __future__ import annotations

import torch
from attn_core.backend import Output
from attn_core.forward import AttentionLayer
from torch import Tensor


def dense(q: Tensor, v_dim: int, out: Tensor | None) -> Tensor:
    """Return what a kernel that knows no strides of its output can fill, `out` where possible."""
    return q.new_empty(*q.shape[:2], v_dim) if out is None or not out.is_contiguous() else out


def as_asked(result: Tensor, out: Tensor | None) -> Tensor:
    """Return what a kernel gave in a buffer of its own, in `out` where that was given."""
    return result if out is None or out is result else out.copy_(result)


def no_keys(q: Tensor, layer: AttentionLayer, out: Tensor | None, return_lse: bool) -> Output:
    """Return what queries see that see no key: zeros, and the sink or -inf as the LSE [T, Hq]."""
    if out is None:
        out = q.new_empty(q.shape[0], layer.num_q_heads, layer.v_head_dim)
    out.zero_()
    if not return_lse:
        return out
    lse = q.new_full(out.shape[:2], -torch.inf, dtype=torch.float32)
    return out, lse if layer.sinks is None else lse.copy_(layer.sinks.expand_as(lse))
