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

from attn_core.backends.triton.linear.gates import (
    coarse_part,
    head_ptr,
    head_weights,
    log_decay,
    update_rate,
)
from attn_core.backends.triton.linear.solve import inverse, multiplied

CHUNK = tl.constexpr(64)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(x, first, i, head, d, inside):
    """Return one head of a chunk's tokens [64, K]; zeros where a chunk has no token."""
    at = head_ptr(x, head) + first * x.token_stride
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
def store_solved(work, at, L, P, beta, i, tokens: tl.constexpr, C: tl.constexpr):
    """Write T and P · T of a chunk and head: of L and P what stands above the diagonal is 0."""
    P = P.to(tokens if tokens == tl.float32 else tl.float16)  # fewer registers meanwhile
    T = inverse(L, tokens, C) * beta[None, :]
    at = work.T + at * (2 * CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
    tl.store(at, T.to(work.T.dtype.element_ty))
    PT = multiplied(P, T, tokens, C)
    tl.store(at + CHUNK * CHUNK, PT.to(work.T.dtype.element_ty))


@triton.jit
def products_and_norms(x, k, eps, BY_PRODUCT: tl.constexpr, C: tl.constexpr):
    """Return x · kᵀ [64, 64], and what normalises the rows of x.

    BY_PRODUCT: squares are taken from the diagonal of x · xᵀ. With wgmma that is cheaper than to
    widen all rows; without it takes registers.
    """
    if C.NORM and BY_PRODUCT:
        i = tl.arange(0, CHUNK)
        squares = tl.dot(x, tl.trans(x), input_precision=C.PRECISION)
        squares = tl.sum(tl.where(i[:, None] == i[None, :], squares, 0.0), 1)
        norm = tl.rsqrt(squares + eps)
    else:
        norm = norms(x, eps, C.NORM)
    return tl.dot(x, tl.trans(k), input_precision=C.PRECISION), norm


@triton.jit
def decays(g, i, EXACT: tl.constexpr):
    """Return log decays since the chunk's start, until its end, and from a token j to a token i.

    After strong forgetting these are small differences of large sums. EXACT: the sums' coarse parts
    are exact in float32, and the rest is small. Without it a decay may be off by 1e-4, which tokens
    of 16 bits do not show.
    """
    if EXACT:
        coarse = coarse_part(g)
        rest = tl.cumsum(g - coarse, 0)
        G = tl.cumsum(coarse, 0)
        until = (tl.sum(coarse, 0) - G) + (tl.sum(g - coarse, 0) - rest)
        between = (G[:, None] - G[None, :]) + (rest[:, None] - rest[None, :])
        G = G + rest
    else:
        G = tl.cumsum(g, 0)
        until = tl.sum(g, 0) - G
        between = G[:, None] - G[None, :]
    return G, until, tl.where(i[:, None] >= i[None, :], between, -float("inf"))


@triton.jit
def prepare_gdn(
    inputs, weights, numbers, chunks, work, BY_PRODUCT: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Prepare a chunk for one value head. Grid: (chunks · HV)."""
    c = tl.program_id(0) // C.HV
    hv = tl.program_id(0) % C.HV
    at = tl.program_id(0).to(tl.int64)
    first = tl.load(chunks.start + c).to(tl.int64)
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, C.K)
    inside = i < tl.load(chunks.count + c)
    a_log, bias = head_weights(weights, hv, 0, C)
    g_at = head_ptr(inputs.g, hv) + (first + i) * inputs.g.token_stride
    g = log_decay(tl.load(g_at, mask=inside, other=0.0), a_log, bias, numbers.lower_bound, C)
    g = tl.where(inside, g, 0.0)
    G, until, between = decays(g, i, inputs.k.ptr.dtype.element_ty == tl.float32)
    b_at = head_ptr(inputs.beta, hv) + (first + i) * inputs.beta.token_stride
    beta = update_rate(tl.load(b_at, mask=inside, other=0.0), C)
    beta = tl.sum(tl.where(inside, beta, 0.0)[:, None], 1)  # else computed again in each layout
    k = load_rows(inputs.k, first, i, hv // C.GROUP, d, inside)
    q = load_rows(inputs.q, first, i, hv // C.GROUP, d, inside)
    kk, k_norm = products_and_norms(k, k, numbers.eps, BY_PRODUCT, C)
    qk, q_norm = products_and_norms(q, k, numbers.eps, BY_PRODUCT, C)
    q_norm *= numbers.scale
    f_at = work.factors + at * (3 * CHUNK) + i
    tl.store(f_at, tl.exp(G) * k_norm)
    tl.store(f_at + CHUNK, tl.exp(G) * q_norm)
    tl.store(f_at + 2 * CHUNK, tl.exp(until) * k_norm)
    tl.store(work.decay + at, tl.exp(tl.sum(g, 0)))
    decay = tl.exp2(between * LOG2_E) * k_norm[None, :]  # tl.exp takes care of denormals
    P = qk * decay * q_norm[:, None]
    L = tl.where(i[:, None] > i[None, :], kk * decay * (k_norm * beta)[:, None], 0.0)
    store_solved(work, at, L, P, beta, i, k.dtype, C)
