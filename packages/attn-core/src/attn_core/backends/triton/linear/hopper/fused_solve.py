"""The part of the fused kernel that solves chunks, and the gates that it waits for."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from attn_core.backends.triton.linear.gates import (
    head_ptr,
    log_decay,
    update_rate,
)
from attn_core.backends.triton.linear.hopper.solve import (
    CHUNK,
    LOG2_E,
    A,
    barrier,
    diagonal_blocks,
    inverse_of_blocks,
    norms_of,
    solve,
    sums,
)  # fmt: skip

R = gl.constexpr(gl.SliceLayout(1, A))
N = gl.constexpr(gl.SliceLayout(0, A))
GATES = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # each warp has all 64 tokens


@gluon.jit
def raw_gates(inputs, first, hv, count):
    """Return g and beta [64] of a chunk as they are."""
    i = gl.arange(0, CHUNK, GATES)
    g = head_ptr(inputs.g, hv) + (first + i) * inputs.g.token_stride
    beta = head_ptr(inputs.beta, hv) + (first + i) * inputs.beta.token_stride
    return gl.load(g, mask=i < count, other=0.0), gl.load(beta, mask=i < count, other=0.0)


@gluon.jit
def keep_gates(gated, raw, head, numbers, left, j, C: gl.constexpr):
    """Leave the summed log decays of a chunk, to base 2, its rates, and its whole log decay."""
    channel, beta_lines, total_lines = gated
    g, beta = raw
    a_log, bias = head
    inside = gl.arange(0, CHUNK, GATES) < left
    g = gl.where(inside, log_decay(g, a_log, bias, numbers.lower_bound, C), 0.0)
    beta = gl.where(inside, update_rate(beta, C), 0.0)
    place = channel.stage(j)
    channel.tile.index(place).store(gl.associative_scan(g, 0, sums) * LOG2_E)
    beta_lines.index(place).store(beta)
    total_lines.index(place).store(gl.full([CHUNK], 1.0, gl.float32, GATES) * gl.sum(g, 0))
    channel.fill(j)


@gluon.jit
def zero_rows(tiles, stage, count):
    """Zero the rows from `count` on: they are another request's tokens, and may be NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    PART: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, CHUNK], tiles.dtype)
    parts = tiles._reinterpret(tiles.dtype, [tiles.shape[0] * 16, 8, CHUNK], PART)
    row = gl.arange(0, 8, gl.SliceLayout(1, L))
    for i in range(count // 8, 8):
        inside = (i * 8 + row < count)[:, None]
        for panel in gl.static_range(2):  # of 64 columns
            part = parts.index(stage * 16 + panel * 8 + i)
            part.store(gl.where(inside, part.load(L), 0.0).to(tiles.dtype))


@gluon.jit
def begin_chunk(keys, j, left):
    """Begin a chunk's product of its keys by themselves, as soon as they are there.

    left: tokens from the chunk on. Without one the product is of what was there, and of no use.
    """
    if left > 0:
        keys.wait_full(j)
        if left < CHUNK:
            zero_rows(keys.tile, keys.stage(j), left)
            hopper.fence_async_shared()
            barrier()
    k = keys.tile.index(keys.stage(j))
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, A)
    return hopper.warpgroup_mma(k, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def solve_chunks(given, C: gl.constexpr):
    """Leave T of each chunk, and what its keys, updates and queries are multiplied by.

    A line [64] is a buffer of its own: Triton waits between two stores to parts of one.
    """
    keys, values, solved, gated, half_tile, norm_line, factors, works, numbers, request = given
    into_lines, out_lines, kept_lines, log_lines, norm_lines = factors
    gates, beta_lines, total_lines = gated
    tokens, num_chunks = request[1], request[3]
    below, work = works.index(0), works.index(1)
    kk = begin_chunk(keys, 0, gl.minimum(tokens, num_chunks * CHUNK))
    for j in range(num_chunks):
        left = tokens - j * CHUNK
        gates.wait_full(j)
        known = gates.stage(j)
        G_row, G_column = gates.tile.index(known).load(R), gates.tile.index(known).load(N)
        beta_line = beta_lines.index(known)
        kk = hopper.warpgroup_mma_wait(0, deps=[kk])
        norm = norms_of(kk, numbers.eps, C.NORM)
        norm_line.store(norm)
        barrier()
        decay = gl.exp2(-gl.abs(G_row[:, None] - G_column[None, :]))
        Z = kk * (decay * norm_line.load(N)[None, :])
        blocks = diagonal_blocks(Z)
        below.store((Z * (norm * beta_line.load(R))[:, None]).to(gl.float16))
        D = inverse_of_blocks(blocks, norm, beta_line, gl.float16)
        solved.wait_free(j)
        place = solved.stage(j)
        total = total_lines.index(known).load(R)
        into_lines.index(place).store(gl.exp2(G_row) * norm)
        out_lines.index(place).store(gl.exp2(total * LOG2_E - G_row) * norm)
        log_lines.index(place).store(G_row)
        norm_lines.index(place).store(norm)
        kept_lines.index(place).store(gl.exp(total))
        half = half_tile.index(place)
        T = solve(D, beta_line, below, work, half)
        kk = begin_chunk(keys, j + 1, left - CHUNK)  # it runs while T is stored
        values.wait_full(j)  # of each chunk: who skips one takes an earlier one for it
        if left < CHUNK:
            zero_rows(values.tile, values.stage(j), left)
        barrier()  # all warps' products have read `half`
        half.store(T.to(gl.float16))
        solved.tile.index(place).store(T.to(solved.tile.dtype))
        hopper.fence_async_shared()
        solved.fill(j)
    hopper.warpgroup_mma_wait(0, deps=[kk])
