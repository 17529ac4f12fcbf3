"""Invert the unit lower triangular matrix of a chunk, on Hopper.

A warp keeps 16 rows of a matrix [64, 64], and inverts their diagonal block without a word to the
others: a product takes its second factor transposed, which the warp has beside the factor itself.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name in Triton 3.6
CHUNK = gl.constexpr(64)
LOG2_E = gl.constexpr(1.4426950408889634)
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # of [64] in shared memory
# of [64, 64] as a product of four warps leaves it, and of four blocks [16, 16]
A = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
B = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))


@gluon.jit
def sums(a, b):
    """Add."""
    return a + b


@gluon.jit
def halves(x):
    """Return the left and the right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def columns_of(x):
    """Return four times 16 columns."""
    left, right = halves(x)
    first, second = halves(left)
    third, fourth = halves(right)
    return first, second, third, fourth


@gluon.jit
def one_if(inside):
    """Return 1 where it is so, and 0 elsewhere."""
    return gl.where(inside, 1.0, 0.0)


@gluon.jit
def diagonal_blocks(x):
    """Return the four blocks [16, 16] on the diagonal of [64, 64]: each lies in one warp."""
    left, right = halves(x)
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, left.type.layout))[:, None]
    x = gl.where(i < 32, left, right)
    left, right = halves(x)
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, left.type.layout))[:, None]
    x = gl.where(i % 32 < 16, left, right)
    return gl.convert_layout(gl.reshape(x, (4, 16, 16)), B, assert_trivial=True)


@gluon.jit
def on_diagonal(x):
    """Return [64, 64] with four blocks [16, 16] on its diagonal, and zeros elsewhere."""
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, A))[:, None]
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, A))[None, :]
    same = gl.reshape((i // 16) == (j // 16), (4, 16, 4, 16))
    x = gl.convert_layout(x, gl.SliceLayout(2, same.type.layout), assert_trivial=True)
    x = gl.expand_dims(x, 2) * one_if(same)  # a warp's own factors: predicates are few
    return gl.convert_layout(gl.reshape(x, (CHUNK, CHUNK)), A, assert_trivial=True)


@gluon.jit
def times(a, b_transposed, acc, DTYPE: gl.constexpr):
    """Return acc + a · b of four blocks [16, 16], all in registers."""
    b = gl.permute(b_transposed.to(DTYPE), (0, 2, 1))
    a = gl.convert_layout(a.to(DTYPE), gl.DotOperandLayout(0, B, 2))
    b = gl.convert_layout(b, gl.DotOperandLayout(1, B, 2))
    return mma_v2(a, b, acc)


@gluon.jit
def between(row, column, SIZE: gl.constexpr):
    """Say what lies left of the second block of SIZE of each pair and below the first."""
    own = row // SIZE
    return (own == column // SIZE + 1) & (own % 2 == 1)


@gluon.jit
def decays(G_row, G_column):
    """Return the decay between a chunk's rows and columns, [64, 64], of log decays to base 2.

    A log decay is at most 0, so exp of a negative magnitude is right below the diagonal; above it
    no number is used, but none overflows. To multiply by -1 costs nothing, to negate an addition.
    """
    return gl.exp2(gl.abs(G_row[:, None] - G_column[None, :]) * -1.0)


@gluon.jit
def inverse_of_blocks(N, norm, beta, DTYPE: gl.constexpr):
    """Return the inverses of four blocks of I + beta · norm · N below the diagonal, as [64, 64].

    norm · N [4, 16, 16] is symmetric. norm [64], and beta in shared memory: of the rows.
    """
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    c = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    norm = gl.convert_layout(gl.reshape(norm, (4, 16)), gl.SliceLayout(2, B))
    beta = beta._reinterpret(gl.float32, [4, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    row, column = beta.load(gl.SliceLayout(2, B)), beta.load(gl.SliceLayout(1, B))
    N = (
        N
        * gl.expand_dims(norm * -1.0, 2)
        * gl.where(r > c, gl.expand_dims(row, 2), gl.expand_dims(column, 1))
    )
    zero = gl.zeros([4, 16, 16], gl.float32, B)
    X = gl.where(r == c, 1.0, gl.where(between(r, c, 1), N, 0.0))
    Y = gl.where(r == c, 1.0, gl.where(between(c, r, 1), N, 0.0))
    for level in gl.static_range(1, 4):
        U = times(X, gl.where(between(c, r, 2**level), N, 0.0), zero, DTYPE)
        X_next = times(U, Y, X, DTYPE)
        if level < 3:
            Y = times(Y, U, Y, DTYPE)
        X = X_next
    return on_diagonal(X)


@gluon.jit
def product(a, tile, acc):
    """Return acc + a · tile: a in registers, [64, 64] of 16 bits in shared memory."""
    a = gl.convert_layout(a.to(tile.dtype), gl.DotOperandLayout(0, A, 2))
    acc = hopper.warpgroup_mma(a, tile, acc, is_async=True)
    acc, _ = hopper.warpgroup_mma_wait(0, deps=[acc, a])
    return acc


@gluon.jit
def sum_of_two(a, FIRST: gl.constexpr, b, SECOND: gl.constexpr, tile, acc):
    """Return acc + a · x + b · y, of a tile's four times 16 rows x the FIRST and y the SECOND."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    a = gl.convert_layout(a.to(tile.dtype), OPERAND, assert_trivial=True)
    b = gl.convert_layout(b.to(tile.dtype), OPERAND, assert_trivial=True)
    acc = hopper.warpgroup_mma(a, tile.slice(16 * FIRST, 16), acc, is_async=True)
    acc = hopper.warpgroup_mma(b, tile.slice(16 * SECOND, 16), acc, is_async=True)
    acc, _, _ = hopper.warpgroup_mma_wait(0, deps=[acc, a, b])
    return acc


@gluon.jit
def share(tile, x):
    """Store x where the products of all warps read it."""
    tile.store(x.to(tile.dtype))
    hopper.fence_async_shared()
    barrier()


@gluon.jit
def store_square(ptr, x):
    """Store [64, 64], 16 bytes a thread."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, L))
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, L))
    x = gl.convert_layout(x.to(ptr.dtype.element_ty), L)
    gl.store(ptr + i[:, None] * CHUNK + j[None, :], x)


@gluon.jit
def solve(D, beta, below, first, second):
    """Return T [64, 64] of a chunk and head, in float32.

    D: of inverse_of_blocks. In shared memory: beta [64], of the rows; below, -L, and in its
    diagonal blocks and above them anything finite; first and second, tiles to work with.
    Blocks of 16 are joined to 32, and these to 64: of D, the inverses of two neighbours, and L
    between them it is D - D · L · D. Of each product two blocks of columns are not zero.
    """
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, A)
    share(first, D)
    _, d1, _, d3 = columns_of(D)
    u0, _, u2, _ = columns_of(sum_of_two(d1, 1, d3, 3, below, zero))
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, u0.type.layout))[:, None] // 16
    D = sum_of_two(u0 * one_if(i == 1), 0, u2 * one_if(i == 3), 2, first, D)
    share(second, D)
    _, _, d2, d3 = columns_of(D)
    u0, u1, _, _ = columns_of(sum_of_two(d2, 2, d3, 3, below, zero))
    T = sum_of_two(u0, 0, u1, 1, second, D)
    return T * beta.load(gl.SliceLayout(0, A))[None, :]


