"""GDN's prompts in one kernel for Hopper: one group of warps solves chunks, two carry the state.

What a chunk's state does not change is the first group's: T, P and what tokens are multiplied by.
It takes the longest, so what can be done elsewhere is. The others keep 64 rows of the state each in
registers, from where products read them, and normalise the queries of chunks that come.

A fourth group does not fit: one that carries needs 192 registers a thread for its products to
overlap, and one that solves 104.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attn_core.backends.triton.hopper.channel import init_barriers, new_channel
from attn_core.backends.triton.linear.hopper.fused_solve import (
    AHEAD,
    N,
    keep_gates,
    keep_norms,
    solve_chunks,
    zero_rows,
)
from attn_core.backends.triton.linear.hopper.scan import load_state, write_outputs
from attn_core.backends.triton.linear.hopper.solve import CHUNK, VECTOR, A, barrier

W = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
AX = gl.constexpr(gl.DotOperandLayout(0, A, 2))
WX = gl.constexpr(gl.DotOperandLayout(0, W, 2))


@gluon.jit
def copy(channel, x_map, j, begin, head):
    """Begin to copy one head of a chunk's tokens, also rows past the last one."""
    full = channel.full.index(channel.stage(j))
    mbarrier.expect(full, CHUNK * 128 * 2)
    tile = channel.tile.index(channel.stage(j))
    tma.async_copy_global_to_shared(x_map, [begin + j * CHUNK, head * 128], full, tile)


@gluon.jit
def keep_rows(states, slot, S, hv, TILE: gl.constexpr, C: gl.constexpr):
    """Write 64 rows of a state to a slot, if there is one.

    Columns are constants from a row's first, so that no addresses wait in registers from the first
    chunk to the last.
    """
    if slot >= 0:
        row = hv * C.V + TILE * 64 + gl.arange(0, 64, gl.SliceLayout(1, W))
        rows = states.ptr + slot.to(gl.int64) * states.slot_stride + (row * C.K)[:, None]
        columns = gl.arange(0, C.K, gl.SliceLayout(0, W))[None, :]
        gl.store(rows + columns, S.to(states.ptr.dtype.element_ty))


