"""Prefill, second kernel, for Hopper: warps that copy beside warps that carry states, in Gluon.

Two groups of four warps carry 64 rows of a head's state each; four more warps copy the chunks that
both read. The products with a chunk's queries hide behind the chain from one state to the next.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from attn_core.backends.triton.hopper.channel import init_barriers, new_channel
from attn_core.backends.triton.linear.gates import head_ptr
from attn_core.backends.triton.linear.hopper.solve import CHUNK, barrier


@gluon.jit
def copy_rows(tile, ptr, offsets, inside):
    """Begin to copy a tile; rows that are not inside are filled with zeros."""
    inside = inside & (offsets >= 0)
    async_copy.async_copy_global_to_shared(tile, ptr + offsets, mask=inside)


@gluon.jit
def load_chunks(loaded, C: gl.constexpr):
    """Copy each chunk's keys, queries, values, T over P · T, and factors."""
    ring, tiles, inputs, work, request, hv, tile = loaded
    k_tile, q_tile, v_tile, T_tile, f_tile, o_tile = tiles
    begin, tokens, first, num_chunks = request
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    N: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    F: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, L))
    d = gl.arange(0, C.K, gl.SliceLayout(0, L))
    v_row = tile * 64 + d
    both = gl.arange(0, 2 * CHUNK, gl.SliceLayout(1, N))
    columns = gl.arange(0, CHUNK, gl.SliceLayout(0, N))
    square = both[:, None] * CHUNK + columns[None, :]
    f = gl.arange(0, 128, F)
    for j in range(num_chunks):
        ring.wait_free(j)
        stage = ring.stage(j)
        start = (begin + j * CHUNK).to(gl.int64)
        chunk = ((first + j) * C.HV + hv).to(gl.int64)
        inside = (j * CHUNK + i < tokens)[:, None]
        if C.PER_CHANNEL:
            rows = i[:, None] * C.K + d[None, :]
            prepared = chunk * (CHUNK * C.K)
            copy_rows(k_tile.index(stage), work.k_in + prepared, rows, inside)
            copy_rows(q_tile.index(stage), work.q_in + prepared, rows, inside)
            copy_rows(o_tile.index(stage), work.k_out + prepared, rows, inside)
            decay = work.decay + chunk * C.K
            async_copy.async_copy_global_to_shared(f_tile.index(stage), decay + f)
        else:
            h = hv // C.GROUP
            k = head_ptr(inputs.k, h) + start * inputs.k.token_stride
            rows = i[:, None] * inputs.k.token_stride + d[None, :]
            copy_rows(k_tile.index(stage), k, rows, inside)
            q = head_ptr(inputs.q, h) + start * inputs.q.token_stride
            rows = i[:, None] * inputs.q.token_stride + d[None, :]
            copy_rows(q_tile.index(stage), q, rows, inside)
            factors = work.factors + chunk * (3 * CHUNK)
            async_copy.async_copy_global_to_shared(f_tile.index(2 * stage), factors + f)
            f_at = gl.where(f < 64, work.decay + chunk + f * 0, factors + 64 + f)
            async_copy.async_copy_global_to_shared(f_tile.index(2 * stage + 1), f_at)
        v = head_ptr(inputs.v, hv) + start * inputs.v.token_stride
        rows = i[:, None] * inputs.v.token_stride + v_row[None, :]
        copy_rows(v_tile.index(stage), v, rows, inside)
        T = work.T + chunk * (2 * CHUNK * CHUNK)
        async_copy.async_copy_global_to_shared(T_tile.index(stage), T + square)
        async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)


@gluon.jit
def write_outputs(y_tile, out, start, hv, tile, count):
    """Write the outputs of a chunk of `count` tokens from shared memory, 16 bytes a thread."""
    N: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = gl.arange(0, CHUNK, gl.SliceLayout(1, N))
    v_row = tile * 64 + gl.arange(0, 64, gl.SliceLayout(0, N))
    y = y_tile.load(N).to(out.ptr.dtype.element_ty)
    to = head_ptr(out, hv) + start.to(gl.int64) * out.token_stride
    offsets = token[:, None] * out.token_stride + v_row[None, :]
    gl.store(to + offsets, y, mask=(token < count)[:, None] & (offsets >= 0))


