"""Prefill, first kernel, with a decay per key channel: products are Σ_d k_id k_jd exp(G_id - G_jd).

exp(G_i) · exp(-G_j) would overflow. A product is factored at a token r between j and i instead:
exp(G_i - G_r) · exp(G_r - G_j), neither above 1. The chunk is halved until j and i are apart: r is
the last token of the half that j is in. Halves of 32 and of 16 tokens are multiplied as [64, 64],
those of 8, 4, 2 and 1 in blocks of 16.

Tokens of bfloat16 are halved no more than down to 8: there r is in the middle, and a factor can be
above 1. No token's log decay counts there as more than REACH / 4, so that no factor is above
exp(REACH). A pair that is farther apart gets at most exp(-REACH / 4), 2e-9, in place of less, which
bfloat16 does not see, even of a value that is thousands of times larger than the others.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.linear.gates import (
    head_ptr,
    head_weights,
    log_decay,
    update_rate,
)
from attn_core.backends.triton.linear.prepare import CHUNK, LOG2_E, load_rows, norms, store_solved

REACH = tl.constexpr(80.0)  # exp(80) is far from the largest float32, and bfloat16


@triton.jit
def power(x):
    """Return exp(x), without the care that tl.exp takes of denormals."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def in_blocks(x):
    """Return [64, D] as [4, 16, D]."""
    return tl.reshape(x, (4, 16, x.shape[1]))


@triton.jit
def flat(x, dtype: tl.constexpr):
    """Return blocks [4, 16, D] as [64, D] of a dtype."""
    return tl.reshape(x, (CHUNK, x.shape[2])).to(dtype)


