"""Prefill in one kernel for Hopper: what prepare_gdn and scan do, with T and P · T on the chip.

Two groups of four warps carry 64 rows of a head's state each; four more warps solve the next chunk
meanwhile. The products are those of the two kernels, and so are the bits.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attn_core.backends.triton.hopper.channel import init_barriers, new_channel
from attn_core.backends.triton.linear.gates import head_weights
from attn_core.backends.triton.linear.hopper.prepare_gdn import (
    load_raw_gates,
    prepare_chunk,
)
from attn_core.backends.triton.linear.hopper.scan import write_outputs
from attn_core.backends.triton.linear.hopper.solve import (
    CHUNK,
    LINE,
    A,
    barrier,
    product,
    share,
    solve,
)

W = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
STAGES = gl.constexpr(3)  # chunks whose tokens are in shared memory
TABLE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
SOLVED = gl.constexpr(2)  # chunks that are solved ahead


@gluon.jit
def copy_chunk(ring, tiles, maps, token, hv, j, C: gl.constexpr):
    """Begin to copy 64 tokens of a head: keys, queries and values. Those past the end are zeros."""
    k_tile, q_tile, v_tile, _, _ = tiles
    k_map, q_map, v_map = maps
    stage = ring.stage(j)
    full = ring.full.index(stage)
    column = hv // C.GROUP * C.K
    mbarrier.expect(full, 3 * CHUNK * C.K * 2)
    tma.async_copy_global_to_shared(k_map, [token, column], full, k_tile.index(stage))
    tma.async_copy_global_to_shared(q_map, [token, column], full, q_tile.index(stage))
    tma.async_copy_global_to_shared(v_map, [token, hv * C.V], full, v_tile.index(stage))


@gluon.jit
def zero_rows(tiles, stage, count):
    """Zero the rows from `count` on: they are another request's tokens, and may be NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    N: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, CHUNK], tiles.dtype)
    parts = tiles._reinterpret(tiles.dtype, [STAGES * 16, 8, CHUNK], N)  # two panels of 64 columns
    row = gl.arange(0, 8, gl.SliceLayout(1, L))
    for i in range(count // 8, 8):
        inside = (i * 8 + row < count)[:, None]
        for panel in gl.static_range(2):
            part = parts.index(stage * 16 + panel * 8 + i)
            part.store(gl.where(inside, part.load(L), 0.0).to(tiles.dtype))


@gluon.jit
def solve_chunks(given, C: gl.constexpr):
    """Fill `solved` with T, P · T and factors of each chunk, and copy the tokens of the next one.

    work: float16, three tiles [64, 64]. lines: float32 [3, 64].
    """
    ring, solved, tiles, work, lines, maps, inputs, weights, numbers, request, hv = given
    k_tile, q_tile, v_tile, T_tile, f_tile = tiles
    begin, tokens, first, num_chunks = request
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, A)
    a_log, bias = head_weights(weights, hv, 0, C)
    if num_chunks > 0:
        copy_chunk(ring, tiles, maps, begin, hv, 0, C)
    raw_g, raw_beta = load_raw_gates(inputs, begin.to(gl.int64), hv, tokens)
    for j in range(num_chunks):
        stage = ring.stage(j)
        place = solved.stage(j)
        left = tokens - j * CHUNK
        after = begin + (j + 1) * CHUNK
        if j + 1 < num_chunks:
            ring.wait_free(j + 1)
            copy_chunk(ring, tiles, maps, after, hv, j + 1, C)
        g, beta = raw_g, raw_beta
        raw_g, raw_beta = load_raw_gates(inputs, after.to(gl.int64), hv, left - CHUNK)
        ring.wait_full(j)
        if left < CHUNK:
            zero_rows(k_tile, stage, left)
            zero_rows(q_tile, stage, left)
            zero_rows(v_tile, stage, left)
            hopper.fence_async_shared()
            barrier()
        below = work.index(0)
        k, q = k_tile.index(stage), q_tile.index(stage)
        D, P, factors, decay = prepare_chunk(
            k, q, below, lines, g, beta, left, a_log, bias, numbers, C
        )
        solved.wait_free(j)
        kept = gl.full([CHUNK], 1.0, gl.float32, gl.SliceLayout(1, A)) * decay
        pairs = gl.join(gl.join(factors[0], factors[2]), gl.join(factors[1], kept))
        lines_of = f_tile._reinterpret(gl.float32, [SOLVED, 4, CHUNK], TABLE).index(place)
        lines_of.store(gl.permute(gl.reshape(pairs, (CHUNK, 4)), (1, 0)))
        T = solve(D, lines.index(1), below, work.index(1), work.index(2))
        share(work.index(1), T)
        found = T_tile.index(place)
        found.slice(0, CHUNK).store(T.to(T_tile.dtype))
        found.slice(CHUNK, CHUNK).store(product(P, work.index(1), zero).to(T_tile.dtype))
        hopper.fence_async_shared()
        barrier()
        mbarrier.arrive(solved.full.index(place), count=1)


