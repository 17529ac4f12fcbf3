"""The part of GDN's kernel for Hopper that solves chunks, and the gates that all parts wait for."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from attn_core.backends.triton.linear.gates import (
    head_ptr,
    head_weights,
    log_decay,
    update_rate,
)
from attn_core.backends.triton.linear.hopper.solve import (
    CHUNK,
    LOG2_E,
    A,
    barrier,
    decays,
    diagonal_blocks,
    inverse_of_blocks,
    norms_of,
    norms_of_rows,
    solve,
    sums,
)  # fmt: skip

R = gl.constexpr(gl.SliceLayout(1, A))
N = gl.constexpr(gl.SliceLayout(0, A))
AHEAD = gl.constexpr(4)  # chunks whose gates are computed at once, one a warp
GATES = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
TABLE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def keep_gates(gated, layer, own, turn, C: gl.constexpr):
    """Leave four chunks' summed log decays, to base 2, their rates, and their whole log decays.

    Behind a request its last token's gates are read, and none counts.
    """
    channel, betas, totals = gated
    inputs, weights, numbers = layer
    request, b, hv = own
    begin, tokens = request[0], request[1]
    c = gl.arange(0, AHEAD, gl.SliceLayout(1, GATES))[:, None]
    t = turn * (AHEAD * CHUNK) + c * CHUNK
    t = t + gl.arange(0, CHUNK, gl.SliceLayout(0, GATES))[None, :]
    i = gl.maximum(begin + gl.minimum(t, tokens - 1), 0).to(gl.int64)
    g = gl.load(head_ptr(inputs.g, hv) + i * inputs.g.token_stride)
    beta = gl.load(head_ptr(inputs.beta, hv) + i * inputs.beta.token_stride)
    a_log, bias = head_weights(weights, hv, 0, C)
    g = gl.where(t < tokens, log_decay(g, a_log, bias, numbers.lower_bound, C), 0.0)
    beta = gl.where(t < tokens, update_rate(beta, C), 0.0)
    place = turn % 2
    store_vectors(channel.tile, place, gl.associative_scan(g, 1, sums) * LOG2_E)
    store_vectors(betas, place, beta)
    one = gl.full([AHEAD, CHUNK], 1.0, gl.float32, GATES)
    store_vectors(totals, place, one * gl.sum(g, 1)[:, None])
    channel.fill(turn)


@gluon.jit
def store_vectors(vectors, place, x):
    """Store [4, 64] as four vectors."""
    vectors._reinterpret(gl.float32, [2, AHEAD, CHUNK], TABLE).index(place).store(x)


@gluon.jit
def keep_norms(q_norms, queries, j, numbers, TILE: gl.constexpr, C: gl.constexpr):
    """Leave what normalises and scales half the queries of chunk j.

    What stood in its place is done with: chunk j - 2 has been solved.
    """
    rows = queries.tile.index(queries.stage(j)).slice(TILE * 32, 32)
    norms = q_norms.tile.index(q_norms.stage(j)).slice(TILE * 32, 32)
    queries.wait_full(j)
    norms.store(norms_of_rows(rows, numbers.eps, C.NORM) * numbers.scale)
    q_norms.fill(j)


@gluon.jit
def zero_rows(tiles, stage, count, FIRST: gl.constexpr, END: gl.constexpr):
    """Zero the rows from `count` on: they are another request's tokens, and may be NaN.

    FIRST, END: of panels of 64 columns. Rows before `count` are stored too, as they are.
    """
    PANELS: gl.constexpr = tiles.shape[2] // CHUNK
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, CHUNK], tiles.dtype)
    parts = tiles._reinterpret(tiles.dtype, [tiles.shape[0] * PANELS * 8, 8, CHUNK], PART)
    row = gl.arange(0, 8, gl.SliceLayout(1, L))
    for i in range(count // 8, 8):
        inside = (i * 8 + row < count)[:, None]
        for panel in gl.static_range(FIRST, END):
            part = parts.index((stage * PANELS + panel) * 8 + i)
            part.store(gl.where(inside, part.load(L), 0.0).to(tiles.dtype))


@gluon.jit
def begin_chunk(keys, j, left):
    """Begin a chunk's product of its keys by themselves, as soon as they are there.

    left: tokens from the chunk on. Without one the product is of what was there, and of no use.
    """
    if left > 0:
        keys.wait_full(j)
        if left < CHUNK:
            zero_rows(keys.tile, keys.stage(j), left, 0, 2)
            hopper.fence_async_shared()
            barrier()
    k = keys.tile.index(keys.stage(j))
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, A)
    return hopper.warpgroup_mma(k, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def solve_chunks(operands, C: gl.constexpr):
    """Leave T and P of each chunk, and what its keys, queries and updates are multiplied by.

    A vector [64] or a tile is a buffer of its own: Triton waits between two stores to parts of one.
    """
    (
        keys, queries, q_norms, solved, P_tiles, gated, factors, k_norms, works, numbers, request,
    ) = operands  # fmt: skip
    gates, betas, totals = gated
    into_factors, query_factors, out_factors = factors
    dtype: gl.constexpr = keys.tile.dtype
    tokens, num_chunks = request[1], request[3]
    below, first, second = works
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, A)
    kk = begin_chunk(keys, 0, gl.minimum(tokens, num_chunks * CHUNK))
    for j in range(num_chunks):
        queries.wait_full(j)
        q = queries.tile.index(queries.stage(j))
        k_columns = keys.tile.index(keys.stage(j)).permute((1, 0))
        qk = hopper.warpgroup_mma(q, k_columns, zero, use_acc=False, is_async=True)
        q_norms.wait_full(j)
        gates.wait_full(j // AHEAD)
        known = j % (2 * AHEAD)
        G_row, G_column = gates.tile.index(known).load(R), gates.tile.index(known).load(N)
        beta = betas.index(known)
        kk, qk = hopper.warpgroup_mma_wait(0, deps=[kk, qk])
        norm = norms_of(kk, numbers.eps, C.NORM)
        k_norms.store(norm)
        solved.wait_free(j)
        place = solved.stage(j)
        barrier()
        decay = decays(G_row, G_column) * k_norms.load(N)[None, :]
        Z = kk * decay
        blocks = diagonal_blocks(Z)
        below.store((Z * (norm * -beta.load(R))[:, None]).to(gl.float16))
        r, n = gl.arange(0, CHUNK, R)[:, None], gl.arange(0, CHUNK, N)[None, :]
        q_norm = q_norms.tile.index(q_norms.stage(j)).load(R)
        P = gl.where(r >= n, qk, 0.0) * decay
        P_tiles.index(place).store((P * q_norm[:, None]).to(dtype))
        into = gl.exp2(G_row)
        into_factors.index(place).store(into * -norm)
        query_factors.index(place).store(into * q_norm)
        total = totals.index(known).load(R)
        out_factors.index(place).store(gl.exp2(total * LOG2_E - G_row) * norm)
        D = inverse_of_blocks(blocks, norm, beta, gl.float16)
        T = solve(D, beta, below, first, second)
        solved.tile.index(place).store(T.to(dtype))
        kk = begin_chunk(keys, j + 1, tokens - (j + 1) * CHUNK)  # T is stored meanwhile
        hopper.fence_async_shared()
        solved.fill(j)
    hopper.warpgroup_mma_wait(0, deps=[kk])