@gluon.jit
def store_solved(work, at, T, P, tile):
    """Write T and P · T of a chunk and head. tile: where T is to be multiplied."""
    share(tile, T)
    ptr = work.T + at * (2 * CHUNK * CHUNK)
    store_square(ptr, T)
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, A)
    store_square(ptr + CHUNK * CHUNK, product(P, tile, zero))


@gluon.jit
def norms_of_rows(tile, eps, NORM: gl.constexpr):
    """Return what normalises each row of 128 in shared memory.

    Four threads sum up a row, and eight rows side by side are read without a bank conflict. A
    thread adds to eight sums in turn: to a single one, each square would wait for the one before.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [0, 1])
    norms = gl.full([tile.shape[0]], 1.0, gl.float32, gl.SliceLayout(1, L))
    if NORM:
        a, b, c, d = columns_of(tile.load(L).to(gl.float32))
        squares = gl.sum(a * a + b * b + c * c + d * d, 1)
        norms = gl.convert_layout(gl.rsqrt(squares + eps), gl.SliceLayout(1, L))
    return norms


@gluon.jit
def norms_of(squares, eps, NORM: gl.constexpr):
    """Return what normalises each row, of x · xᵀ."""
    R: gl.constexpr = gl.SliceLayout(1, A)
    if NORM:
        r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
        c = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
        own = gl.sum(gl.where(r == c, diagonal_blocks(squares), 0.0), 2)
        return gl.convert_layout(gl.reshape(gl.rsqrt(own + eps), (CHUNK,)), R)
    return gl.full([CHUNK], 1.0, gl.float32, R)
