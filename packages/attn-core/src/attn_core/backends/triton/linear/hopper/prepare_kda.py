"""Prefill, first kernel, with a decay per key channel, for Hopper: what prepare_kda does, in Gluon.

A warp has the tokens of one block of 16, 32 channels at a time, and a thread 8 of them in two
channels, so that sums of log decays stay within the warp. A pair within half of a block is factored
at the middle of this half, a pair across the halves at the middle of the right one. No token's
log decay counts there as more than REACH / 4: a decay of less than 2^-28 becomes 2^-28.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from attn_core.backends.triton.linear.gates import (
    head_ptr,
    head_weights,
    log_decay,
    update_rate,
)
from attn_core.backends.triton.linear.hopper.solve import (
    CHUNK,
    LOG2_E,
    VECTOR,
    A,
    B,
    barrier,
    inverse_of_blocks,
    norms_of,
    on_diagonal,
    solve,
    store_solved,
    sums,
)  # fmt: skip

WIDTH = gl.constexpr(32)  # channels at a time
REACH = gl.constexpr(115.0)  # exp2(115) is far from the largest bfloat16
# of a chunk's tokens in 32 channels; of its blocks of 16, all of them in each warp
T = gl.constexpr(gl.BlockedLayout([8, 2], [2, 16], [4, 1], [1, 0]))
V = gl.constexpr(gl.BlockedLayout([4, 1], [1, 32], [1, 4], [1, 0]))
F = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))


@gluon.jit
def copy_rows(tile, x, first, head, count, C: gl.constexpr):
    """Begin to copy one head of a chunk's tokens, 32 channels a tile; other rows are zero."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, L))
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    at = head_ptr(x, head) + first * x.token_stride
    at += i[:, None] * x.token_stride + d[None, :]
    inside = (i < count)[:, None] & (d >= 0)[None, :]
    for part in gl.static_range(C.K // WIDTH):
        async_copy.async_copy_global_to_shared(tile.index(part), at + part * WIDTH, mask=inside)


@gluon.jit
def row_norms(tile, eps, C: gl.constexpr):
    """Return what normalises each token of a tile [K / 32, 64, 32]."""
    squares = gl.zeros([CHUNK, CHUNK], gl.float32, A)
    for part in gl.static_range(C.K // WIDTH):
        x = tile.index(part)
        squares = hopper.warpgroup_mma(x, x.permute((1, 0)), squares, is_async=True)
    squares = hopper.warpgroup_mma_wait(0, deps=[squares])
    return gl.convert_layout(norms_of(squares, eps, C.NORM), gl.SliceLayout(1, T))


@gluon.jit
def blocks_of(x):
    """Return [64, 32] as [4, 16, 32]."""
    return gl.reshape(x, (4, 16, WIDTH))


@gluon.jit
def scaled(x, factor):
    """Return x [64, 32] times a factor [4, 32] of each block."""
    x = blocks_of(x)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout), assert_trivial=True)
    return gl.reshape(x * gl.expand_dims(factor, 1), (CHUNK, WIDTH))


@gluon.jit
def blockwise(row, column, acc):
    """Return acc + the products [4, 16, 16] of the tokens of each block."""
    row = gl.convert_layout(blocks_of(row), gl.DotOperandLayout(0, B, 2))
    column = gl.convert_layout(
        gl.permute(blocks_of(column), (0, 2, 1)), gl.DotOperandLayout(1, B, 2)
    )
    return mma_v2(row, column, acc)


@gluon.jit
def even_first(x):
    """Return [64, 32] with its even blocks of 16 tokens before the odd ones."""
    return gl.reshape(gl.permute(gl.reshape(x, (2, 2, 16, WIDTH)), (1, 0, 2, 3)), (CHUNK, WIDTH))


@gluon.jit
def twice(x):
    """Return x [64, 32] beside itself."""
    x = gl.reshape(gl.permute(gl.join(x, x), (0, 2, 1)), (CHUNK, CHUNK))
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def merged(adjacent, far):
    """Return [64, 64] of the pairs of adjacent blocks of a half, and of the two halves.

    adjacent: its columns are those of the even blocks. far: of the first half.
    """
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, A))[:, None] // 16
    j = gl.arange(0, CHUNK, gl.SliceLayout(0, A))[None, :] // 16
    left, right = gl.split(gl.permute(gl.reshape(adjacent, (CHUNK, 2, 16)), (0, 2, 1)))
    beside = gl.join(gl.join(left, left), gl.join(right, right))  # 64, 16, copy, block
    beside = gl.reshape(gl.permute(beside, (0, 3, 2, 1)), (CHUNK, CHUNK))
    beside = gl.convert_layout(beside, A, assert_trivial=True)
    beside = beside * gl.where((i == j + 1) & (i % 2 == 1), 1.0, 0.0)
    return beside + twice(far) * gl.where((i >= 2) & (j < 2), 1.0, 0.0)


