"""GDN's prompts in one kernel for Hopper: what prepare_gdn and scan do, with T and P · T on chip.

Four groups of four warps have a part each. One inverts the matrix of a chunk; it has nothing else
to do, since its chain is the longest. One computes P · T and the outputs, from what the others
leave in shared memory. Two carry 64 rows of a state each; they wait for the other groups, so that
one of them copies tokens too, and the other one sums up the decays. The products are those of the
two kernels, and so are the bits.
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
from attn_core.backends.triton.linear.hopper.fused_solve import (
    N,
    R,
    keep_gates,
    raw_gates,
    solve_chunks,
)
from attn_core.backends.triton.linear.hopper.scan import load_state, write_outputs
from attn_core.backends.triton.linear.hopper.solve import (
    CHUNK,
    LINE,
    A,
    barrier,
    norms_of,
    product,
    share,
)

W = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def copy(channel, x_map, j, begin, head):
    """Begin to copy one head of a chunk's tokens, also rows past the last one."""
    full = channel.full.index(channel.stage(j))
    mbarrier.expect(full, CHUNK * 128 * 2)
    tile = channel.tile.index(channel.stage(j))
    tma.async_copy_global_to_shared(x_map, [begin + j * CHUNK, head * 128], full, tile)


@gluon.jit
def keep_rows(states, slot, S, hv, HALF: gl.constexpr, C: gl.constexpr):
    """Write 64 rows of a state to a slot, if there is one.

    Columns are constants from a row's first, so that no addresses wait in registers from the first
    chunk to the last.
    """
    if slot >= 0:
        row = hv * C.V + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, W))
        rows = states.ptr + slot.to(gl.int64) * states.slot_stride + (row * C.K)[:, None]
        columns = gl.arange(0, C.K, gl.SliceLayout(0, W))[None, :]
        gl.store(rows + columns, S.to(states.ptr.dtype.element_ty))


