"""Invert the unit lower triangular matrix of a chunk."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse(L, C: tl.constexpr):
    """Return (I + L)^-1 of L float32 [64, 64], which is 0 from its diagonal on.

    The four diagonal blocks of 16 are inverted at once by forward substitution, in float32: with
    keys near each other, a power series of L would cancel. Then blocks are joined to twice their
    size, twice: of D, the inverses of neighbours, and L between them it is D - D · L · D.
    """
    i = tl.arange(0, 64)
    r = tl.arange(0, 16)
    same = (i[:, None] // 16) == (i[None, :] // 16)
    halves = (i[:, None] // 32) == (i[None, :] // 32)
    X = -tl.sum(tl.reshape(tl.where(same, L, 0.0), (4, 16, 4, 16)), 2)
    for s in range(1, 16):
        at = (r == s)[None, :, None]
        row = tl.sum(tl.where(at, X, 0.0), 1)
        rate = tl.where((r < s)[None, :], row, 0.0)
        X = tl.where(at, (row + tl.sum(rate[:, :, None] * X, 1))[:, None, :], X)
    X += tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, 0.0)
    D = tl.reshape(tl.broadcast_to(X[:, :, None, :], (4, 16, 4, 16)), (64, 64))
    D = tl.where(same, D, 0.0)
    joint = tl.where(halves & (~same), L, 0.0)
    joint = tl.dot(D, joint, input_precision=C.PRECISION)
    D -= tl.dot(joint, D, input_precision=C.PRECISION)
    joint = tl.dot(D, tl.where(halves, 0.0, L), input_precision=C.PRECISION)
    return D - tl.dot(joint, D, input_precision=C.PRECISION)
