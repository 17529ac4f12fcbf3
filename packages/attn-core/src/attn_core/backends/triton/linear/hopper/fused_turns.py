"""GDN's prompts in one kernel for Hopper: one group of warps solves chunks, two carry the state.

The group that solves has nothing else to do: its chain of small steps is the longest. The others
keep 64 rows of the state each in registers, from where products read them. What the state does not
depend on they have done before a chunk is solved: half of P each, the norms of queries, and gates.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from attn_core.backends.triton.hopper.channel import init_barriers, new_channel
from attn_core.backends.triton.linear.gates import head_weights, log_decay, update_rate
from attn_core.backends.triton.linear.hopper.fused_gdn import W, copy, keep_rows, new_lines
from attn_core.backends.triton.linear.hopper.fused_solve import N, R, begin_chunk, zero_rows
from attn_core.backends.triton.linear.hopper.prepare_gdn import norms_of_rows
from attn_core.backends.triton.linear.hopper.scan import load_state, write_outputs
from attn_core.backends.triton.linear.hopper.solve import (
    CHUNK,
    LINE,
    LOG2_E,
    A,
    barrier,
    diagonal_blocks,
    inverse_of_blocks,
    norms_of,
    solve,
    sums,
)

AX = gl.constexpr(gl.DotOperandLayout(0, A, 2))
WX = gl.constexpr(gl.DotOperandLayout(0, W, 2))
H = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
AHEAD = gl.constexpr(4)  # chunks whose gates are computed at once, one a warp
GATES = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
TABLE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def raw_gates(inputs, first, last, hv):
    """Return g and beta [4, 64] of four chunks as they are; behind a request its last token's."""
    c = gl.arange(0, AHEAD, gl.SliceLayout(1, GATES))[:, None]
    i = first + c * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, GATES))[None, :]
    i = gl.minimum(i, last).to(gl.int64)
    g = inputs.g.ptr + i * inputs.g.token_stride + hv * inputs.g.head_stride
    beta = inputs.beta.ptr + i * inputs.beta.token_stride + hv * inputs.beta.head_stride
    return gl.load(g), gl.load(beta)


@gluon.jit
def keep_gates(gated, raw, head, numbers, count, turn, C: gl.constexpr):
    """Leave four chunks' summed log decays, to base 2, their rates, and their whole log decays."""
    channel, beta_lines, total_lines = gated
    g, beta = raw
    c = gl.arange(0, AHEAD, gl.SliceLayout(1, GATES))[:, None]
    inside = c * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, GATES))[None, :] < count
    g = gl.where(inside, log_decay(g, head[0], head[1], numbers.lower_bound, C), 0.0)
    beta = gl.where(inside, update_rate(beta, C), 0.0)
    place = turn % 2
    store_lines(channel.tile, place, gl.associative_scan(g, 1, sums) * LOG2_E)
    store_lines(beta_lines, place, beta)
    one = gl.full([AHEAD, CHUNK], 1.0, gl.float32, GATES)
    store_lines(total_lines, place, one * gl.sum(g, 1)[:, None])
    channel.fill(turn)


@gluon.jit
def store_lines(lines, place, x):
    """Store [4, 64] in four lines."""
    lines._reinterpret(gl.float32, [2, AHEAD, CHUNK], TABLE).index(place).store(x)


