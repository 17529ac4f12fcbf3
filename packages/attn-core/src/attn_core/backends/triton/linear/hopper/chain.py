"""The chain of a Hopper's scan of 64 rows: what each state waits for, and next to nothing else.

A chunk is three products, each of what the one before left: S · kᵀ, X · Tᵀ, and the next S. What
they do not wait for is done while one of them runs. Where that is decides: ptxas moves arithmetic
to where it wants, and Gluon puts a barrier of the warps between an arrival and the next use of
shared memory, so both have their place in front of a wait.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from attn_core.backends.triton.linear.hopper.fused_solve import zero_rows
from attn_core.backends.triton.linear.hopper.scan import load_state
from attn_core.backends.triton.linear.hopper.solve import CHUNK, A, barrier

W = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def values_of(keys, request, j):
    """Wait for a chunk, if there is one, and return its values."""
    ring, k_tile, v_tile, T_tile, f_tile, d_tile, o_tile = keys
    if j < request[3]:
        ring.wait_full(j)
    return v_tile.index(ring.stage(j)).permute((1, 0)).load(A).to(gl.float32)


@gluon.jit
def zero_behind(keys, request, j, C: gl.constexpr):
    """Wait for chunk j, if it has fewer than 64 tokens, and zero the rows behind the last one."""
    ring, k_tile, v_tile, T_tile, f_tile, d_tile, o_tile = keys
    left = request[1] - j * CHUNK
    if (j < request[3]) & (left < CHUNK):
        stage = ring.stage(j)
        ring.wait_full(j)
        zero_rows(k_tile, stage, left, 0, 2)
        zero_rows(v_tile, stage, left, 0, 1)
        if C.PER_CHANNEL:
            zero_rows(o_tile, stage, left, 0, 2)
        hopper.fence_async_shared()
        barrier()


@gluon.jit
def carry(carried, C: gl.constexpr):
    """Carry 64 rows of a state through a request's chunks, and leave what the outputs need.

    What the chain does not wait for is done while a product runs. Step j of what is handed over has
    the state before chunk j and what P of chunk j - 1 is multiplied by: updates, or with a decay
    per channel what they are made of.
    """
    keys, handed, states, slots, checkpoints, request, b, hv, tile = carried
    ring, k_tile, v_tile, T_tile, f_tile, d_tile, o_tile = keys
    hand, state_tile, x_tile = handed
    begin, tokens, first, num_chunks = request
    dtype: gl.constexpr = v_tile.dtype
    AX: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    WX: gl.constexpr = gl.DotOperandLayout(0, W, 2)
    zero = gl.full([64, 64], 0.0, gl.float32, A)
    row = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, W))
    column = gl.arange(0, C.K, gl.SliceLayout(0, W))
    at = (hv * C.V + row)[:, None] * C.K + column[None, :]
    S = load_state(states, slots, b, at, C)
    zero_behind(keys, request, 0, C)
    x = values_of(keys, request, 0)
    for j in range(num_chunks):
        stage = ring.stage(j)
        rounded = S.to(dtype)
        state = gl.convert_layout(rounded, AX)
        k = k_tile.index(stage)
        sk = hopper.warpgroup_mma(state, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        state_tile.index(hand.stage(j)).store(rounded)
        hopper.fence_async_shared()
        if j > 0:
            ring.release(j - 1)
        factors = f_tile.index(stage)
        if C.PER_CHANNEL:
            fade = factors.load(gl.SliceLayout(0, W))[None, :]
        else:
            fade = d_tile.index(stage).load(gl.SliceLayout(1, W))[:, None]
            f_in = factors.slice(0, 64).load(gl.SliceLayout(0, A))[None, :]
        sk, _ = hopper.warpgroup_mma_wait(0, deps=[sk, state])
        if C.PER_CHANNEL:
            x = x - sk
            k = o_tile.index(stage)
        else:
            x = x - sk * f_in
        own = x.to(dtype)
        update = gl.convert_layout(own, AX)
        T = T_tile.index(stage).permute((1, 0))
        u = hopper.warpgroup_mma(update, T, zero, use_acc=False, is_async=True)
        hand.fill(j)
        S = hopper.warpgroup_mma_wait(1, deps=[S])  # no wait: S fades while the product runs
        S = S * fade
        if not C.PER_CHANNEL:
            f_out = factors.slice(64, 64).load(gl.SliceLayout(0, A))[None, :]
        u, S, _ = hopper.warpgroup_mma_wait(0, deps=[u, S, update])
        if not C.PER_CHANNEL:
            own = u.to(dtype)
            u = u * f_out
        u = gl.convert_layout(u.to(dtype), WX)
        zero_behind(keys, request, j + 1, C)
        S = hopper.warpgroup_mma(u, k, S, is_async=True)
        hand.wait_free(j + 1)
        x_tile.index(hand.stage(j + 1)).store(own)
        x = values_of(keys, request, j + 1)
        S, _ = hopper.warpgroup_mma_wait(0, deps=[S, u])
        if C.CHECKPOINTS:
            kept = gl.load(checkpoints + first + j).to(gl.int64)
            if kept >= 0:
                target = states.ptr + kept * states.slot_stride + at
                gl.store(target, S.to(states.ptr.dtype.element_ty))
    if num_chunks > 0:
        hopper.fence_async_shared()
        hand.fill(num_chunks)
    write = gl.load(slots.write + b).to(gl.int64)
    if (write >= 0) & (gl.load(slots.read + b) >= 0):
        target = states.ptr + write * states.slot_stride + at
        gl.store(target, S.to(states.ptr.dtype.element_ty))