@gluon.jit
def carry(carried, HALF: gl.constexpr, C: gl.constexpr):
    """Carry 64 rows of a state through a request's chunks, and leave what the outputs need."""
    (
        keys, queries, values, solved, gated, factors, hands, maps, layer, states, slots,
        checkpoints, own,
    ) = carried  # fmt: skip
    k_map, q_map, v_map = maps
    inputs, weights, numbers = layer
    request, b, hv = own
    into_lines, out_lines, kept_lines = factors[0], factors[1], factors[2]
    before, updates = hands[HALF]
    begin, tokens, first, num_chunks = request
    h = hv // C.GROUP
    if HALF == 0:  # this group copies the tokens too, and the other one has the gates: both wait
        if num_chunks > 0:
            copy(keys, k_map, 0, begin, h)
            copy(queries, q_map, 0, begin, h)
            copy(values, v_map, 0, begin, hv)
        if num_chunks > 1:
            copy(keys, k_map, 1, begin, h)
    if HALF:
        head = head_weights(weights, hv, 0, C)
        token = begin.to(gl.int64)
        raw = raw_gates(inputs, token, hv, tokens)
        after = raw_gates(inputs, token + CHUNK, hv, tokens - CHUNK)
        keep_gates(gated, raw, head, numbers, tokens, 0, C)
        keep_gates(gated, after, head, numbers, tokens - CHUNK, 1, C)
    dtype: gl.constexpr = keys.tile.dtype
    zero = gl.full([64, CHUNK], 0.0, gl.float32, A)
    row = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, W))
    column = gl.arange(0, C.K, gl.SliceLayout(0, W))
    at = (hv * C.V + row)[:, None] * C.K + column[None, :]
    S = load_state(states, slots, b, at, C)
    for j in range(num_chunks):
        state, x_tile = before.tile, updates.tile
        before.wait_free(j)
        state.store(S.to(dtype))
        hopper.fence_async_shared()
        before.fill(j)
        values.wait_full(j)
        keys.wait_full(j)
        solved.wait_full(j)
        k = keys.tile.index(keys.stage(j))
        sk = hopper.warpgroup_mma(state, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        place = solved.stage(j)
        v = values.tile.index(values.stage(j)).slice(HALF * 64, 64, dim=1)
        x = v.permute((1, 0)).load(A)
        f_in = into_lines.index(place).load(N)
        sk = hopper.warpgroup_mma_wait(0, deps=[sk])
        x = (x.to(gl.float32) - sk * f_in[None, :]).to(dtype)
        update = gl.convert_layout(x, gl.DotOperandLayout(0, A, 2))
        T = solved.tile.index(place).permute((1, 0))
        u = hopper.warpgroup_mma(update, T, zero, use_acc=False, is_async=True)
        updates.wait_free(j)
        x_tile.store(x)
        hopper.fence_async_shared()
        updates.fill(j)
        if HALF == 0:
            solved.wait_free(j + 1)  # all groups are done with the tokens of chunk j - 1
            if j + 1 < num_chunks:
                copy(queries, q_map, j + 1, begin, h)
                copy(values, v_map, j + 1, begin, hv)
            if j + 2 < num_chunks:
                copy(keys, k_map, j + 2, begin, h)
        S = S * kept_lines.index(place).load(gl.SliceLayout(1, W))[:, None]
        f_out = out_lines.index(place).load(N)
        u, _ = hopper.warpgroup_mma_wait(0, deps=[u, update])
        u = gl.convert_layout((u * f_out[None, :]).to(dtype), gl.DotOperandLayout(0, W, 2))
        S = hopper.warpgroup_mma(u, k, S, is_async=True)
        if HALF:
            left = tokens - (j + 2) * CHUNK
            raw = raw_gates(inputs, token + (j + 2) * CHUNK, hv, left)
        S, _ = hopper.warpgroup_mma_wait(0, deps=[S, u])
        solved.release(j)
        if HALF:  # all groups are done with the gates of chunk j
            keep_gates(gated, raw, head, numbers, left, j + 2, C)
        if C.CHECKPOINTS:
            keep_rows(states, gl.load(checkpoints + first + j), S, hv, HALF, C)
    write = gl.load(slots.write + b).to(gl.int64)
    if (write >= 0) & (gl.load(slots.read + b) >= 0):
        target = states.ptr + write * states.slot_stride + at
        gl.store(target, S.to(states.ptr.dtype.element_ty))


@gluon.jit
def write_chunks(written, C: gl.constexpr):
    """Compute the outputs of each chunk, from states and updates that the other groups leave."""
    (
        keys, queries, solved, half_tile, P_tile, line, factors, hands, out, numbers, request, hv,
    ) = written  # fmt: skip
    log_lines, norm_lines = factors[3], factors[4]
    begin, tokens, _, num_chunks = request
    dtype: gl.constexpr = keys.tile.dtype
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, A)
    upper, lower = hands
    for j in range(num_chunks):
        q = queries.tile.index(queries.stage(j))
        q_columns = q.permute((1, 0))
        queries.wait_full(j)
        qq = zero
        if C.NORM:
            qq = hopper.warpgroup_mma(q, q_columns, zero, use_acc=False, is_async=True)
        keys.wait_full(j)
        k_columns = keys.tile.index(keys.stage(j)).permute((1, 0))
        qk = hopper.warpgroup_mma(q, k_columns, zero, use_acc=False, is_async=True)
        if C.NORM:
            qq = hopper.warpgroup_mma_wait(1, deps=[qq])
        norm = norms_of(qq, numbers.eps, C.NORM) * numbers.scale
        solved.wait_full(j)
        place = solved.stage(j)
        G_row, G_column = log_lines.index(place).load(R), log_lines.index(place).load(N)
        line.store(gl.exp2(G_row) * norm)
        qk = hopper.warpgroup_mma_wait(0, deps=[qk])
        below = gl.arange(0, CHUNK, R)[:, None] >= gl.arange(0, CHUNK, N)[None, :]
        decay = gl.exp2(-gl.abs(G_row[:, None] - G_column[None, :]))
        decay = decay * norm_lines.index(place).load(N)[None, :]
        P = gl.where(below, qk, 0.0) * decay
        P = (P * norm[:, None]).to(gl.float16)
        share(P_tile, product(P, half_tile.index(place), zero))
        solved.release(j)
        upper[0].wait_full(j)
        y = hopper.warpgroup_mma(upper[0].tile, q_columns, zero, use_acc=False, is_async=True)
        lower[0].wait_full(j)
        z = hopper.warpgroup_mma(lower[0].tile, q_columns, zero, use_acc=False, is_async=True)
        y, z = hopper.warpgroup_mma_wait(0, deps=[y, z])
        upper[0].release(j)
        lower[0].release(j)
        f_q = line.load(N)
        y, z = y * f_q[None, :], z * f_q[None, :]
        P_columns = P_tile.permute((1, 0))
        upper[1].wait_full(j)
        y = hopper.warpgroup_mma(upper[1].tile, P_columns, y, is_async=True)
        lower[1].wait_full(j)
        z = hopper.warpgroup_mma(lower[1].tile, P_columns, z, is_async=True)
        y, z = hopper.warpgroup_mma_wait(0, deps=[y, z])
        barrier()  # the outputs take the place of the updates that all warps have read
        upper[1].tile.permute((1, 0)).store(y.to(dtype))
        lower[1].tile.permute((1, 0)).store(z.to(dtype))
        barrier()
        start, left = begin + j * CHUNK, tokens - j * CHUNK
        write_outputs(upper[1].tile, out, start, hv, 0, left)
        write_outputs(lower[1].tile, out, start, hv, 1, left)
        upper[1].release(j)
        lower[1].release(j)


