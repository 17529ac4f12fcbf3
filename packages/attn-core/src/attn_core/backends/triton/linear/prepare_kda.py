"""Prefill, first kernel, with a decay per key channel: products are Σ_d k_id k_jd exp(G_id - G_jd).

exp(G_i) · exp(-G_j) would overflow. A product is factored at a token r between j and i instead:
exp(G_i - G_r) · exp(G_r - G_j), neither above 1. r is the end of the first half of the chunk for
tokens of different halves, and the end of a block of 16 for neighbouring blocks of a half. Within
a block no such token serves all pairs: there r is its start and the second factor grows, to
exp(80) at most; where a block decays further, each pair is computed by itself.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.linear.gates import BOUNDED, head_weights, log_decay, update_rate
from attn_core.backends.triton.linear.prepare import CHUNK, load_rows, norms, store_solved

FACTORED_DECAY = tl.constexpr(-80.0)  # exp(80) is far from the ends of float32 and bf16


@triton.jit
def in_blocks(x):
    """Return [64, D] as [4, 16, D]."""
    return tl.reshape(x, (4, 16, x.shape[1]))


@triton.jit
def flat(x, dtype: tl.constexpr):
    """Return blocks [4, 16, D] as [64, D] of a dtype."""
    return tl.reshape(x, (CHUNK, x.shape[2])).to(dtype)


@triton.jit
def pairs(row, after, left, ahead, inner, i, dtype: tl.constexpr, C: tl.constexpr):
    """Return the products [64, 64] of rows with tokens of their block, their half and the first."""
    x = flat(row, dtype)
    found = tl.dot(x, tl.trans(left), input_precision=C.PRECISION)
    own = tl.dot(x, tl.trans(inner), input_precision=C.PRECISION)
    found = tl.where((i[:, None] // 16) == (i[None, :] // 16), own, found)
    far = tl.dot(flat(row * after, dtype), tl.trans(ahead), input_precision=C.PRECISION)
    return tl.where((i[:, None] // 32) == (i[None, :] // 32), found, far)


@triton.jit
def exact_blocks(a, k, c):
    """Return Σ_d a_id k_jd exp(c_id - c_jd) of the pairs i >= j of each block, in [64, 64]."""
    r = tl.arange(0, 16)
    found = tl.zeros([4, 16, 16], tl.float32)
    for s in range(16):
        at = (r == s)[None, :, None]
        k_s = tl.sum(tl.where(at, k, 0.0), 1)
        c_s = tl.sum(tl.where(at, c, 0.0), 1)
        decay = tl.where((r >= s)[None, :, None], c - c_s[:, None, :], -float("inf"))
        column = tl.sum(a * k_s[:, None, :] * tl.exp(decay), 2)
        found = tl.where((r == s)[None, None, :], column[:, :, None], found)
    return tl.reshape(tl.broadcast_to(found[:, :, None, :], (4, 16, 4, 16)), (CHUNK, CHUNK))


@triton.jit
def prepare_kda(inputs, weights, numbers, chunks, work, COLUMNS: tl.constexpr, C: tl.constexpr):
    """Prepare a chunk for one value head, COLUMNS key channels at a time. Grid: (chunks · HV)."""
    chunk = tl.program_id(0) // C.HV
    hv = tl.program_id(0) % C.HV
    h = hv // C.GROUP
    at = tl.program_id(0).to(tl.int64)
    first = tl.load(chunks.start + chunk).to(tl.int64)
    i = tl.arange(0, CHUNK)
    inside = i < tl.load(chunks.count + chunk)
    raw: tl.constexpr = inputs.k.ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float32 if raw == tl.float16 else raw  # float16 ends below exp(80)
    stored: tl.constexpr = work.k_in.dtype.element_ty
    same = (i[:, None] // 16) == (i[None, :] // 16)
    second = (tl.arange(0, 4) >= 2)[:, None]  # blocks of the second half
    k_norm = tl.full([CHUNK], 1.0, tl.float32)
    q_norm = k_norm * numbers.scale
    if C.NORM:
        every = tl.arange(0, C.K)
        k_norm *= norms(load_rows(inputs.k, first, i, h, every, inside), numbers.eps, True)
        q_norm *= norms(load_rows(inputs.q, first, i, h, every, inside), numbers.eps, True)
    L = tl.zeros([CHUNK, CHUNK], tl.float32)
    P = tl.zeros([CHUNK, CHUNK], tl.float32)
    for part in range(C.K // COLUMNS):
        d = part * COLUMNS + tl.arange(0, COLUMNS)
        rows = at * (CHUNK * C.K) + i[:, None] * C.K + d[None, :]
        a_log, bias = head_weights(weights, hv, d[None, :], C)
        g = load_rows(inputs.g, first, i, hv, d, inside)
        g = log_decay(g, a_log, bias, numbers.lower_bound, C)
        g = in_blocks(tl.where(inside[:, None], g, 0.0))
        c = tl.cumsum(g, 1)  # from a block's start
        block = tl.sum(g, 1)
        half = tl.sum(tl.where(second, 0.0, block), 0)
        total = tl.sum(block, 0)
        before = tl.cumsum(block, 0) - block  # from the chunk's start to a block's
        tl.store(work.decay + at * C.K + d, tl.exp(total))

        k = load_rows(inputs.k, first, i, h, d, inside).to(tl.float32)
        k = in_blocks(k * k_norm[:, None])
        inner = flat(k * tl.exp(-c), dtype)  # inf or NaN where it is not used
        left = k * tl.exp(block[:, None, :] - c)
        until = tl.exp(tl.minimum(total[None, :] - before - block, 0.0))[:, None, :]
        tl.store(work.k_out + rows, flat(left * until, stored))
        ahead = tl.minimum(half[None, :] - before - block, 0.0)
        ahead = tl.exp(tl.where(second, -float("inf"), ahead))[:, None, :]
        ahead = flat(left * ahead, dtype)
        left = flat(left, dtype)
        since = tl.exp(before)[:, None, :]
        after = tl.where(second, tl.minimum(before - half[None, :], 0.0), -float("inf"))
        after = tl.exp(after)[:, None, :]

        q = load_rows(inputs.q, first, i, h, d, inside).to(tl.float32)
        q = in_blocks(q * q_norm[:, None])
        k_row = k * tl.exp(c)
        tl.store(work.k_in + rows, flat(k_row * since, stored))
        some_L = pairs(k_row, after, left, ahead, inner, i, dtype, C)
        q_row = q * tl.exp(c)
        tl.store(work.q_in + rows, flat(q_row * since, stored))
        some_P = pairs(q_row, after, left, ahead, inner, i, dtype, C)
        if C.GATE != BOUNDED:
            if tl.min(tl.min(block, 1), 0) < FACTORED_DECAY:
                some_L = tl.where(same, exact_blocks(k, k, c), some_L)
                some_P = tl.where(same, exact_blocks(q, k, c), some_P)
        L += some_L
        P += some_P
    P = tl.where(i[:, None] >= i[None, :], P, 0.0)
    b_at = inputs.beta.ptr + (first + i) * inputs.beta.token_stride + hv * inputs.beta.head_stride
    beta = update_rate(tl.load(b_at, mask=inside, other=0.0), C)
    beta = tl.sum(tl.where(inside, beta, 0.0)[:, None], 1)  # else computed again in each layout
    L = tl.where(i[:, None] > i[None, :], L * beta[:, None], 0.0)
    store_solved(work, at, L, P, beta, i, raw, C)