@gluon.jit
def begin_copies(tokens_of, maps, own, C: gl.constexpr):
    """Begin to copy the first chunks."""
    request, b, hv = own
    begin, num_chunks = request[0], request[3]
    keys, queries, values = tokens_of
    k_map, q_map, v_map = maps
    for i in gl.static_range(3):
        if i < num_chunks:
            copy(keys, k_map, i, begin, hv // C.GROUP)
            copy(queries, q_map, i, begin, hv // C.GROUP)
            if i < 2:
                copy(values, v_map, i, begin, hv)


@gluon.jit
def copy_ahead(tokens_of, solved, maps, own, j, C: gl.constexpr):
    """Begin to copy tokens in the place of those of chunk j - 1, as soon as all are done with."""
    request, b, hv = own
    keys, queries, values = tokens_of
    k_map, q_map, v_map = maps
    begin, num_chunks = request[0], request[3]
    if j + 3 < num_chunks:
        solved.wait_free(j + 1)
        copy(queries, q_map, j + 3, begin, hv // C.GROUP)
        copy(keys, k_map, j + 3, begin, hv // C.GROUP)
    if (j > 0) & (j + 1 < num_chunks):
        values.wait_free(j + 1)
        copy(values, v_map, j + 1, begin, hv)


@gluon.jit
def carry(carried, TILE: gl.constexpr, C: gl.constexpr):
    """Carry 64 rows of a state through a request's chunks, and write their outputs.

    TMA writes the outputs of a chunk from the place of its values while the next one begins. A last
    chunk of fewer tokens is written by threads: the rows behind them are another request's.
    """
    (
        tokens_of, q_norms, solved, P_tiles, gated, factors, maps, layer, out_map, out,
        states, slots, checkpoints, own,
    ) = carried  # fmt: skip
    keys, queries, values = tokens_of
    gates, betas, totals = gated
    into_factors, query_factors, out_factors = factors
    request, b, hv = own
    begin, tokens, first, num_chunks = request
    dtype: gl.constexpr = keys.tile.dtype
    PANEL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype)
    panels = values.tile._reinterpret(dtype, [2 * values.STAGES, CHUNK, CHUNK], PANEL)
    if TILE == 0:
        begin_copies(tokens_of, maps, own, C)
    else:
        keep_gates(gated, layer, own, 0, C)
    for i in gl.static_range(2):
        if i < num_chunks:
            keep_norms(q_norms, queries, i, layer[2], TILE, C)
    zero = gl.full([CHUNK, CHUNK], 0.0, gl.float32, A)
    row = TILE * 64 + gl.arange(0, 64, gl.SliceLayout(1, W))
    column = gl.arange(0, C.K, gl.SliceLayout(0, W))
    at = (hv * C.V + row)[:, None] * C.K + column[None, :]
    S = load_state(states, slots, b, at, C)
    if (num_chunks > 0) & (tokens < CHUNK):
        solved.wait_full(0)  # the rows of keys that are no tokens are zeros
    for j in range(num_chunks):
        place = solved.stage(j)
        state = gl.convert_layout(S.to(dtype), AX)
        keys.wait_full(j)
        k = keys.tile.index(keys.stage(j))
        sk = hopper.warpgroup_mma(state, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        queries.wait_full(j)
        q = queries.tile.index(queries.stage(j)).permute((1, 0))
        y = hopper.warpgroup_mma(state, q, zero, use_acc=False, is_async=True)
        if j > 0:
            tma.store_wait(0)
            values.release(j - 1)
        values.wait_full(j)
        left = tokens - j * CHUNK
        if left < CHUNK:
            zero_rows(values.tile, values.stage(j), left, TILE, TILE + 1)
        v = panels.index(2 * values.stage(j) + TILE)
        solved.wait_full(j)
        sk, y, _ = hopper.warpgroup_mma_wait(0, deps=[sk, y, state])
        x = v.permute((1, 0)).load(A)
        f_in = into_factors.index(place).load(N)
        x = gl.convert_layout((x.to(gl.float32) + sk * f_in[None, :]).to(dtype), AX)
        T = solved.tile.index(place).permute((1, 0))
        u = hopper.warpgroup_mma(x, T, zero, use_acc=False, is_async=True)
        if TILE == 0:
            copy_ahead(tokens_of, solved, maps, own, j, C)
        S = S * gl.exp(totals.index(j % (2 * AHEAD)).load(gl.SliceLayout(1, W)))[:, None]
        f_out = out_factors.index(place).load(N)
        y = y * query_factors.index(place).load(N)[None, :]
        u, _ = hopper.warpgroup_mma_wait(0, deps=[u, x])
        update = gl.convert_layout((u * f_out[None, :]).to(dtype), WX)
        S = hopper.warpgroup_mma(update, k, S, is_async=True)
        u = gl.convert_layout(u.to(dtype), AX)
        P = P_tiles.index(place).permute((1, 0))
        y = hopper.warpgroup_mma(u, P, y, is_async=True)
        if j % (2 * AHEAD) == 1 + AHEAD * TILE:
            keep_gates(gated, layer, own, j // AHEAD + 1, C)
        if j + 2 < num_chunks:
            keep_norms(q_norms, queries, j + 2, layer[2], TILE, C)
        S, y, _, _ = hopper.warpgroup_mma_wait(0, deps=[S, y, update, u])
        solved.release(j)  # and all warps have read the values, whose place the outputs take
        v.permute((1, 0)).store(y.to(dtype))
        hopper.fence_async_shared()
        barrier()
        if left >= CHUNK:
            tma.async_copy_shared_to_global(out_map, [begin + j * CHUNK, hv * 128 + TILE * 64], v)
        else:
            write_outputs(v, out, begin + j * CHUNK, hv, TILE, left)
        if C.CHECKPOINTS:
            keep_rows(states, gl.load(checkpoints + first + j), S, hv, TILE, C)
    if gl.load(slots.read + b) >= 0:
        keep_rows(states, gl.load(slots.write + b), S, hv, TILE, C)
    tma.store_wait(0)


@gluon.jit
def alloc_vectors(COUNT: gl.constexpr):
    """Allocate float32 [COUNT, 64]: a number for each token of COUNT chunks."""
    return gl.allocate_shared_memory(gl.float32, [COUNT, CHUNK], VECTOR)


@gluon.jit
def fused_gdn_hopper(
    k_map, q_map, v_map, out_map, inputs, weights, numbers, out, states, slots, checkpoints, chunks,
    C: gl.constexpr,
):  # fmt: skip
    """Run all chunks of a request and value head. Grid: (B · HV).

    k_map, q_map, v_map: tokens [T, H · D], 64 of one head at a time. out_map: of outputs alike, 64
    columns at a time.
    """
    hv = gl.program_id(0) % C.HV
    b = gl.load(chunks.order + gl.program_id(0) // C.HV)
    begin = gl.load(chunks.cu_seqlens + b)
    tokens = gl.load(chunks.cu_seqlens + b + 1) - begin
    num_chunks = gl.where(gl.load(slots.read + b) >= 0, (tokens + CHUNK - 1) // CHUNK, 0)
    request = (begin, tokens, gl.load(chunks.first + b), num_chunks)
    T: gl.constexpr = inputs.v.ptr.dtype.element_ty
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, 128], T)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], T)
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], gl.float16)
    keys = new_channel(gl.allocate_shared_memory(T, [4, CHUNK, 128], ROWS), 4)
    queries = new_channel(gl.allocate_shared_memory(T, [4, CHUNK, 128], ROWS), 4)
    values = new_channel(gl.allocate_shared_memory(T, [2, CHUNK, 128], ROWS), 2)
    solved = new_channel(gl.allocate_shared_memory(T, [2, CHUNK, CHUNK], SQUARE), 2)
    P_tiles = gl.allocate_shared_memory(T, [2, CHUNK, CHUNK], SQUARE)
    below = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], HALF)
    first = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], HALF)
    second = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], HALF)
    gate_vectors, betas = alloc_vectors(2 * AHEAD), alloc_vectors(2 * AHEAD)
    gated = (new_channel(gate_vectors, 2), betas, alloc_vectors(2 * AHEAD))
    factors = (alloc_vectors(2), alloc_vectors(2), alloc_vectors(2))
    works = (below, first, second)
    q_norms = new_channel(alloc_vectors(2), 2)
    init_barriers((keys, queries), 1, 1)
    init_barriers((values,), 1, 2)
    init_barriers((solved, gated[0]), 1, 2)
    init_barriers((q_norms,), 2, 1)
    hopper.fence_async_shared()
    tokens_of, maps = (keys, queries, values), (k_map, q_map, v_map)
    carried = (
        tokens_of, q_norms, solved, P_tiles, gated, factors, maps, (inputs, weights, numbers),
        out_map, out, states, slots, checkpoints, (request, b, hv),
    )  # fmt: skip
    operands = (
        keys, queries, q_norms, solved, P_tiles, gated, factors, alloc_vectors(1).index(0), works,
        numbers, request,
    )  # fmt: skip
    gl.warp_specialize(
        [(carry, (carried, 0, C)), (carry, (carried, 1, C)), (solve_chunks, (operands, C))],
        [4, 4],
        [192, 120],
    )
