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
def copy_keys(keys, tiles, maps, begin, hv, j, C: gl.constexpr):
    """Begin to copy a chunk's keys and queries. Rows past the last token are zeros."""
    k_tile, q_tile, _, _, _ = tiles
    k_map, q_map, _ = maps
    full = keys.full.index(keys.stage(j))
    at = [begin + j * CHUNK, hv // C.GROUP * C.K]
    mbarrier.expect(full, 2 * CHUNK * C.K * 2)
    tma.async_copy_global_to_shared(k_map, at, full, k_tile.index(keys.stage(j)))
    tma.async_copy_global_to_shared(q_map, at, full, q_tile.index(keys.stage(j)))


@gluon.jit
def copy_values(values, maps, begin, hv, j, C: gl.constexpr):
    """Begin to copy a chunk's values."""
    _, _, v_map = maps
    full = values.full.index(values.stage(j))
    mbarrier.expect(full, CHUNK * C.V * 2)
    at = [begin + j * CHUNK, hv * C.V]
    tma.async_copy_global_to_shared(v_map, at, full, values.tile.index(values.stage(j)))


@gluon.jit
def zero_rows(tiles, stage, count):
    """Zero the rows from `count` on: they are another request's tokens, and may be NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    N: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, CHUNK], tiles.dtype)
    parts = tiles._reinterpret(tiles.dtype, [tiles.shape[0] * 16, 8, CHUNK], N)  # two panels of 64
    row = gl.arange(0, 8, gl.SliceLayout(1, L))
    for i in range(count // 8, 8):
        inside = (i * 8 + row < count)[:, None]
        for panel in gl.static_range(2):
            part = parts.index(stage * 16 + panel * 8 + i)
            part.store(gl.where(inside, part.load(L), 0.0).to(tiles.dtype))


@gluon.jit
def solve_chunks(given, FIRST: gl.constexpr, C: gl.constexpr):
    """Fill `solved` with T, P · T and the factors of each second chunk, from the FIRST on.

    work: float16, two tiles [64, 64] each. lines: float32, three [64] each.
    """
    keys, values, solved, tiles, works, lines, inputs, weights, numbers, request, hv = given
    k_tile, q_tile, v_tile, T_tile, f_tile = tiles
    begin, tokens, first, num_chunks = request
    work = T_tile._reinterpret(gl.float16, T_tile.shape, works.layout)
    begin = begin.to(gl.int64)
    below, tile = works.index(2 * FIRST), works.index(2 * FIRST + 1)
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, A)
    a_log, bias = head_weights(weights, hv, 0, C)
    at = FIRST * CHUNK
    raw_g, raw_beta = load_raw_gates(inputs, begin + at, hv, tokens - at)
    for j in range(FIRST, num_chunks, 2):
        stage = keys.stage(j)
        left = tokens - j * CHUNK
        g, beta = raw_g, raw_beta
        raw_g, raw_beta = load_raw_gates(inputs, begin + (j + 2) * CHUNK, hv, left - 2 * CHUNK)
        keys.wait_full(j)
        if left < CHUNK:
            values.wait_full(j)
            zero_rows(k_tile, stage, left)
            zero_rows(q_tile, stage, left)
            zero_rows(v_tile, values.stage(j), left)
            hopper.fence_async_shared()
            barrier()
        k, q = k_tile.index(stage), q_tile.index(stage)
        D, P, factors, decay = prepare_chunk(
            k, q, below, lines, 3 * FIRST, g, beta, left, a_log, bias, numbers, C
        )
        solved.wait_free(j)
        kept = gl.full([CHUNK], 1.0, gl.float32, gl.SliceLayout(1, A)) * decay
        pairs = gl.join(gl.join(factors[0], factors[2]), gl.join(factors[1], kept))
        found = f_tile._reinterpret(gl.float32, [2, 4, CHUNK], TABLE).index(FIRST)
        found.store(gl.permute(gl.reshape(pairs, (CHUNK, 4)), (1, 0)))
        T = solve(D, lines.index(3 * FIRST + 1), below, tile, work.index(2 * FIRST + 1))
        share(tile, T)
        T_tile.index(2 * FIRST).store(T.to(T_tile.dtype))
        T_tile.index(2 * FIRST + 1).store(product(P, tile, zero).to(T_tile.dtype))
        hopper.fence_async_shared()
        barrier()
        mbarrier.arrive(solved.full.index(FIRST), count=1)


@gluon.jit
def state_of(states, slot, hv, TILE: gl.constexpr, C: gl.constexpr):
    """Return where 64 rows of a state lie."""
    row = TILE * 64 + gl.arange(0, 64, gl.SliceLayout(1, W))
    column = gl.arange(0, C.K, gl.SliceLayout(0, W))
    at = states.ptr + slot * states.slot_stride + ((hv * C.V + row) * C.K)[:, None]
    return at + column[None, :]  # the columns are constants from there


@gluon.jit
def begin_chunk(S, k):
    """Begin S · kᵀ of 64 rows of a state; return the operand, and the product in flight."""
    state = gl.convert_layout(S.to(k.dtype), gl.DotOperandLayout(0, A, 2))
    zero = gl.full([CHUNK, CHUNK], 0.0, gl.float32, A)
    k = k.permute((1, 0))
    return state, hopper.warpgroup_mma(state, k, zero, use_acc=False, is_async=True)


@gluon.jit
def end_chunk(S, state, sk, k, q, v, T, PT, factors, place, y_tile):
    """Return the rows behind the chunk, in flight, and what they are added from: see `carry`.

    The chunk's outputs [64, 64] are left in y_tile. Registers are few here: factors are read where
    they are used, and no other product with the state is in flight.
    """
    dtype: gl.constexpr = v.dtype
    COLUMN: gl.constexpr = gl.SliceLayout(0, A)
    zero = gl.full([CHUNK, CHUNK], 0.0, gl.float32, A)
    x = v.permute((1, 0)).load(A)
    sk = hopper.warpgroup_mma_wait(0, deps=[sk])
    f_in = factors.index(4 * place).load(COLUMN)
    x = (x.to(gl.float32) - sk * f_in[None, :]).to(dtype)
    x = gl.convert_layout(x, gl.DotOperandLayout(0, A, 2))
    y = hopper.warpgroup_mma(state, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    y, _ = hopper.warpgroup_mma_wait(0, deps=[y, state])
    u = hopper.warpgroup_mma(x, T.permute((1, 0)), zero, use_acc=False, is_async=True)
    y = y * factors.index(4 * place + 1).load(COLUMN)[None, :]
    y = hopper.warpgroup_mma(x, PT.permute((1, 0)), y, is_async=True)
    S = S * factors.index(4 * place + 3).load(gl.SliceLayout(1, W))[:, None]
    u = hopper.warpgroup_mma_wait(1, deps=[u])
    f_out = factors.index(4 * place + 2).load(COLUMN)
    u = gl.convert_layout((u * f_out[None, :]).to(dtype), gl.DotOperandLayout(0, W, 2))
    S = hopper.warpgroup_mma(u, k, S, is_async=True)
    y, _ = hopper.warpgroup_mma_wait(1, deps=[y, x])
    y_tile.permute((1, 0)).store(y.to(dtype))
    return S, u


@gluon.jit
def carry_rows(carried, C: gl.constexpr):
    """Carry a state's 128 rows through a request's chunks, write their outputs, and copy tokens.

    A half's products with keys begin beside the other half's last ones.
    """
    (
        keys, values, solved, tiles, y_tiles, maps, out, states, slots, checkpoints, request, b, hv,
    ) = carried  # fmt: skip
    k_tile, q_tile, v_tile, T_tile, f_tile = tiles
    begin, tokens, first, num_chunks = request
    for j in gl.static_range(3):
        if j < num_chunks:
            copy_keys(keys, tiles, maps, begin, hv, j, C)
            if j < 2:
                copy_values(values, maps, begin, hv, j, C)
    slot = gl.load(slots.read + b).to(gl.int64)
    known = slot >= 0
    if C.FRESH:
        known = known & (gl.load(slots.fresh + b) == 0)
    inside = gl.full([64, C.K], 1, gl.int1, W) & known
    at = gl.maximum(slot, 0)
    S = gl.load(state_of(states, at, hv, 0, C), mask=inside, other=0.0).to(gl.float32)
    R = gl.load(state_of(states, at, hv, 1, C), mask=inside, other=0.0).to(gl.float32)
    store: gl.constexpr = states.ptr.dtype.element_ty
    for j in range(num_chunks):
        if j > 0:
            if j + 1 < num_chunks:
                copy_values(values, maps, begin, hv, j + 1, C)
            if j + 2 < num_chunks:
                copy_keys(keys, tiles, maps, begin, hv, j + 2, C)
        place = solved.stage(j)
        start = begin + j * CHUNK
        keys.wait_full(j)
        values.wait_full(j)
        solved.wait_full(j)
        k = k_tile.index(keys.stage(j))
        q = q_tile.index(keys.stage(j))
        v = v_tile.index(values.stage(j))
        T, PT = T_tile.index(2 * place), T_tile.index(2 * place + 1)
        upper, lower = y_tiles.index(0), y_tiles.index(1)
        state, sk = begin_chunk(S, k)
        S, u = end_chunk(S, state, sk, k, q, v.slice(0, 64, dim=1), T, PT, f_tile, place, upper)
        barrier()
        write_outputs(upper, out, start, hv, 0, tokens - j * CHUNK)
        S, _ = hopper.warpgroup_mma_wait(0, deps=[S, u])
        state, sk = begin_chunk(R, k)
        R, u = end_chunk(R, state, sk, k, q, v.slice(64, 64, dim=1), T, PT, f_tile, place, lower)
        barrier()
        write_outputs(lower, out, start, hv, 1, tokens - j * CHUNK)
        R, _ = hopper.warpgroup_mma_wait(0, deps=[R, u])
        solved.release(j)  # all warps have read the chunk: its tokens may be replaced
        if C.CHECKPOINTS:
            kept = gl.load(checkpoints + first + j).to(gl.int64)
            if kept >= 0:
                gl.store(state_of(states, kept, hv, 0, C), S.to(store))
                gl.store(state_of(states, kept, hv, 1, C), R.to(store))
    write = gl.load(slots.write + b).to(gl.int64)
    if (write >= 0) & (slot >= 0):
        gl.store(state_of(states, write, hv, 0, C), S.to(store))
        gl.store(state_of(states, write, hv, 1, C), R.to(store))


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
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], T)
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], gl.float16)
    k_tile = gl.allocate_shared_memory(T, [3, CHUNK, 128], ROWS)
    q_tile = gl.allocate_shared_memory(T, [3, CHUNK, 128], ROWS)
    v_tile = gl.allocate_shared_memory(T, [2, CHUNK, 128], ROWS)
    T_tile = gl.allocate_shared_memory(T, [4, CHUNK, CHUNK], SQUARE)
    f_tile = gl.allocate_shared_memory(gl.float32, [8, CHUNK], LINE)
    lines = gl.allocate_shared_memory(gl.float32, [6, CHUNK], LINE)
    works = gl.allocate_shared_memory(gl.float16, [4, CHUNK, CHUNK], HALF)
    y_tiles = gl.allocate_shared_memory(T, [2, CHUNK, CHUNK], SQUARE)
    keys = new_channel(k_tile, 3)
    values = new_channel(v_tile, 2)
    solved = new_channel(T_tile, 2)
    init_barriers((keys,), 1, 1)
    init_barriers((values, solved), 1, 1)
    hopper.fence_async_shared()
    tiles = (k_tile, q_tile, v_tile, T_tile, f_tile)
    carried = (
        keys, values, solved, tiles, y_tiles, maps, out, states, slots, checkpoints, request, b, hv,
    )  # fmt: skip
    given = (
        keys, values, solved, tiles, works, lines, inputs, weights, numbers, request, hv,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (carry_rows, (carried, C)),
            (solve_chunks, (given, 0, C)),
            (solve_chunks, (given, 1, C)),
        ],
        [4, 4],
        [128, 128],
    )