@gluon.jit
def load_state(states, slots, b, at, C: gl.constexpr):
    """Return the rows at `at` of the state of request `b`, zeros without one."""
    slot = gl.load(slots.read + b).to(gl.int64)
    known = slot >= 0
    if C.FRESH:
        known = known & (gl.load(slots.fresh + b) == 0)
    source = states.ptr + gl.maximum(slot, 0) * states.slot_stride + at
    return gl.load(source, mask=(at >= 0) & known, other=0.0).to(gl.float32)


@gluon.jit
def carry(carried, GROUP: gl.constexpr, C: gl.constexpr):
    """Carry 64 rows of a state through a request's chunks, and write their outputs.

    A product that the next state does not wait for is begun behind one that it waits for.
    """
    ring, tiles, y_tiles, out, states, slots, checkpoints, work, request, b, hv, tile = carried
    k_tile, q_tile, v_tile, T_tile, f_tile, o_tile = tiles
    begin, tokens, first, num_chunks = request
    tile += GROUP
    dtype: gl.constexpr = v_tile.dtype
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    AX: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    WX: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    y_tile = y_tiles.index(GROUP)
    zero = gl.full([64, 64], 0.0, gl.float32, A)
    row = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, W))
    column = gl.arange(0, C.K, gl.SliceLayout(0, W))
    at = (hv * C.V + row)[:, None] * C.K + column[None, :]
    S = load_state(states, slots, b, at, C)
    for j in range(num_chunks):
        stage = ring.stage(j)
        state = gl.convert_layout(S.to(dtype), AX)
        ring.wait_full(j)
        hopper.fence_async_shared()
        k = k_tile.index(stage)
        sk = hopper.warpgroup_mma(state, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        if j > 0:
            barrier()
            write_outputs(y_tile, out, begin + (j - 1) * CHUNK, hv, tile, CHUNK)
        x = v_tile.index(stage).slice(GROUP * 64, 64, dim=1).permute((1, 0)).load(A)
        if C.PER_CHANNEL:
            sk = hopper.warpgroup_mma_wait(0, deps=[sk])
            x = x.to(gl.float32) - sk
        else:
            factors = f_tile.index(2 * stage)
            f_in = factors.slice(0, 64).load(gl.SliceLayout(0, A))
            sk = hopper.warpgroup_mma_wait(0, deps=[sk])
            x = x.to(gl.float32) - sk * f_in[None, :]
        x = gl.convert_layout(x.to(dtype), AX)
        T = T_tile.index(stage)
        u = hopper.warpgroup_mma(
            x, T.slice(0, 64).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        q = q_tile.index(stage).permute((1, 0))
        y = hopper.warpgroup_mma(state, q, zero, use_acc=False, is_async=True)
        if C.PER_CHANNEL:
            S = S * f_tile.index(stage).load(gl.SliceLayout(0, W))[None, :]
            u = hopper.warpgroup_mma_wait(1, deps=[u])
            k_out = o_tile.index(stage)
        else:
            after = f_tile.index(2 * stage + 1)
            S = S * after.slice(0, 64).load(gl.SliceLayout(1, W))[:, None]
            f_out = after.slice(64, 64).load(gl.SliceLayout(0, A))
            u = hopper.warpgroup_mma_wait(1, deps=[u])
            x = gl.convert_layout(u.to(dtype), AX)  # what P is multiplied by; the other P is P · T
            u = u * f_out[None, :]
            k_out = k
        u = gl.convert_layout(u.to(dtype), WX)
        S = hopper.warpgroup_mma(u, k_out, S, is_async=True)
        y, _ = hopper.warpgroup_mma_wait(1, deps=[y, state])
        if not C.PER_CHANNEL:
            f_q = f_tile.index(2 * stage).slice(64, 64).load(gl.SliceLayout(0, A))
            y = y * f_q[None, :]
        y = hopper.warpgroup_mma(x, T.slice(64, 64).permute((1, 0)), y, is_async=True)
        S, _ = hopper.warpgroup_mma_wait(1, deps=[S, u])
        if C.CHECKPOINTS:
            kept = gl.load(checkpoints + first + j).to(gl.int64)
            if kept >= 0:
                target = states.ptr + kept * states.slot_stride + at
                gl.store(target, S.to(states.ptr.dtype.element_ty))
        y, _ = hopper.warpgroup_mma_wait(0, deps=[y, x])
        ring.release(j)
        y_tile.permute((1, 0)).store(y.to(dtype))
    if num_chunks > 0:
        barrier()
        start = (num_chunks - 1) * CHUNK
        write_outputs(y_tile, out, begin + start, hv, tile, tokens - start)
    write = gl.load(slots.write + b).to(gl.int64)
    if (write >= 0) & (gl.load(slots.read + b) >= 0):
        target = states.ptr + write * states.slot_stride + at
        gl.store(target, S.to(states.ptr.dtype.element_ty))


@gluon.jit
def scan_hopper(
    inputs, out, states, slots, checkpoints, chunks, work,
    STAGES: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Do what scan_chunks does, with 128 rows of a state in one program.

    Grid: (B · HV · V / 128). STAGES: chunks that are in shared memory.
    """
    TILES: gl.constexpr = C.V // 128
    tile = gl.program_id(0) % TILES * 2
    hv = gl.program_id(0) // TILES % C.HV
    b = gl.load(chunks.order + gl.program_id(0) // (TILES * C.HV))
    begin = gl.load(chunks.cu_seqlens + b)
    tokens = gl.load(chunks.cu_seqlens + b + 1) - begin
    num_chunks = gl.where(gl.load(slots.read + b) >= 0, (tokens + CHUNK - 1) // CHUNK, 0)
    request = (begin, tokens, gl.load(chunks.first + b), num_chunks)
    T: gl.constexpr = inputs.v.ptr.dtype.element_ty
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, 128], T)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * CHUNK, CHUNK], T)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_tile = gl.allocate_shared_memory(T, [STAGES, CHUNK, 128], KEYS)
    q_tile = gl.allocate_shared_memory(T, [STAGES, CHUNK, 128], KEYS)
    v_tile = gl.allocate_shared_memory(T, [STAGES, CHUNK, 128], KEYS)
    o_tile = k_tile
    FACTORS: gl.constexpr = STAGES if C.PER_CHANNEL else 2 * STAGES
    if C.PER_CHANNEL:
        o_tile = gl.allocate_shared_memory(T, [STAGES, CHUNK, 128], KEYS)
    T_tile = gl.allocate_shared_memory(T, [STAGES, 2 * CHUNK, CHUNK], SQUARE)
    f_tile = gl.allocate_shared_memory(gl.float32, [FACTORS, 128], PLAIN)
    y_tiles = gl.allocate_shared_memory(
        T, [2, CHUNK, 64], gl.NVMMASharedLayout.get_default_for([CHUNK, 64], T)
    )
    ring = new_channel(k_tile, STAGES)
    init_barriers((ring,), 128, 2)
    tiles = (k_tile, q_tile, v_tile, T_tile, f_tile, o_tile)
    carried = (ring, tiles, y_tiles, out, states, slots, checkpoints, work, request, b, hv, tile)
    loaded = (ring, tiles, inputs, work, request, hv, tile)
    gl.warp_specialize(
        [(carry, (carried, 0, C)), (carry, (carried, 1, C)), (load_chunks, (loaded, C))],
        [4, 4],
        [216, 56],
    )
