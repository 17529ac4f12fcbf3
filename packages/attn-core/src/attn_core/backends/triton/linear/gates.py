"""Device functions that the kernels of linear attention share: gates, norms, tiles of a state."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

NO_GATE = tl.constexpr(0)  # g is the log decay, and beta is used as it is
SOFTPLUS = tl.constexpr(1)
BOUNDED = tl.constexpr(2)
NOTHING_LEFT = tl.constexpr(-104.0)  # exp of it is 0 in float32, with its smallest numbers too
COARSE = tl.constexpr(1024.0)  # of a unit: 64 log decays of -104 at least add up without rounding
# The dimension of the rows of a tile, see channels. Triton hands the threads of a warp to the last
# dimension and then, up to 3.6, to the first, since to the second.
ROWS = tl.constexpr(0 if triton.__version__.startswith(("3.4.", "3.5.", "3.6.")) else 1)


@triton.jit
def head_ptr(x, head):
    """Return where a head of Rows begins: heads may lie 2^31 elements and more apart."""
    return x.ptr + head.to(tl.int64) * x.head_stride


@triton.jit
def log1p(x):
    """Return log(1 + x) of x in [0, 1], 2 artanh(x / (2 + x)) by its series.

    A GPU's own logarithm is off by 2^-22 near 1, which for a small x is much.
    """
    s = x / (2.0 + x)  # at most 1/3
    z = s * s
    series = 1 / 15
    for i in tl.static_range(7):
        series = series * z + 1 / (13 - 2 * i)
    return 2.0 * s * series


@triton.jit
def log_decay(x, a_log, bias, lower_bound, C: tl.constexpr):
    """Return the natural log of the decay, at most 0, of raw gates x and what fits their shape.

    softplus is written so that exp never overflows; above 20 it rounds to x. A decay that float32
    rounds to 0 is as good as any below: sums of smaller logs would not see the others, and
    differences of infinities are NaN.
    """
    g = x.to(tl.float32)
    if C.GATE == SOFTPLUS:
        y = g + bias
        g = -tl.exp(a_log) * (tl.maximum(y, 0.0) + log1p(tl.exp(-tl.abs(y))))
    if C.GATE == BOUNDED:
        y = tl.exp(a_log) * (g + bias)
        g = lower_bound / (1.0 + tl.exp(-y))
    return tl.where(g < NOTHING_LEFT, NOTHING_LEFT, g)  # and a NaN stays one


@triton.jit
def coarse_part(g):
    """Return log decays rounded down to parts of COARSE: sums of these are exact in float32.

    After strong forgetting, decays are small differences of large sums, which would be off by 1e-4.
    """
    return tl.floor(g * COARSE) / COARSE


@triton.jit
def update_rate(x, C: tl.constexpr):
    """Return beta of raw x."""
    beta = x.to(tl.float32)
    if C.GATE != NO_GATE:
        beta = 1.0 / (1.0 + tl.exp(-beta))
        if C.NEG_EIGVAL:
            beta = 2.0 * beta
    return beta


@triton.jit
def head_weights(weights, hv, d, C: tl.constexpr):
    """Return A_log and dt_bias of a value head as float32; d: key channels, of PER_CHANNEL."""
    a_log = 0.0
    bias = 0.0
    if C.GATE != NO_GATE:
        a_log = tl.load(weights.A_log + hv).to(tl.float32)
        if C.PER_CHANNEL:
            bias = tl.load(weights.dt_bias + hv * C.K + d).to(tl.float32)
        else:
            bias = tl.load(weights.dt_bias + hv).to(tl.float32)
    return a_log, bias


@triton.jit
def load_raw_gates(inputs, weights, token, hv, d, C: tl.constexpr):
    """Return what `gates_of` takes of one token: nothing waits for it yet."""
    a_log, bias = head_weights(weights, hv, d, C)
    at = head_ptr(inputs.g, hv) + token * inputs.g.token_stride
    x = tl.load(at + d) if C.PER_CHANNEL else tl.load(at)
    beta = tl.load(head_ptr(inputs.beta, hv) + token * inputs.beta.token_stride)
    return x, beta, a_log, bias


@triton.jit
def gates_of(raw, numbers, C: tl.constexpr):
    """Return one token's log decay, a number or of channels, and its beta."""
    x, beta, a_log, bias = raw
    return log_decay(x, a_log, bias, numbers.lower_bound, C), update_rate(beta, C)


@triton.jit
def load_gates(inputs, weights, numbers, token, hv, d, C: tl.constexpr):
    """Return the same, of channels `d`."""
    return gates_of(load_raw_gates(inputs, weights, token, hv, d, C), numbers, C)


@triton.jit
def head_norm(x, eps, NORM: tl.constexpr):
    """Return what normalises one head of q or k, a matrix of all its channels."""
    norm = 1.0
    if NORM:
        norm = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) + eps)
    return norm


@triton.jit
def load_raw_head(x, token, head, d):
    """Return one head of q or k as it is, of the shape of `d`, which names all its channels."""
    return tl.load(head_ptr(x, head) + token * x.token_stride + d)


@triton.jit
def normalised(row, eps, NORM: tl.constexpr):
    """Return one head of q or k as float32."""
    row = row.to(tl.float32)
    return row * head_norm(row, eps, NORM)


@triton.jit
def load_head(x, token, head, d, eps, NORM: tl.constexpr):
    """Return the same, of channels `d`."""
    return normalised(load_raw_head(x, token, head, d), eps, NORM)


@triton.jit
def channels(K: tl.constexpr, store: tl.constexpr):
    """Return the key channels 0..K as a matrix of 128 bytes of a state's dtype a row, or of one.

    A tile of a state has three dimensions: its rows, and these two, [K / 32, 32] of float32. Those
    of K / 32 are to stay within a thread: a sum over K then takes 3 steps between threads, not 5 as
    of a tile [rows, K], and a thread reads 16 bytes at a time.
    """
    MOST: tl.constexpr = 1024 // store.primitive_bitwidth
    COLUMNS: tl.constexpr = K if K < MOST else MOST  # Triton 3.5 takes min() for that of tensors
    return tl.arange(0, K // COLUMNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def over_rows(x):
    """Return a matrix of channels as a tile of one row."""
    return tl.expand_dims(x, ROWS)


@triton.jit
def over_channels(x):
    """Return numbers of rows as a tile of one channel."""
    if ROWS == 0:
        x = x[:, None, None]
    else:
        x = x[None, :, None]
    return x


@triton.jit
def over_k(x):
    """Return the sum over K of each row of a tile."""
    return tl.sum(tl.sum(x, 1 - ROWS), 1)