@gluon.jit
def new_line():
    """Return room for a number of each token of a chunk."""
    return gl.allocate_shared_memory(gl.float32, [CHUNK], LINE)


@gluon.jit
def new_lines():
    """Return the same, for two chunks that are solved."""
    return gl.allocate_shared_memory(gl.float32, [2, CHUNK], LINE)


@gluon.jit
def fused_gdn_hopper(
    k_map, q_map, v_map, inputs, weights, numbers, out, states, slots, checkpoints, chunks,
    C: gl.constexpr,
):  # fmt: skip
    """Run all chunks of a request and value head. Grid: (B · HV).

    k_map, q_map, v_map: tokens [T, H · D], 64 of one head at a time.
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
    keys = new_channel(gl.allocate_shared_memory(T, [3, CHUNK, 128], ROWS), 3)
    queries = new_channel(gl.allocate_shared_memory(T, [2, CHUNK, 128], ROWS), 2)
    values = new_channel(gl.allocate_shared_memory(T, [2, CHUNK, 128], ROWS), 2)
    solved = new_channel(gl.allocate_shared_memory(T, [2, CHUNK, CHUNK], SQUARE), 2)
    upper = (
        new_channel(gl.allocate_shared_memory(T, [64, 128], ROWS), 1),
        new_channel(gl.allocate_shared_memory(T, [64, CHUNK], SQUARE), 1),
    )
    lower = (
        new_channel(gl.allocate_shared_memory(T, [64, 128], ROWS), 1),
        new_channel(gl.allocate_shared_memory(T, [64, CHUNK], SQUARE), 1),
    )
    half_tile = gl.allocate_shared_memory(gl.float16, [2, CHUNK, CHUNK], HALF)
    works = gl.allocate_shared_memory(gl.float16, [2, CHUNK, CHUNK], HALF)
    P_tile = gl.allocate_shared_memory(T, [CHUNK, CHUNK], SQUARE)
    norm_line, line = new_line(), new_line()
    gated = (new_channel(new_lines(), 2), new_lines(), new_lines())
    factors = (new_lines(), new_lines(), new_lines(), new_lines(), new_lines())
    init_barriers((keys,), 1, 1)
    init_barriers((queries, values, gated[0]), 1, 1)
    init_barriers((solved,), 1, 3)
    init_barriers((upper[0], upper[1], lower[0], lower[1]), 1, 1)
    hopper.fence_async_shared()
    maps, hands = (k_map, q_map, v_map), (upper, lower)
    carried = (
        keys, queries, values, solved, gated, factors, hands, maps, (inputs, weights, numbers),
        states, slots, checkpoints, (request, b, hv),
    )  # fmt: skip
    given = (keys, values, solved, gated, half_tile, norm_line, factors, works, numbers, request)
    written = (
        keys, queries, solved, half_tile, P_tile, line, factors, hands, out, numbers, request, hv,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (carry, (carried, 0, C)),
            (carry, (carried, 1, C)),
            (solve_chunks, (given, C)),
            (write_chunks, (written, C)),
        ],
        [4, 4, 4],
        [152, 104, 112],
    )
