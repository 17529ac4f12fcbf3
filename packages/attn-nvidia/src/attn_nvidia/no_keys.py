"""What attention over no keys at all gives: zeros, and the sink or -inf as the log-sum-exp."""

from __future__ import annotations

import torch
from attn_core.backend import Output
from attn_core.forward import AttentionLayer
from torch import Tensor


def no_keys(q: Tensor, layer: AttentionLayer, out: Tensor | None, return_lse: bool) -> Output:
    """Return out [T, Hq, Dv], all zero, and with return_lse the LSE, float32 [T, Hq]."""
    if out is None:
        out = q.new_empty(q.shape[0], layer.num_q_heads, layer.v_head_dim)
    out.zero_()
    if not return_lse:
        return out
    lse = q.new_full(out.shape[:2], -torch.inf, dtype=torch.float32)
    return out, lse if layer.sinks is None else lse.copy_(layer.sinks.expand_as(lse))
