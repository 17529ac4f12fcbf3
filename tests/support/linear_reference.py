"""Gated linear attention in float64, one token after another, and inputs for it."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus


def recurrence(q, k, v, g, beta, S, scale, parents=None):
    """Return the outputs [T, Hv, V] and the state [Hv, V, K] after each token.

    q, k [T, Hk, K], normalised; g [T, Hv] or [T, Hv, K]; S: the state before the first token.
    parents: of each token the one that it follows, -1 is S; None is a chain.
    """
    q, k, v, g, beta, S = (x.double() for x in (q, k, v, g, beta, S))
    group = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    out, states = [], []
    for t in range(len(v)):
        parent = t - 1 if parents is None else parents[t]
        before = states[parent] if parent >= 0 else S
        decay = g[t].exp()
        decayed = before * (decay[:, None, :] if g.dim() == 3 else decay[:, None, None])
        u = (v[t] - torch.einsum("hvk,hk->hv", decayed, k[t])) * beta[t][:, None]
        after = decayed + u[:, :, None] * k[t][:, None, :]
        out.append(torch.einsum("hvk,hk->hv", after, q[t]) * scale)
        states.append(after)
    return (torch.stack(out) if out else torch.zeros_like(v)), states


@dataclass(frozen=True)
class Tokens:
    """Drawn inputs of a layer: raw, as a backend is given them, and `exact`, as formulas do."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    layer: SimpleNamespace

    @property
    def raw(self):
        return self.q, self.k, self.v, self.g, self.beta

    def __getitem__(self, at):
        return replace(self, **{n: getattr(self, n)[at] for n in ("q", "k", "v", "g", "beta")})

    @property
    def exact(self):
        """q and k normalised, log decay and beta; float64."""
        layer, gate = self.layer, self.layer.gate
        q, k, v, g, beta = (x.double() for x in self.raw)
        if layer.qk_norm is not None:
            q, k = (x * (x.square().sum(-1, keepdim=True) + layer.qk_norm).rsqrt() for x in (q, k))
        if gate is not None:
            a = gate.A_log.double().exp()
            a = a[:, None] if layer.kind == "kda" else a
            y = g + gate.dt_bias.double()
            bound = gate.lower_bound
            g = -a * softplus(y) if bound is None else bound * torch.sigmoid(a * y)
            beta = torch.sigmoid(beta) * (2 if gate.neg_eigval else 1)
        return q, k, v, g, beta

    def run(self, S, parents=None):
        """Return the outputs, and the states after each token."""
        return recurrence(*self.exact, S, self.layer.scale, parents)


def make_linear_layer(
    *, kind="gdn", heads=(1, 2), dims=(32, 32), gate=None, norm=None, neg_eigval=False
):
    """Return a layer as kernels read it. gate: None, "softplus" or "bounded"."""
    (hk, hv), (k, v) = heads, dims
    weights = None
    if gate is not None:
        weights = SimpleNamespace(
            A_log=torch.rand(hv) * 2.5 - 1,
            dt_bias=torch.randn(hv, k) if kind == "kda" else torch.randn(hv),
            lower_bound=-5.0 if gate == "bounded" else None,
            neg_eigval=neg_eigval,
        )
    return SimpleNamespace(
        layer_id=0, num_k_heads=hk, num_v_heads=hv, head_k_dim=k, head_v_dim=v, kind=kind,
        scale=k**-0.5, qk_norm=norm, gate=weights,
    )  # fmt: skip


def draw(layer, tokens, *, hard=False, decay=1.0, dtype=torch.float32):
    """Draw inputs; q, k and v are parts of one projection.

    hard: keys near each other and beta near 1, at which the inverse of a chunk is worst.
    decay: the mean log decay of a token, where the layer has no gate.
    """
    hk, hv, k_dim, v_dim = (
        layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    )  # fmt: skip
    k = torch.randn(tokens, hk, k_dim)
    if hard:
        k = normalize(k[:1], dim=-1) + 0.05 * normalize(k, dim=-1)
    q = torch.randn(tokens, hk, k_dim)
    if layer.qk_norm is None:
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    gates = (tokens, hv, k_dim) if layer.kind == "kda" else (tokens, hv)
    if layer.gate is None:
        g = -torch.rand(gates) * 2 * decay * (0.01 if hard else 1)
        beta = torch.rand(tokens, hv) * 0.05 + 0.95 if hard else torch.rand(tokens, hv)
    else:
        g, beta = torch.randn(gates).to(dtype), torch.randn(tokens, hv).to(dtype)
    v = torch.randn(tokens, hv * v_dim)
    packed = torch.cat((q.flatten(1), k.flatten(1), v), 1).to(dtype)
    q, k, v = packed.split([hk * k_dim, hk * k_dim, hv * v_dim], 1)
    q, k, v = q.unflatten(1, (hk, -1)), k.unflatten(1, (hk, -1)), v.unflatten(1, (hv, -1))
    return Tokens(q, k, v, g, beta, layer)
