"""Prefill, second kernel, for a Hopper that is not full: the shortest chain from state to state.

Four warps carry 64 rows of a head's state and do nothing else. Four more compute the outputs, from
states and updates that the first ones leave in shared memory. Others let TMA copy the chunks: to
copy them by threads took longer than the chain.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attn_core.backends.triton.hopper.channel import init_barriers, new_channel
from attn_core.backends.triton.linear.hopper.ahead import forget, wait_ready
from attn_core.backends.triton.linear.hopper.chain import carry
from attn_core.backends.triton.linear.hopper.scan import write_outputs
from attn_core.backends.triton.linear.hopper.solve import CHUNK, A, barrier

WIDE_BYTES = gl.constexpr(64 * 128 * 2)  # of a chunk's keys
HALF_BYTES = gl.constexpr(64 * 64 * 2)  # of T, or of half its values


@gluon.jit
def copy(full, tile, x_map, row, column):
    """Begin to copy 64 rows of a matrix."""
    tma.async_copy_global_to_shared(x_map, [row, column], full, tile)


@gluon.jit
def load_chunks(loaded, AHEAD: gl.constexpr, C: gl.constexpr):
    """Copy each chunk's keys, values, T and factors, and for the outputs queries and P · T.

    Rows behind a request are copied too. TMA fills a tile, and threads the factors.
    """
    keys, queries, maps, work, ready, request, hv, tile = loaded
    carries, k_tile, v_tile, T_tile, f_tile, d_tile, o_tile = keys
    writes, q_tile, P_tile, g_tile = queries
    k_map, q_map, v_map, T_map, o_map = maps
    begin, tokens, first, num_chunks = request
    f = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    g = gl.arange(0, CHUNK, gl.BlockedLayout([1], [32], [4], [0]))
    for j in range(num_chunks):
        row = begin + j * CHUNK
        at = (first + j) * C.HV + hv
        chunk = at.to(gl.int64)
        column = hv // C.GROUP * C.K
        if C.PER_CHANNEL:
            row_in, column = at * CHUNK, 0
        else:
            row_in = row
        factors = work.factors + chunk * (3 * CHUNK)
        if AHEAD:
            wait_ready(ready + j * (C.HV * C.V // 64))
        carries.wait_free(j)
        stage = carries.stage(j)
        full = carries.full.index(stage)
        if C.PER_CHANNEL:
            mbarrier.expect(full, 2 * WIDE_BYTES + 2 * HALF_BYTES)
            copy(full, o_tile.index(stage), o_map, row_in, 0)
            async_copy.async_copy_global_to_shared(
                f_tile.index(stage), work.decay + chunk * C.K + f
            )
        else:
            mbarrier.expect(full, WIDE_BYTES + 2 * HALF_BYTES)
            ends = factors + gl.where(f < CHUNK, f, f + CHUNK)
            async_copy.async_copy_global_to_shared(f_tile.index(stage), ends)
            decay = work.decay + chunk + gl.arange(0, 1, gl.BlockedLayout([1], [32], [4], [0]))
            async_copy.async_copy_global_to_shared(d_tile.index(stage), decay)
        copy(full, k_tile.index(stage), k_map, row_in, column)
        copy(full, v_tile.index(stage), v_map, row, hv * C.V + tile * 64)
        copy(full, T_tile.index(stage), T_map, at * (2 * CHUNK), 0)
        async_copy.mbarrier_arrive(full, increment_count=False)
        writes.wait_free(j)
        stage = writes.stage(j)
        full = writes.full.index(stage)
        mbarrier.expect(full, WIDE_BYTES + HALF_BYTES)
        copy(full, q_tile.index(stage), q_map, row_in, column)
        copy(full, P_tile.index(stage), T_map, at * (2 * CHUNK) + CHUNK, 0)
        if not C.PER_CHANNEL:
            async_copy.async_copy_global_to_shared(g_tile.index(stage), factors + CHUNK + g)
            async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def keep_outputs(y_tile, y):
    """Leave outputs where TMA takes them from, as soon as it has taken those before."""
    tma.store_wait(0)
    barrier()
    y_tile.permute((1, 0)).store(y.to(y_tile.dtype))
    hopper.fence_async_shared()
    barrier()


@gluon.jit
def write_chunks(written, C: gl.constexpr):
    """Compute the outputs of each chunk, from the state before it and its updates.

    A chunk's product with its state is begun with the last one of the chunk before, whose outputs
    are written meanwhile. Those of a last chunk of fewer tokens are written by threads.
    """
    queries, handed, y_tile, out_map, out, request, hv, tile = written
    ring, q_tile, P_tile, g_tile = queries
    hand, state_tile, x_tile = handed
    begin, tokens, first, num_chunks = request
    zero = gl.full([64, 64], 0.0, gl.float32, A)
    column = hv * C.V + tile * 64
    if num_chunks > 0:
        ring.wait_full(0)
        hand.wait_full(0)
        q = q_tile.index(0).permute((1, 0))
        y = hopper.warpgroup_mma(state_tile.index(0), q, zero, use_acc=False, is_async=True)
        y = hopper.warpgroup_mma_wait(0, deps=[y])
        hand.release(0)
        if not C.PER_CHANNEL:
            y = y * g_tile.index(0).load(gl.SliceLayout(0, A))[None, :]
        for j in range(1, num_chunks):
            stage = ring.stage(j)
            at = hand.stage(j)
            ring.wait_full(j)
            hand.wait_full(j)
            P = P_tile.index(ring.stage(j - 1)).permute((1, 0))
            y = hopper.warpgroup_mma(x_tile.index(at), P, y, is_async=True)
            q = q_tile.index(stage).permute((1, 0))
            after = hopper.warpgroup_mma(
                state_tile.index(at), q, zero, use_acc=False, is_async=True
            )
            y = hopper.warpgroup_mma_wait(1, deps=[y])
            keep_outputs(y_tile, y)
            tma.async_copy_shared_to_global(out_map, [begin + (j - 1) * CHUNK, column], y_tile)
            after = hopper.warpgroup_mma_wait(0, deps=[after])
            hand.release(j)
            ring.release(j - 1)
            y = after
            if not C.PER_CHANNEL:
                y = y * g_tile.index(stage).load(gl.SliceLayout(0, A))[None, :]
        last = num_chunks - 1
        hand.wait_full(num_chunks)
        P = P_tile.index(ring.stage(last)).permute((1, 0))
        x = x_tile.index(hand.stage(num_chunks))
        y = hopper.warpgroup_mma(x, P, y, is_async=True)
        y = hopper.warpgroup_mma_wait(0, deps=[y])
        keep_outputs(y_tile, y)
        row, left = begin + last * CHUNK, tokens - last * CHUNK
        if left >= CHUNK:
            tma.async_copy_shared_to_global(out_map, [row, column], y_tile)
        else:
            write_outputs(y_tile, out, row, hv, tile, left)
    tma.store_wait(0)


@gluon.jit
def scan_alone(
    k_map, q_map, v_map, out_map, T_map, o_map, out, states, slots, checkpoints, chunks, work,
    STAGES: gl.constexpr, QUERIES: gl.constexpr, HANDED: gl.constexpr,
    AHEAD: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Do what scan_chunks does, with 64 rows of a state in one program.

    Grid: (B · HV · V / 64). k_map, q_map, v_map, out_map: tokens [T, H · D], or with a decay per
    channel k_in and q_in as rows [chunks · HV · 64, K]; o_map: k_out alike. T_map: T and P, as rows
    of 64. STAGES, QUERIES: chunks that are in shared memory; HANDED: states. AHEAD: the chunks are
    prepared meanwhile, by prepare_gdn_ahead.
    """
    TILES: gl.constexpr = C.V // 64
    tile = gl.program_id(0) % TILES
    hv = gl.program_id(0) // TILES % C.HV
    b = gl.load(chunks.order + gl.program_id(0) // (TILES * C.HV))
    begin = gl.load(chunks.cu_seqlens + b)
    tokens = gl.load(chunks.cu_seqlens + b + 1) - begin
    first = gl.load(chunks.first + b)
    count = (tokens + CHUNK - 1) // CHUNK
    request = (begin, tokens, first, gl.where(gl.load(slots.read + b) >= 0, count, 0))
    ready = work.ready + first * (C.HV * TILES) + gl.program_id(0) % (C.HV * TILES)
    T: gl.constexpr = work.T.dtype.element_ty
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, 128], T)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], T)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_tile = gl.allocate_shared_memory(T, [STAGES, CHUNK, 128], WIDE)
    v_tile = gl.allocate_shared_memory(T, [STAGES, CHUNK, 64], SQUARE)
    T_tile = gl.allocate_shared_memory(T, [STAGES, CHUNK, CHUNK], SQUARE)
    o_tile = k_tile
    if C.PER_CHANNEL:
        o_tile = gl.allocate_shared_memory(T, [STAGES, CHUNK, 128], WIDE)
    f_tile = gl.allocate_shared_memory(gl.float32, [STAGES, 128], PLAIN)
    d_tile = gl.allocate_shared_memory(gl.float32, [STAGES, 1], PLAIN)
    q_tile = gl.allocate_shared_memory(T, [QUERIES, CHUNK, 128], WIDE)
    P_tile = gl.allocate_shared_memory(T, [QUERIES, CHUNK, CHUNK], SQUARE)
    g_tile = gl.allocate_shared_memory(gl.float32, [QUERIES, CHUNK], PLAIN)
    state_tile = gl.allocate_shared_memory(T, [HANDED, 64, 128], WIDE)
    x_tile = gl.allocate_shared_memory(T, [HANDED, 64, CHUNK], SQUARE)
    y_tile = gl.allocate_shared_memory(T, [CHUNK, 64], SQUARE)
    carries = new_channel(k_tile, STAGES)
    writes = new_channel(q_tile, QUERIES)
    hand = new_channel(state_tile, HANDED)
    init_barriers((carries,), 129, 1)
    init_barriers((writes,), 1 if C.PER_CHANNEL else 129, 1)
    init_barriers((hand,), 1, 1)
    hopper.fence_async_shared()
    keys = (carries, k_tile, v_tile, T_tile, f_tile, d_tile, o_tile)
    queries = (writes, q_tile, P_tile, g_tile)
    handed = (hand, state_tile, x_tile)
    carried = (keys, handed, states, slots, checkpoints, request, b, hv, tile)
    written = (queries, handed, y_tile, out_map, out, request, hv, tile)
    maps = (k_map, q_map, v_map, T_map, o_map)
    loaded = (keys, queries, maps, work, ready, request, hv, tile)
    gl.warp_specialize(
        [
            (carry, (carried, C)),
            (write_chunks, (written, C)),
            (load_chunks, (loaded, AHEAD, C)),
        ],
        [4, 4],
        [120, 136],
    )
    if AHEAD:
        forget(work, ready, C.HV * TILES, count)