@triton.jit
def apart(row, after, left, ahead, i, dtype: tl.constexpr, C: tl.constexpr):
    """Return the products [64, 64] of rows with tokens of other blocks of 16."""
    near = tl.dot(flat(row, dtype), tl.trans(left), input_precision=C.PRECISION)
    far = tl.dot(flat(row * after, dtype), tl.trans(ahead), input_precision=C.PRECISION)
    return tl.where((i[:, None] // 32) == (i[None, :] // 32), near, far)


@triton.jit
def sums_after(g):
    """Return the sum of log decays [B, N, D] after each token, among its N."""
    return tl.cumsum(g, 1, reverse=True) - g


@triton.jit
def halved(q, k, g, c, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Return q and k of second halves of SIZE tokens, k of first ones, each with its decay.

    q, k, g, c: [4, 16, D]; g are log decays, c their sums since a block's start. The rest is 0. Of
    float32 each half is summed by itself: after strong forgetting, differences of the block's sums
    are off by 1e-4, which tokens of 16 bits do not show.
    """
    pairs: tl.constexpr = 32 // SIZE
    at = tl.arange(0, 2 * SIZE)[None, :, None]
    dims: tl.constexpr = (pairs, 2 * SIZE, g.shape[2])
    if dtype == tl.float32:
        halves = tl.reshape(g, (2 * pairs, SIZE, g.shape[2]))
        since = tl.reshape(tl.cumsum(halves, 1), dims)
        until = tl.reshape(sums_after(halves), dims)
    else:
        own = tl.reshape(c, dims)
        last = tl.sum(tl.where(at == SIZE - 1, own, 0.0), 1)[:, None, :]
        since = own - last
        until = last - own
    decay = power(tl.where(at < SIZE, until, since))
    second = tl.where(at < SIZE, 0.0, decay)
    first = tl.reshape(tl.reshape(k, dims) * (decay - second), g.shape)
    second = tl.reshape(second, g.shape)
    return q * second, k * second, first


@triton.jit
def within_exactly(q, k, g, c, dtype: tl.constexpr, C: tl.constexpr):
    """Do what `within` does, for any tokens: no factor is above 1, so none is rounded more."""
    r = tl.arange(0, 16)
    L = tl.zeros([4, 16, 16], tl.float32)
    columns = tl.permute(k.to(dtype), (0, 2, 1))
    P = tl.dot(q.to(dtype), columns, input_precision=C.PRECISION)
    P = tl.where((r[:, None] == r[None, :])[None, :, :], P, 0.0)
    for level in tl.static_range(4):
        q_row, k_row, column = halved(q, k, g, c, 2**level, dtype)
        column = tl.permute(column.to(dtype), (0, 2, 1))
        same = (r[:, None] // 2 ** (level + 1)) == (r[None, :] // 2 ** (level + 1))
        products = tl.dot(k_row.to(dtype), column, input_precision=C.PRECISION)
        L += tl.where(same[None, :, :], products, 0.0)
        products = tl.dot(q_row.to(dtype), column, input_precision=C.PRECISION)
        P += tl.where(same[None, :, :], products, 0.0)
    return L, P


@triton.jit
def within(q, k, g, dtype: tl.constexpr, C: tl.constexpr):
    """Return the products [4, 16, 16] of k with k and of q with k, of the pairs of each block.

    g [4, 16, D]: log decays. For tokens of bfloat16. Above the diagonal there is any number.
    """
    r = tl.arange(0, 16)
    at = r[None, :, None]
    g = tl.maximum(g, -REACH / 4)
    first = tl.sum(tl.where(at < 4, g, 0.0), 1)[:, None, :]  # up to the middle of the first half
    half = tl.sum(tl.where(at < 8, g, 0.0), 1)[:, None, :]
    second = tl.sum(tl.where(at < 12, g, 0.0), 1)[:, None, :]
    near = tl.cumsum(g, 1) - tl.where(at < 8, first, second)
    column = k * power(-near)
    far_column = column * power(half - first)  # from a token to the end of the first half
    column = tl.permute(column.to(dtype), (0, 2, 1))
    far_column = tl.permute(far_column.to(dtype), (0, 2, 1))
    near = power(near)
    since = power(second - half)
    L = tl.dot((k * near).to(dtype), column, input_precision=C.PRECISION)
    far_L = tl.dot((k * near * since).to(dtype), far_column, input_precision=C.PRECISION)
    P = tl.dot((q * near).to(dtype), column, input_precision=C.PRECISION)
    far_P = tl.dot((q * near * since).to(dtype), far_column, input_precision=C.PRECISION)
    same = ((r[:, None] // 8) == (r[None, :] // 8))[None, :, :]
    return tl.where(same, L, far_L), tl.where(same, P, far_P)


@triton.jit
def on_diagonal(blocks, other, i):
    """Return [64, 64]: blocks [4, 16, 16] on the diagonal, what another matrix has elsewhere."""
    wide = tl.reshape(tl.broadcast_to(blocks[:, :, None, :], (4, 16, 4, 16)), (CHUNK, CHUNK))
    return tl.where((i[:, None] // 16) == (i[None, :] // 16), wide, other)


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
    dtype: tl.constexpr = inputs.k.ptr.dtype.element_ty
    stored: tl.constexpr = work.k_in.dtype.element_ty
    b = tl.arange(0, 4)[:, None]  # a chunk's blocks of 16; the last two are its second half
    k_norm = tl.full([CHUNK], 1.0, tl.float32)
    q_norm = k_norm * numbers.scale
    if C.NORM:
        every = tl.arange(0, C.K)
        k_norm *= norms(load_rows(inputs.k, first, i, h, every, inside), numbers.eps, True)
        q_norm *= norms(load_rows(inputs.q, first, i, h, every, inside), numbers.eps, True)
    L = tl.zeros([CHUNK, CHUNK], tl.float32)
    P = tl.zeros([CHUNK, CHUNK], tl.float32)
    near_L = tl.zeros([4, 16, 16], tl.float32)
    near_P = tl.zeros([4, 16, 16], tl.float32)
    for part in range(C.K // COLUMNS):
        d = part * COLUMNS + tl.arange(0, COLUMNS)
        rows = at * (CHUNK * C.K) + i[:, None] * C.K + d[None, :]
        a_log, bias = head_weights(weights, hv, d[None, :], C)
        g = load_rows(inputs.g, first, i, hv, d, inside)
        g = log_decay(g, a_log, bias, numbers.lower_bound, C)
        g = in_blocks(tl.where(inside[:, None], g, 0.0))
        c = tl.cumsum(g, 1)  # from a block's start
        block = tl.sum(g, 1)
        last = tl.sum(tl.where(b == 3, block, 0.0), 0)
        third = tl.sum(tl.where(b == 2, block, 0.0), 0)
        second = tl.sum(tl.where(b == 1, block, 0.0), 0)
        total = tl.sum(block, 0)
        before = tl.cumsum(block, 0) - block  # from the chunk's start to a block's
        tl.store(work.decay + at * C.K + d, power(total))

        k = load_rows(inputs.k, first, i, h, d, inside).to(tl.float32)
        k = in_blocks(k * k_norm[:, None])
        left = k * power(sums_after(g) if dtype == tl.float32 else block[:, None, :] - c)
        until = tl.where(b == 1, third + last, tl.where(b == 2, last, 0.0))
        until = power(tl.where(b == 0, second + (third + last), until))[:, None, :]
        tl.store(work.k_out + rows, flat(left * until, stored))
        ahead = tl.where(b == 0, second, tl.where(b == 1, 0.0, -float("inf")))
        ahead = flat(left * power(ahead)[:, None, :], dtype)
        left = flat(left, dtype)
        since = power(before)[:, None, :]
        after = tl.where(b == 3, third, tl.where(b == 2, 0.0, -float("inf")))
        after = power(after)[:, None, :]

        q = load_rows(inputs.q, first, i, h, d, inside).to(tl.float32)
        q = in_blocks(q * q_norm[:, None])
        k_row = k * power(c)
        tl.store(work.k_in + rows, flat(k_row * since, stored))
        L += apart(k_row, after, left, ahead, i, dtype, C)
        q_row = q * power(c)
        tl.store(work.q_in + rows, flat(q_row * since, stored))
        P += apart(q_row, after, left, ahead, i, dtype, C)
        if dtype == tl.bfloat16:
            near = within(q, k, g, dtype, C)
        else:
            near = within_exactly(q, k, g, c, dtype, C)
        near_L += near[0]
        near_P += near[1]
    L = on_diagonal(near_L, L, i)
    P = on_diagonal(near_P, P, i)
    P = tl.where(i[:, None] >= i[None, :], P, 0.0)
    b_at = head_ptr(inputs.beta, hv) + (first + i) * inputs.beta.token_stride
    beta = update_rate(tl.load(b_at, mask=inside, other=0.0), C)
    beta = tl.sum(tl.where(inside, beta, 0.0)[:, None], 1)  # else computed again in each layout
    L = tl.where(i[:, None] > i[None, :], L * beta[:, None], 0.0)
    store_solved(work, at, L, P, beta, i, dtype, C)
