"""Prefill, first kernel: what a chunk of 64 tokens needs that does not depend on its state.

With G the running sum of the chunk's log decays, L_ij = beta_i (k_i·k_j) exp(G_i - G_j) below the
diagonal, T = (I + L)^-1 diag(beta) and P_ij = scale (q_i·k_j) exp(G_i - G_j) on and below it. All
chunks and heads are computed in parallel. Differences above the diagonal are positive: they are
masked before exp, which would overflow.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.linear.gates import head_weights, log_decay, update_rate
from attn_core.backends.triton.linear.solve import inverse

CHUNK = tl.constexpr(64)


@triton.jit
def load_rows(x, first, i, head, d, inside):
    """Return one head of a chunk's tokens [64, K]; zeros where a chunk has no token."""
    at = x.ptr + first * x.token_stride + head * x.head_stride
    at += i[:, None] * x.token_stride + d[None, :]
    return tl.load(at, mask=inside[:, None], other=0.0)


@triton.jit
def norms(x, eps, NORM: tl.constexpr):
    """Return what normalises each row: raw rows are multiplied first, which is exact."""
    if NORM:
        wide = x.to(tl.float32)
        return tl.rsqrt(tl.sum(wide * wide, 1) + eps)
    return tl.full([CHUNK], 1.0, tl.float32)


@triton.jit
def store_square(x, at, value, i):
    """Write a [64, 64] matrix of a chunk and head."""
    at = x + at * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
    tl.store(at, value.to(x.dtype.element_ty))


@triton.jit
def prepare_gdn(inputs, weights, numbers, chunks, work, C: tl.constexpr):
    """Prepare a chunk for one value head. Grid: (chunks · HV)."""
    c = tl.program_id(0) // C.HV
    hv = tl.program_id(0) % C.HV
    at = tl.program_id(0).to(tl.int64)
    first = tl.load(chunks.start + c).to(tl.int64)
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, C.K)
    inside = i < tl.load(chunks.count + c)
    a_log, bias = head_weights(weights, hv, 0, C)
    g_at = inputs.g.ptr + (first + i) * inputs.g.token_stride + hv * inputs.g.head_stride
    g = log_decay(tl.load(g_at, mask=inside, other=0.0), a_log, bias, numbers.lower_bound, C)
    g = tl.where(inside, g, 0.0)
    G = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    b_at = inputs.beta.ptr + (first + i) * inputs.beta.token_stride + hv * inputs.beta.head_stride
    beta = update_rate(tl.load(b_at, mask=inside, other=0.0), C)
    beta = tl.where(inside, beta, 0.0)
    k = load_rows(inputs.k, first, i, hv // C.GROUP, d, inside)
    q = load_rows(inputs.q, first, i, hv // C.GROUP, d, inside)
    k_norm = norms(k, numbers.eps, C.NORM)
    q_norm = norms(q, numbers.eps, C.NORM) * numbers.scale
    f_at = work.factors + at * (3 * CHUNK) + i
    tl.store(f_at, tl.exp(G) * k_norm)
    tl.store(f_at + CHUNK, tl.exp(G) * q_norm)
    tl.store(f_at + 2 * CHUNK, tl.exp(total - G) * k_norm)
    tl.store(work.decay + at, tl.exp(total))
    decay = G[:, None] - G[None, :]
    decay = tl.exp(tl.where(i[:, None] >= i[None, :], decay, -float("inf"))) * k_norm[None, :]
    qk = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)
    store_square(work.P, at, qk * decay * q_norm[:, None], i)
    L = tl.dot(k, tl.trans(k), input_precision=C.PRECISION) * decay * (k_norm * beta)[:, None]
    L = tl.where(i[:, None] > i[None, :], L, 0.0)
    store_square(work.T, at, inverse(L, C) * beta[None, :], i)
