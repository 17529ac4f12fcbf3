"""A plain run of linear attention in low precision, by which the suite measures errors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_core.cache.state_pool import CHUNK_SIZE
from attn_core.runtime.linear import LinearLayer, gated, normalised
from attn_core.testing.linear_oracle import delta_rule
from attn_core.testing.oracle import tree_mask

Answer = tuple[Tensor, dict[int, Tensor]]  # out [T, Hv, V]; token → the state after it
LOG2E = 1.4426950408889634


def yardstick(
    tensors: Sequence[Tensor],
    layer: LinearLayer,
    start: Tensor,
    dtype: torch.dtype,
    parents: Sequence[int] | None,
    truth: Answer,
) -> Answer:
    """Return the run in `dtype` that errors of one request are measured by.

    tensors: q, k, v, g, beta. start: [Hv, V, K].
    parents: of drafts, None is a sequence.
    truth: the right answer, with the states that are wanted.
    In float32 the error of one run is luck, above all how the sums of log decays are rounded, which
    go into exponents: a sum of 64 numbers may be off by some of its last bits. So chunks are run
    three times, in two of them with such sums, and tokens one by one. In 16 bits chunks are run
    twice. Of each number the one farthest from the truth is taken.
    The gates are accurate. A GPU's fast logarithm, off by 2^-22 near 1, moves a log decay by up to
    exp(A_log) · ln 2 · 2^-22: a fault in float32, and lost where products are rounded to 16 bits.
    """
    out, states = truth
    if not len(out):
        return truth
    exact, mask = dtype == torch.float32, None if parents is None else tree_mask(parents)
    runs = [
        _run(tensors, layer, start, dtype, mask, tuple(states), order)
        for order in range(3 if exact else 2)
    ]
    if exact:
        q, k, v, g, beta = tensors
        one_by_one, states_after = delta_rule(q, k, v, g, beta, layer, start, parents, dtype=dtype)
        runs.append((one_by_one, {t: states_after[t] for t in states}))
    for new_out, new_states in runs:
        out = _farther(out, new_out.double(), truth[0])
        states = {t: _farther(states[t], new_states[t].double(), truth[1][t]) for t in states}
    return out, states


def _farther(a: Tensor, b: Tensor, truth: Tensor) -> Tensor:
    return torch.where((b - truth).abs() > (a - truth).abs(), b, a)


def _run(
    tensors: Sequence[Tensor],
    layer: LinearLayer,
    state: Tensor,
    dtype: torch.dtype,
    mask: Tensor | None,
    tokens: Sequence[int],
    order: int,
) -> Answer:
    """Run chunks of 64 tokens: products of operands in `dtype`, sums and gates in float32."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    q, k, v, g, beta = tensors
    g, beta = gated(layer, g, beta)
    q, k = (rounded(normalised(layer, x)) for x in (q, k))
    group = layer.num_v_heads // layer.num_k_heads
    q, k = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (q, k))  # [Hv, T, K]
    v, beta = v.float().transpose(0, 1), beta.t()
    g = (g if layer.kind == "kda" else g[..., None]).transpose(0, 1)  # [Hv, T, K or 1]
    state = state.float()
    if order == 2:  # sums over key channels from behind
        q, k, g, state = (x.flip(-1) for x in (q, k, g, state))
    exp, unit = (torch.exp2, LOG2E) if order == 1 else (torch.exp, 1.0)
    outs, states = [v[:, :0]], dict[int, Tensor]()
    for first in range(0, v.shape[1], CHUNK_SIZE):
        chunk = slice(first, first + CHUNK_SIZE)
        qs, ks, vs, gs, betas = q[:, chunk], k[:, chunk], v[:, chunk], g[:, chunk], beta[:, chunk]
        n = qs.shape[1]
        visible = torch.ones(n, n, dtype=torch.bool).tril() if mask is None else mask
        total = visible.float() @ (gs * unit) if mask is not None else (gs * unit).cumsum(1)
        ends = total  # added up on their own by whoever carries the state
        if order:
            bits = _last_bits(total, order)
            total, ends = total * (1 + bits), total * (1 - bits)
        decay_between = total[:, :, None] - total[:, None]  # [Hv, n, n, K or 1]
        decay = exp(decay_between.masked_fill(~visible[..., None], -torch.inf))
        key_products, read = (((x[:, :, None] * ks[:, None]) * decay).sum(-1) for x in (ks, qs))
        lower = torch.eye(n) + (betas[..., None] * key_products).tril(-1)
        solve = torch.linalg.solve_triangular(lower, torch.diag_embed(betas), upper=False)
        decay_since_start, stored = exp(total), rounded(state).mT
        u = rounded(rounded(solve) @ rounded(vs - rounded(ks * decay_since_start) @ stored))
        out = rounded(qs * decay_since_start) @ stored + rounded(read) @ u
        outs.append(layer.scale * out)
        for t in {*(t for t in tokens if first <= t < first + n), first + n - 1}:
            end, path = ends[:, t - first, None], visible[t - first, :, None]
            faded = exp((end - total).masked_fill(~path, -torch.inf))
            if order == 1 and faded.shape[-1] == 1:  # the other place that a kernel rounds
                new = rounded(u * faded).mT @ ks
            else:
                new = u.mT @ rounded(ks * faded)
            states[t] = state * exp(end) + new
        state = states[first + n - 1]
    result = {t: states[t].flip(-1) if order == 2 else states[t] for t in tokens}
    return torch.cat(outs, 1).transpose(0, 1), result


def _last_bits(x: Tensor, order: int) -> Tensor:
    """Return the relative size of two last bits, with another sign for every other token [n, 1]."""
    signs = torch.ones(x.shape[1]).index_fill(0, torch.arange(order - 1, x.shape[1], 2), -1.0)
    return signs[:, None] * 2 * torch.finfo(torch.float32).eps