@gluon.jit
def pretend_to_solve(given, C: gl.constexpr):
    """Leave what was there, to time the groups that carry by themselves."""
    keys, solved, normed, gated, factors, works, numbers, request = given
    for j in range(request[3]):
        gated[0].wait_full(j // AHEAD)
        keys.wait_full(j)
        normed.fill(j)
        solved.wait_free(j)
        solved.fill(j)


@gluon.jit
def pretend_to_carry(carried, TILE: gl.constexpr, C: gl.constexpr):
    """Copy tokens and leave gates, to time the group that solves by itself."""
    (
        tokens_of, solved, normed, paired, gated, factors, lines, maps, layer, out, states, slots,
        checkpoints, own,
    ) = carried  # fmt: skip
    keys, queries, values = tokens_of
    k_map, q_map, v_map = maps
    request, b, hv = own
    begin, tokens, first, num_chunks = request
    begin_tokens(tokens_of, maps, gated, layer, own, TILE, C)
    for j in range(num_chunks):
        queries.wait_full(j)
        normed.wait_full(j)
        paired.fill(j)
        values.wait_full(j)
        solved.wait_full(j)
        paired.wait_full(j)
        if TILE == 0:
            copy_ahead(tokens_of, maps, own, j, C)
        solved.release(j)
        if TILE:
            gates_ahead(gated, layer, own, j, C)


@gluon.jit
def solve_chunks(given, C: gl.constexpr):
    """Leave T of each chunk, the norms of its keys, and what keys and updates are multiplied by."""
    keys, solved, normed, gated, factors, works, numbers, request = given
    gates, beta_lines, total_lines = gated
    into_lines, out_lines = factors
    tokens, num_chunks = request[1], request[3]
    below, work, half = works.index(0), works.index(1), works.index(2)
    kk = begin_chunk(keys, 0, gl.minimum(tokens, num_chunks * CHUNK))
    for j in range(num_chunks):
        gates.wait_full(j // AHEAD)
        known = j % (2 * AHEAD)
        G_row, G_column = gates.tile.index(known).load(R), gates.tile.index(known).load(N)
        beta_line = beta_lines.index(known)
        decay = gl.exp2(-gl.abs(G_row[:, None] - G_column[None, :]))
        kk, decay = hopper.warpgroup_mma_wait(0, deps=[kk, decay])
        norm = norms_of(kk, numbers.eps, C.NORM)
        norm_line = normed.tile.index(normed.stage(j))
        norm_line.store(norm)
        normed.fill(j)
        barrier()
        Z = kk * (decay * norm_line.load(N)[None, :])
        blocks = diagonal_blocks(Z)
        below.store((Z * (norm * beta_line.load(R))[:, None]).to(gl.float16))
        D = inverse_of_blocks(blocks, norm, beta_line, gl.float16)
        solved.wait_free(j)
        place = solved.stage(j)
        total = total_lines.index(known).load(R)
        into_lines.index(place).store(gl.exp2(G_row) * norm)
        out_lines.index(place).store(gl.exp2(total * LOG2_E - G_row) * norm)
        T = solve(D, beta_line, below, work, half)
        kk = begin_chunk(keys, j + 1, tokens - (j + 1) * CHUNK)  # it runs while T is stored
        solved.tile.index(place).store(T.to(solved.tile.dtype))
        hopper.fence_async_shared()
        solved.fill(j)
    hopper.warpgroup_mma_wait(0, deps=[kk])


@gluon.jit
def begin_tokens(tokens_of, maps, gated, layer, own, TILE: gl.constexpr, C: gl.constexpr):
    """Begin to copy the first chunks, or leave the gates of the first ones."""
    request, b, hv = own
    begin, tokens, first, num_chunks = request
    keys, queries, values = tokens_of
    k_map, q_map, v_map = maps
    inputs, weights, numbers = layer
    if TILE == 0:
        for i in gl.static_range(3):
            if i < num_chunks:
                copy(keys, k_map, i, begin, hv // C.GROUP)
                if i < 2:
                    copy(queries, q_map, i, begin, hv // C.GROUP)
                    copy(values, v_map, i, begin, hv)
    else:
        head = head_weights(weights, hv, 0, C)
        raw = raw_gates(inputs, begin, gl.maximum(begin + tokens - 1, 0), hv)
        keep_gates(gated, raw, head, numbers, tokens, 0, C)


@gluon.jit
def copy_ahead(tokens_of, maps, own, j, C: gl.constexpr):
    """Begin to copy tokens in the place of those of chunk j - 1, which all are done with."""
    request, b, hv = own
    keys, queries, values = tokens_of
    k_map, q_map, v_map = maps
    begin, num_chunks = request[0], request[3]
    if j + 2 < num_chunks:
        copy(queries, q_map, j + 2, begin, hv // C.GROUP)
        copy(values, v_map, j + 2, begin, hv)
    if j + 3 < num_chunks:
        copy(keys, k_map, j + 3, begin, hv // C.GROUP)


@gluon.jit
def gates_ahead(gated, layer, own, j, C: gl.constexpr):
    """Leave the gates of four chunks, which all will need three chunks later or more."""
    request, b, hv = own
    begin, tokens = request[0], request[1]
    inputs, weights, numbers = layer
    if j % AHEAD == 1:
        turn = j // AHEAD + 1
        later = turn * (AHEAD * CHUNK)
        head = head_weights(weights, hv, 0, C)
        raw = raw_gates(inputs, begin + later, begin + tokens - 1, hv)
        keep_gates(gated, raw, head, numbers, tokens - later, turn, C)


@gluon.jit
def carry(carried, TILE: gl.constexpr, C: gl.constexpr):
    """Carry 64 rows of a state through a request's chunks, and write their outputs."""
    (
        tokens_of, solved, normed, paired, gated, factors, lines, maps, layer, out, states, slots,
        checkpoints, own,
    ) = carried  # fmt: skip
    keys, queries, values = tokens_of
    gates, beta_lines, total_lines = gated
    into_lines, out_lines = factors
    norm_lines, query_lines = lines
    numbers = layer[2]
    request, b, hv = own
    begin, tokens, first, num_chunks = request
    begin_tokens(tokens_of, maps, gated, layer, own, TILE, C)
    dtype: gl.constexpr = keys.tile.dtype
    zero = gl.full([CHUNK, CHUNK], 0.0, gl.float32, A)
    none = gl.full([CHUNK, CHUNK // 2], 0.0, gl.float32, H)
    row = TILE * 64 + gl.arange(0, 64, gl.SliceLayout(1, W))
    column = gl.arange(0, C.K, gl.SliceLayout(0, W))
    at = (hv * C.V + row)[:, None] * C.K + column[None, :]
    S = load_state(states, slots, b, at, C)
    for j in range(num_chunks):
        place = solved.stage(j)
        state = gl.convert_layout(S.to(dtype), AX)
        keys.wait_full(j)
        normed.wait_full(j)  # the rows of keys that are no tokens are zeros
        k = keys.tile.index(keys.stage(j))
        sk = hopper.warpgroup_mma(state, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        queries.wait_full(j)
        q = queries.tile.index(queries.stage(j))
        some = q.slice(TILE * 32, 32)
        kq = hopper.warpgroup_mma(k, some.permute((1, 0)), none, use_acc=False, is_async=True)
        gates.wait_full(j // AHEAD)
        G = gates.tile.index(j % (2 * AHEAD))
        norm = norms_of_rows(some, numbers, C)
        norm_line = norm_lines.index(place).slice(TILE * 32, 32)
        norm_line.store(norm)
        f_q = gl.exp2(G.slice(TILE * 32, 32).load(norm.type.layout)) * norm
        query_lines.index(place).slice(TILE * 32, 32).store(f_q)
        barrier()
        G_row = G.load(gl.SliceLayout(1, H))
        G_column = G.slice(TILE * 32, 32).load(gl.SliceLayout(0, H))
        decay = gl.exp2(-gl.abs(G_column[None, :] - G_row[:, None]))
        decay = decay * normed.tile.index(normed.stage(j)).load(gl.SliceLayout(1, H))[:, None]
        kq, sk, state, decay = hopper.warpgroup_mma_wait(0, deps=[kq, sk, state, decay])
        n = gl.arange(0, CHUNK, gl.SliceLayout(1, H))[:, None]
        r = TILE * 32 + gl.arange(0, CHUNK // 2, gl.SliceLayout(0, H))[None, :]
        P = gl.where(r >= n, kq, 0.0) * decay
        P = (P * norm_line.load(gl.SliceLayout(0, H))[None, :]).to(dtype)
        y = hopper.warpgroup_mma(state, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        P_tile = paired.tile.index(place)
        P_tile.slice(TILE * 32, 32).permute((1, 0)).store(P)
        hopper.fence_async_shared()
        paired.fill(j)
        values.wait_full(j)
        left = tokens - j * CHUNK
        if left < CHUNK:
            zero_rows(values.tile, values.stage(j), left)
        v = values.tile.index(values.stage(j)).slice(TILE * 64, 64, dim=1)
        x = v.permute((1, 0)).load(A)
        y, _ = hopper.warpgroup_mma_wait(0, deps=[y, state])
        solved.wait_full(j)
        f_in = into_lines.index(place).load(N)
        x = gl.convert_layout((x.to(gl.float32) - sk * f_in[None, :]).to(dtype), AX)
        T = solved.tile.index(place).permute((1, 0))
        u = hopper.warpgroup_mma(x, T, zero, use_acc=False, is_async=True)
        S = S * gl.exp(total_lines.index(j % (2 * AHEAD)).load(gl.SliceLayout(1, W)))[:, None]
        paired.wait_full(j)  # the other group too is done with chunk j - 1
        y = y * query_lines.index(place).load(N)[None, :]
        f_out = out_lines.index(place).load(N)
        u, _ = hopper.warpgroup_mma_wait(0, deps=[u, x])
        update = gl.convert_layout((u * f_out[None, :]).to(dtype), WX)
        S = hopper.warpgroup_mma(update, k, S, is_async=True)
        u = gl.convert_layout(u.to(dtype), AX)
        y = hopper.warpgroup_mma(u, P_tile.permute((1, 0)), y, is_async=True)
        if TILE == 0:
            copy_ahead(tokens_of, maps, own, j, C)
        S, y, _, _ = hopper.warpgroup_mma_wait(0, deps=[S, y, update, u])
        barrier()  # the outputs take the place of the values that all warps have read
        v.permute((1, 0)).store(y.to(dtype))
        barrier()
        write_outputs(v, out, begin + j * CHUNK, hv, TILE, left)
        hopper.fence_async_shared()
        solved.release(j)
        if TILE:
            gates_ahead(gated, layer, own, j, C)
        if C.CHECKPOINTS:
            keep_rows(states, gl.load(checkpoints + first + j), S, hv, TILE, C)
    write = gl.load(slots.write + b).to(gl.int64)
    if (write >= 0) & (gl.load(slots.read + b) >= 0):
        target = states.ptr + write * states.slot_stride + at
        gl.store(target, S.to(states.ptr.dtype.element_ty))


@gluon.jit
def fused_gdn_in_turn(
    k_map, q_map, v_map, inputs, weights, numbers, out, states, slots, checkpoints, chunks,
    PARTS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Run all chunks of a request and value head. Grid: (B · HV).

    PARTS: 3, or to time 1 the group that solves and 2 those that carry.

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
    keys = new_channel(gl.allocate_shared_memory(T, [4, CHUNK, 128], ROWS), 4)
    queries = new_channel(gl.allocate_shared_memory(T, [3, CHUNK, 128], ROWS), 3)
    values = new_channel(gl.allocate_shared_memory(T, [3, CHUNK, 128], ROWS), 3)
    solved = new_channel(gl.allocate_shared_memory(T, [2, CHUNK, CHUNK], SQUARE), 2)
    paired = new_channel(gl.allocate_shared_memory(T, [2, CHUNK, CHUNK], SQUARE), 2)
    works = gl.allocate_shared_memory(gl.float16, [3, CHUNK, CHUNK], HALF)
    normed = new_channel(gl.allocate_shared_memory(gl.float32, [4, CHUNK], LINE), 4)
    LINES: gl.constexpr = 2 * AHEAD
    gate_lines = gl.allocate_shared_memory(gl.float32, [LINES, CHUNK], LINE)
    beta_lines = gl.allocate_shared_memory(gl.float32, [LINES, CHUNK], LINE)
    total_lines = gl.allocate_shared_memory(gl.float32, [LINES, CHUNK], LINE)
    gated = (new_channel(gate_lines, 2), beta_lines, total_lines)
    factors, lines = (new_lines(), new_lines()), (new_lines(), new_lines())
    init_barriers((keys, normed), 1, 1)
    init_barriers((queries, values), 1, 1)
    init_barriers((solved, gated[0]), 1, 2)
    init_barriers((paired,), 2, 1)
    hopper.fence_async_shared()
    tokens_of, maps = (keys, queries, values), (k_map, q_map, v_map)
    carried = (
        tokens_of, solved, normed, paired, gated, factors, lines, maps, (inputs, weights, numbers),
        out, states, slots, checkpoints, (request, b, hv),
    )  # fmt: skip
    given = (keys, solved, normed, gated, factors, works, numbers, request)
    if PARTS == 3:
        gl.warp_specialize(
            [(carry, (carried, 0, C)), (carry, (carried, 1, C)), (solve_chunks, (given, C))],
            [4, 4],
            [200, 104],
        )
    elif PARTS == 1:
        gl.warp_specialize(
            [
                (pretend_to_carry, (carried, 0, C)),
                (pretend_to_carry, (carried, 1, C)),
                (solve_chunks, (given, C)),
            ],
            [4, 4],
            [200, 104],
        )
    else:
        gl.warp_specialize(
            [(carry, (carried, 0, C)), (carry, (carried, 1, C)), (pretend_to_solve, (given, C))],
            [4, 4],
            [200, 104],
        )
