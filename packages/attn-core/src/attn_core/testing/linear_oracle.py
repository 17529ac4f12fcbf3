"""What linear attention should return: the gated delta rule in float64, token after token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_core.runtime.linear import LinearLayer


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    layer: LinearLayer,
    state: Tensor | None = None,
    parents: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Run one request; return the outputs [T, Hv, V] and the state after each token, in `dtype`.

    q, k [T, Hk, K]; v [T, Hv, V]; g and beta as LinearLayer says.
    state: [Hv, V, K], zeros if None.
    parents: of a tree of drafts, the index of each token's parent, -1 = the state itself; None is
    a sequence. States are [T, Hv, V, K].
    """
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if layer.gate is not None:
        g, beta = _gates(g, beta, layer)
    if layer.qk_norm is not None:
        q, k = (x / (x.square().sum(-1, keepdim=True) + layer.qk_norm).sqrt() for x in (q, k))
    hv = layer.num_v_heads
    q, k = (x.repeat_interleave(hv // layer.num_k_heads, 1) for x in (q, k))
    first = torch.zeros(hv, v.shape[-1], q.shape[-1], dtype=dtype, device=q.device)
    if state is not None:
        first = state.to(dtype)
    outputs, states = torch.empty_like(v), first.new_empty(len(q), *first.shape)
    for t in range(len(q)):
        parent = t - 1 if parents is None else parents[t]
        s = first if parent < 0 else states[parent]
        decay = g[t].exp()
        s = s * (decay[:, None, None] if layer.kind == "gdn" else decay[:, None, :])
        u = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", s, k[t]))
        states[t] = s + u[..., None] * k[t, :, None]
        outputs[t] = layer.scale * torch.einsum("hvk,hk->hv", states[t], q[t])
    return outputs, states


def _gates(f: Tensor, b: Tensor, layer: LinearLayer) -> tuple[Tensor, Tensor]:
    gate = layer.gate
    assert gate is not None
    a, x = gate.A_log.to(f.dtype).exp(), f + gate.dt_bias.to(f.dtype)
    a = a if layer.kind == "gdn" else a[:, None]
    if gate.lower_bound is None:
        g = -a * torch.log1p(x.exp()).where(x < 80, x)
    else:
        g = gate.lower_bound / (1 + (-a * x).exp())
    return g, (2 if gate.neg_eigval else 1) / (1 + (-b).exp())