@gluon.jit
def prepare_kda_hopper(inputs, weights, numbers, chunks, work, C: gl.constexpr):
    """Prepare a chunk for one value head. Grid: (chunks · HV)."""
    c = gl.program_id(0) // C.HV
    hv = gl.program_id(0) % C.HV
    h = hv // C.GROUP
    at = gl.program_id(0).to(gl.int64)
    first = gl.load(chunks.start + c).to(gl.int64)
    count = gl.load(chunks.count + c)
    dtype: gl.constexpr = inputs.k.ptr.dtype.element_ty
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, WIDTH], dtype)
    H: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], gl.float16)
    k_tile = gl.allocate_shared_memory(dtype, [C.K // WIDTH, CHUNK, WIDTH], L)
    q_tile = gl.allocate_shared_memory(dtype, [C.K // WIDTH, CHUNK, WIDTH], L)
    copy_rows(k_tile, inputs.k, first, h, count, C)
    copy_rows(q_tile, inputs.q, first, h, count, C)
    async_copy.commit_group()

    S: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    R: gl.constexpr = gl.SliceLayout(1, T)
    s = gl.arange(0, CHUNK, S)
    beta = gl.load(
        head_ptr(inputs.beta, hv) + (first + s) * inputs.beta.token_stride,
        mask=s < count, other=0.0,
    )  # fmt: skip
    beta = gl.where(s < count, update_rate(beta, C), 0.0)
    r = gl.arange(0, CHUNK, R)
    n = gl.arange(0, WIDTH, gl.SliceLayout(0, T))
    inside = (r < count)[:, None] & (n >= 0)[None, :]
    block = gl.arange(0, 4, gl.SliceLayout(1, V))[:, None]
    e = gl.arange(0, WIDTH, gl.SliceLayout(0, V))

    async_copy.wait_group(0)
    hopper.fence_async_shared()
    barrier()
    k_norm = gl.full([CHUNK], 1.0, gl.float32, R)
    q_norm = k_norm * numbers.scale
    if C.NORM:
        k_norm *= row_norms(k_tile, numbers.eps, C)
        q_norm *= row_norms(q_tile, numbers.eps, C)

    k_rows = gl.allocate_shared_memory(dtype, [2, CHUNK, WIDTH], L)
    q_rows = gl.allocate_shared_memory(dtype, [2, CHUNK, WIDTH], L)
    columns = gl.allocate_shared_memory(dtype, [2, CHUNK, WIDTH], L)
    L_adjacent = gl.zeros([CHUNK, 32], gl.float32, F)
    P_adjacent = L_adjacent
    L_far = L_adjacent
    P_far = L_adjacent
    exchange = gl.allocate_shared_memory(
        gl.float32, [4, 4, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    g_at = head_ptr(inputs.g, hv) + (first + r)[:, None] * inputs.g.token_stride
    g_next = gl.load(g_at + n[None, :], mask=inside, other=0.0)
    L_near = gl.zeros([4, 16, 16], gl.float32, B)
    P_near = L_near
    L_half = L_near
    P_half = L_near
    for part in range(C.K // WIDTH):
        d = part * WIDTH + n
        a_log, bias = head_weights(weights, hv, d[None, :], C)
        g = g_next
        following = gl.minimum(d + WIDTH, C.K - WIDTH + n)
        g_next = gl.load(g_at + following[None, :], mask=inside, other=0.0)
        g = log_decay(g, a_log, bias, numbers.lower_bound, C) * LOG2_E
        g = blocks_of(gl.where(inside, g, 0.0))
        T3: gl.constexpr = g.type.layout
        since_start = gl.associative_scan(g, 1, sums)  # of the block
        own = gl.sum(g, 1)
        near = gl.maximum(g, -REACH / 4)
        t = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, T3)))[None, :, None]
        left = gl.expand_dims(gl.sum(gl.where(t < 4, near, 0.0), 1), 1)
        right = gl.expand_dims(gl.sum(gl.where(t < 12, near, 0.0), 1), 1)
        near = gl.associative_scan(near, 1, sums) - gl.where(t < 8, left, right)
        to_right = gl.reshape((right - left) - near, (CHUNK, WIDTH))
        near = gl.reshape(near, (CHUNK, WIDTH))
        until_end = gl.reshape(gl.expand_dims(own, 1) - since_start, (CHUNK, WIDTH))
        since_start = gl.reshape(since_start, (CHUNK, WIDTH))

        sizes = gl.convert_layout(own, V)
        total = gl.sum(sizes, 0)
        before = gl.associative_scan(sizes, 0, sums) - sizes
        gl.store(work.decay + at * C.K + part * WIDTH + e, gl.exp2(total))
        second = gl.sum(gl.where(block == 1, sizes, 0.0), 0)[None, :]
        third = gl.sum(gl.where(block == 2, sizes, 0.0), 0)[None, :]
        BLOCK: gl.constexpr = gl.SliceLayout(1, T3)
        exchange.index(0).store(gl.exp2(before))
        exchange.index(1).store(gl.exp2(gl.minimum(total[None, :] - before - sizes, 0.0)))
        exchange.index(2).store(gl.exp2(gl.where(block == 3, third, 0.0)))
        exchange.index(3).store(gl.exp2(gl.where(block == 0, second, 0.0)))
        barrier()
        since = exchange.index(0).load(BLOCK)
        until = exchange.index(1).load(BLOCK)
        after = exchange.index(2).load(BLOCK)
        ahead = exchange.index(3).load(BLOCK)

        rows = at * (CHUNK * C.K) + r[:, None] * C.K + d[None, :]
        stored: gl.constexpr = work.k_in.dtype.element_ty
        decay = gl.exp2(since_start)
        k = k_tile.index(part).load(T).to(gl.float32) * k_norm[:, None]
        row = k * decay
        gl.store(work.k_in + rows, scaled(row, since).to(stored))
        k_rows.index(0).store(row.to(dtype))
        k_rows.index(1).store(scaled(row, after).to(dtype))
        column = k * gl.exp2(until_end)
        gl.store(work.k_out + rows, scaled(column, until).to(stored))
        columns.index(0).store(even_first(column.to(dtype)))
        columns.index(1).store(scaled(column, ahead).to(dtype))
        q = q_tile.index(part).load(T).to(gl.float32) * q_norm[:, None]
        row = q * decay
        gl.store(work.q_in + rows, scaled(row, since).to(stored))
        q_rows.index(0).store(row.to(dtype))
        q_rows.index(1).store(scaled(row, after).to(dtype))
        hopper.fence_async_shared()
        barrier()
        beside = columns.index(0).slice(0, 32, dim=0).permute((1, 0))
        across = columns.index(1).slice(0, 32, dim=0).permute((1, 0))
        L_adjacent = hopper.warpgroup_mma(k_rows.index(0), beside, L_adjacent, is_async=True)
        P_adjacent = hopper.warpgroup_mma(q_rows.index(0), beside, P_adjacent, is_async=True)
        L_far = hopper.warpgroup_mma(k_rows.index(1), across, L_far, is_async=True)
        P_far = hopper.warpgroup_mma(q_rows.index(1), across, P_far, is_async=True)
        decay = gl.exp2(near)
        k_row = (k * decay).to(dtype)
        q_row = (q * decay).to(dtype)
        column = (k * gl.exp2(-near)).to(dtype)
        L_near = blockwise(k_row, column, L_near)
        P_near = blockwise(q_row, column, P_near)
        column = (k * gl.exp2(to_right)).to(dtype)
        L_half = blockwise(k_row, column, L_half)
        P_half = blockwise(q_row, column, P_half)
        L_adjacent, P_adjacent, L_far, P_far = hopper.warpgroup_mma_wait(
            0, deps=[L_adjacent, P_adjacent, L_far, P_far]
        )

    barrier()  # from here on, no warp's products read the rows: what follows may take their place
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    same_half = (i < 8) == (j < 8)
    P_near = gl.where(same_half, P_near, P_half)
    L_near = gl.where(i > j, gl.where(same_half, L_near, L_half), 0.0)
    L_near = L_near + gl.convert_layout(gl.permute(L_near, (0, 2, 1)), B)
    P = merged(P_adjacent, P_far) + on_diagonal(gl.where(i >= j, P_near, 0.0))
    P = P.to(gl.float16)
    L_off = merged(L_adjacent, L_far)
    tiles = gl.allocate_shared_memory(gl.float16, [4, CHUNK, CHUNK], H)
    row = -gl.convert_layout(beta, gl.SliceLayout(1, A))
    tiles.index(0).store((L_off * row[:, None]).to(gl.float16))
    one = gl.full([CHUNK], 1.0, gl.float32, gl.SliceLayout(1, A))
    betas = gl.allocate_shared_memory(gl.float32, [CHUNK], VECTOR)
    below, first, second = tiles.index(0), tiles.index(1), tiles.index(2)
    betas.store(beta)
    D = inverse_of_blocks(L_near, one, betas, gl.float16)
    store_solved(work, at, solve(D, betas, below, first, second), P, tiles.index(3))