@gluon.jit
def carry_rows(carried, TILE: gl.constexpr, C: gl.constexpr):
    """Carry 64 rows of a state through a request's chunks, and write their outputs: see `carry`.

    Registers are few here: a state's factors are read before other products take their place.
    """
    ring, solved, tiles, y_tiles, out, states, slots, checkpoints, request, b, hv = carried
    k_tile, q_tile, v_tile, T_tile, f_tile = tiles
    begin, tokens, first, num_chunks = request
    dtype: gl.constexpr = v_tile.dtype
    AX: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    WX: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, A)
    y_tile = y_tiles.index(TILE)
    zero = gl.full([CHUNK, CHUNK], 0.0, gl.float32, A)
    row = TILE * 64 + gl.arange(0, 64, gl.SliceLayout(1, W))
    column = gl.arange(0, C.K, gl.SliceLayout(0, W))
    at = ((hv * C.V + row) * C.K)[:, None]  # a row's columns are at constants from there
    slot = gl.load(slots.read + b).to(gl.int64)
    known = slot >= 0
    if C.FRESH:
        known = known & (gl.load(slots.fresh + b) == 0)
    source = states.ptr + gl.maximum(slot, 0) * states.slot_stride + at + column[None, :]
    S = gl.load(source, mask=(column >= 0)[None, :] & known, other=0.0).to(gl.float32)
    for j in range(num_chunks):
        stage = ring.stage(j)
        place = solved.stage(j)
        state = gl.convert_layout(S.to(dtype), AX)
        ring.wait_full(j)
        solved.wait_full(j)
        k = k_tile.index(stage)
        q = q_tile.index(stage)
        T = T_tile.index(place)
        sk = hopper.warpgroup_mma(state, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        x = v_tile.index(stage).slice(TILE * 64, 64, dim=1).permute((1, 0)).load(A)
        f_in = f_tile.index(4 * place).load(COLUMN)
        sk = hopper.warpgroup_mma_wait(0, deps=[sk])
        x = gl.convert_layout((x.to(gl.float32) - sk * f_in[None, :]).to(dtype), AX)
        y = hopper.warpgroup_mma(state, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        y, _ = hopper.warpgroup_mma_wait(0, deps=[y, state])
        u = hopper.warpgroup_mma(
            x, T.slice(0, CHUNK).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        y = y * f_tile.index(4 * place + 1).load(COLUMN)[None, :]
        y = hopper.warpgroup_mma(x, T.slice(CHUNK, CHUNK).permute((1, 0)), y, is_async=True)
        S = S * f_tile.index(4 * place + 3).load(gl.SliceLayout(1, W))[:, None]
        f_out = f_tile.index(4 * place + 2).load(COLUMN)
        u = hopper.warpgroup_mma_wait(1, deps=[u])
        u = gl.convert_layout((u * f_out[None, :]).to(dtype), WX)
        S = hopper.warpgroup_mma(u, k, S, is_async=True)
        y, _ = hopper.warpgroup_mma_wait(1, deps=[y, x])
        y_tile.permute((1, 0)).store(y.to(dtype))
        barrier()
        write_outputs(y_tile, out, begin + j * CHUNK, hv, TILE, tokens - j * CHUNK)
        S, _ = hopper.warpgroup_mma_wait(0, deps=[S, u])
        ring.release(j)
        solved.release(j)
        if C.CHECKPOINTS:
            kept = gl.load(checkpoints + first + j).to(gl.int64)
            if kept >= 0:
                target = states.ptr + kept * states.slot_stride + at + column[None, :]
                gl.store(target, S.to(states.ptr.dtype.element_ty))
    write = gl.load(slots.write + b).to(gl.int64)
    if (write >= 0) & (slot >= 0):
        target = states.ptr + write * states.slot_stride + at + column[None, :]
        gl.store(target, S.to(states.ptr.dtype.element_ty))


@gluon.jit
def fused_gdn_hopper(
    k_map, q_map, v_map, inputs, weights, numbers, out, states, slots, checkpoints, chunks,
    C: gl.constexpr,
):  # fmt: skip
    """Run all chunks of a request and value head. Grid: (B · HV).

    k_map, q_map, v_map: tokens [T, H · D], 64 of one head at a time.
    """
    maps = (k_map, q_map, v_map)
    hv = gl.program_id(0) % C.HV
    b = gl.load(chunks.order + gl.program_id(0) // C.HV)
    begin = gl.load(chunks.cu_seqlens + b)
    tokens = gl.load(chunks.cu_seqlens + b + 1) - begin
    num_chunks = gl.where(gl.load(slots.read + b) >= 0, (tokens + CHUNK - 1) // CHUNK, 0)
    request = (begin, tokens, gl.load(chunks.first + b), num_chunks)
    T: gl.constexpr = inputs.v.ptr.dtype.element_ty
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, 128], T)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * CHUNK, CHUNK], T)
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], gl.float16)
    OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], T)
    k_tile = gl.allocate_shared_memory(T, [STAGES, CHUNK, 128], ROWS)
    q_tile = gl.allocate_shared_memory(T, [STAGES, CHUNK, 128], ROWS)
    v_tile = gl.allocate_shared_memory(T, [STAGES, CHUNK, 128], ROWS)
    T_tile = gl.allocate_shared_memory(T, [SOLVED, 2 * CHUNK, CHUNK], SQUARE)
    f_tile = gl.allocate_shared_memory(gl.float32, [4 * SOLVED, CHUNK], LINE)
    lines = gl.allocate_shared_memory(gl.float32, [3, CHUNK], LINE)
    work = gl.allocate_shared_memory(gl.float16, [3, CHUNK, CHUNK], HALF)
    y_tiles = gl.allocate_shared_memory(T, [2, CHUNK, CHUNK], OUT)
    ring = new_channel(k_tile, STAGES)
    solved = new_channel(T_tile, SOLVED)
    init_barriers((ring,), 1, 2)
    init_barriers((solved,), 1, 2)
    hopper.fence_async_shared()
    tiles = (k_tile, q_tile, v_tile, T_tile, f_tile)
    carried = (ring, solved, tiles, y_tiles, out, states, slots, checkpoints, request, b, hv)
    given = (ring, solved, tiles, work, lines, maps, inputs, weights, numbers, request, hv)
    gl.warp_specialize(
        [(carry_rows, (carried, 0, C)), (carry_rows, (carried, 1, C)), (solve_chunks, (given, C))],
        [4, 4],
        [184, 136],
    )
