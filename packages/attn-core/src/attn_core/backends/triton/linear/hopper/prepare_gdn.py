"""Prefill, first kernel, for Hopper: what prepare_gdn does, with four programs a multiprocessor."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from attn_core.backends.triton.linear.gates import (
    head_ptr,
    head_weights,
    log_decay,
    update_rate,
)
from attn_core.backends.triton.linear.hopper.solve import (
    CHUNK,
    LOG2_E,
    VECTOR,
    A,
    barrier,
    decays,
    diagonal_blocks,
    inverse_of_blocks,
    norms_of,
    norms_of_rows,
    solve,
    store_square,
    sums,
)  # fmt: skip


@gluon.jit
def copy_rows(tile, x, first, head, inside_count, C: gl.constexpr):
    """Begin to copy one head of a chunk's tokens; a row without a token is zero."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, L))
    d = gl.arange(0, C.K, gl.SliceLayout(0, L))
    at = head_ptr(x, head) + first * x.token_stride
    rows = at + i[:, None] * x.token_stride + d[None, :]
    async_copy.async_copy_global_to_shared(
        tile, rows, mask=(i < inside_count)[:, None] & (d >= 0)[None, :]
    )


@gluon.jit
def load_gates(inputs, weights, numbers, first, hv, count, C: gl.constexpr):
    """Return the log decays and rates [64] of a chunk: each warp has those of all tokens."""
    i = gl.arange(0, CHUNK, gl.BlockedLayout([2], [32], [4], [0]))
    inside = i < count
    a_log, bias = head_weights(weights, hv, 0, C)
    g = head_ptr(inputs.g, hv) + (first + i) * inputs.g.token_stride
    g = gl.load(g, mask=inside, other=0.0)
    beta = head_ptr(inputs.beta, hv) + (first + i) * inputs.beta.token_stride
    beta = gl.load(beta, mask=inside, other=0.0)
    g = gl.where(inside, log_decay(g, a_log, bias, numbers.lower_bound, C), 0.0)
    return g, gl.where(inside, update_rate(beta, C), 0.0)


@gluon.jit
def prepare_chunk(k_tile, q_tile, below, vectors, g, beta, numbers, C: gl.constexpr):
    """Return what `solve` takes, P, the factors of Workspace and the chunk's decay.

    k_tile, q_tile [64, K]: in shared memory. below: where -L goes. vectors: float32 [4, 64], to
    work with; the second is beta. g, beta: of load_gates. No product is in flight in the end.
    """
    R: gl.constexpr = gl.SliceLayout(1, A)
    N: gl.constexpr = gl.SliceLayout(0, A)
    G = gl.associative_scan(g, 0, sums) * LOG2_E
    total = gl.sum(g, 0)
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, A)
    k_columns = k_tile.permute((1, 0))
    kk = hopper.warpgroup_mma(k_tile, k_columns, zero, use_acc=False, is_async=True)
    vectors.index(0).store(G)
    vectors.index(1).store(beta)
    vectors.index(3).store(norms_of_rows(q_tile, numbers.eps, C.NORM) * numbers.scale)
    barrier()
    G_row, G_column = vectors.index(0).load(R), vectors.index(0).load(N)
    kk = hopper.warpgroup_mma_wait(0, deps=[kk])
    qk = hopper.warpgroup_mma(q_tile, k_columns, zero, use_acc=False, is_async=True)
    k_norm = norms_of(kk, numbers.eps, C.NORM)
    vectors.index(2).store(k_norm)
    barrier()
    decay = decays(G_row, G_column) * vectors.index(2).load(N)[None, :]
    Z = kk * decay
    blocks = diagonal_blocks(Z)
    below.store((Z * (k_norm * -vectors.index(1).load(R))[:, None]).to(gl.float16))
    r = gl.arange(0, CHUNK, R)
    n = gl.arange(0, CHUNK, N)
    qk = hopper.warpgroup_mma_wait(0, deps=[qk])
    P = gl.where(r[:, None] >= n[None, :], qk, 0.0) * decay
    q_norm = vectors.index(3).load(R)
    into = gl.exp2(G_row)
    factors = (into * k_norm, into * q_norm, gl.exp2(total * LOG2_E - G_row) * k_norm)
    P = (P * q_norm[:, None]).to(k_tile.dtype)
    D = inverse_of_blocks(blocks, k_norm, vectors.index(1), gl.float16)
    return D, P, factors, gl.exp(total)


@gluon.jit
def prepare_item(c, hv, inputs, weights, numbers, chunks, work, C: gl.constexpr):
    """Prepare chunk `c` for value head `hv`."""
    h = hv // C.GROUP
    at = (c * C.HV + hv).to(gl.int64)
    first = gl.load(chunks.start + c).to(gl.int64)
    count = gl.load(chunks.count + c)
    dtype: gl.constexpr = inputs.k.ptr.dtype.element_ty
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, C.K], dtype)
    H: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], gl.float16)
    k_tile = gl.allocate_shared_memory(dtype, [CHUNK, C.K], L)
    q_tile = gl.allocate_shared_memory(dtype, [CHUNK, C.K], L)
    below = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], H)
    vectors = gl.allocate_shared_memory(gl.float32, [4, CHUNK], VECTOR)
    copy_rows(k_tile, inputs.k, first, h, count, C)
    copy_rows(q_tile, inputs.q, first, h, count, C)
    async_copy.commit_group()
    g, beta = load_gates(inputs, weights, numbers, first, hv, count, C)
    async_copy.wait_group(0)
    hopper.fence_async_shared()
    barrier()
    D, P, factors, decay = prepare_chunk(k_tile, q_tile, below, vectors, g, beta, numbers, C)
    f_at = work.factors + at * (3 * CHUNK) + gl.arange(0, CHUNK, gl.SliceLayout(1, A))
    for i in gl.static_range(3):
        gl.store(f_at + i * CHUNK, factors[i])
    gl.store(work.decay + at, decay)
    barrier()  # from here on, no warp's products read q and k: what follows may take their place
    k_tile._keep_alive()
    q_tile._keep_alive()
    ptr = work.T + at * (2 * CHUNK * CHUNK)
    store_square(ptr + CHUNK * CHUNK, P)
    tiles = gl.allocate_shared_memory(gl.float16, [3, CHUNK, CHUNK], H)
    store_square(ptr, solve(D, vectors.index(1), below, tiles.index(1), tiles.index(2)))


@gluon.jit
def prepare_gdn_hopper(inputs, weights, numbers, chunks, work, C: gl.constexpr):
    """Prepare a chunk for one value head. Grid: (chunks · HV)."""
    item = gl.program_id(0)
    prepare_item(item // C.HV, item % C.HV, inputs, weights, numbers, chunks, work, C)
