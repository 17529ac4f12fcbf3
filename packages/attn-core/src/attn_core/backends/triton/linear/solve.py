"""Invert the unit lower triangular matrix of a chunk."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse(L, tokens: tl.constexpr, C: tl.constexpr):
    """Return (I + L)^-1 of L float32 [64, 64], which is 0 from its diagonal on.

    Blocks of the diagonal are joined to twice their size: of D, the inverses of two neighbours, and
    L between them it is D - D · L · D. A power series of L would cancel with keys near each other.
    Blocks of 2 need no product, and the four of 16 are computed at once.
    tokens: the dtype of keys. With 16 bits the factors are float16: it has the 11 bits of tf32, and
    with normalised keys no factor is above 2.
    """
    r = tl.arange(0, 16)
    i = tl.arange(0, 64)
    same = (i[:, None] // 16) == (i[None, :] // 16)
    A = tl.sum(tl.reshape(tl.where(same, L, 0.0), (4, 16, 4, 16)), 2)
    X = tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, 0.0)
    X -= tl.where(_between(r, 1)[None, :, :], A, 0.0)
    for level in tl.static_range(1, 4):
        between = tl.where(_between(r, 2**level)[None, :, :], A, 0.0)
        X = _joined(X, between, tokens, C)
    D = tl.reshape(tl.broadcast_to(X[:, :, None, :], (4, 16, 4, 16)), (64, 64))
    D = tl.where(same, D, 0.0)
    for level in tl.static_range(4, 6):
        D = _joined(D, tl.where(_between(i, 2**level), L, 0.0), tokens, C)
    return D


@triton.jit
def inverse_of_drafts(L, tokens: tl.constexpr, C: tl.constexpr):
    """Return (I + L)^-1 of L float32 [n, n], n a power of two from 16 on, as `inverse` does."""
    i = tl.arange(0, L.shape[0])
    X = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - tl.where(_between(i, 1), L, 0.0)
    for size in tl.static_range(1, 16):
        if 2**size < L.shape[0]:
            X = _joined(X, tl.where(_between(i, 2**size), L, 0.0), tokens, C)
    return X


@triton.jit
def _between(i, SIZE: tl.constexpr):
    """Say of [n, n] what lies left of the second block of SIZE of each pair and below the first."""
    own, other = i[:, None] // SIZE, i[None, :] // SIZE
    return (own == other + 1) & (own % 2 == 1)


@triton.jit
def _joined(D, between, tokens: tl.constexpr, C: tl.constexpr):
    """Return D - D · between · D."""
    return D - multiplied(multiplied(D, between, tokens, C), D, tokens, C)


@triton.jit
def multiplied(a, b, tokens: tl.constexpr, C: tl.constexpr):
    """Return a · b in float32, from factors of the dtype that `inverse` names."""
    factor: tl.constexpr = tokens if tokens == tl.float32 else tl.float16
    return tl.dot(a.to(factor), b.to(factor), input_precision=C.PRECISION)
