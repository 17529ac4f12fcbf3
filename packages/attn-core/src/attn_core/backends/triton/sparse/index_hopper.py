"""The scores of a prompt's queries on Hopper: keys stay in registers while queries pass by (TMA).

Two groups of four warps hold 128 FP8 keys each; one warp brings the heads of a query. A group
multiplies the next query's heads by its keys while it adds up those of the last one.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attn_core.backends.triton.hopper.channel import init_barriers, new_channel

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name in Triton 3.6
KEYS = gl.constexpr(128)  # of a group
DIM = gl.constexpr(128)
STAGES = gl.constexpr(8)  # queries in shared memory


class Keys(NamedTuple):
    """The index keys as bytes, their scales, and where a page, a token and its scales lie."""

    ptr: Any
    scales: Any
    page_stride: Any
    token_stride: Any
    scales_stride: Any


class Tokens(NamedTuple):
    """The pass: see index_scores."""

    page_table: Any
    table_stride: Any
    seq_lens: Any
    cu_seqlens_q: Any
    requests: Any
    first: Any


@gluon.jit
def next_rows(tokens, row, last, begin, TOPK: gl.constexpr):
    """Return the request of a row, its rows from the first that sees key `begin` on, and its keys.

    Row r sees length - (end - r) + 1 keys, padding all of them. Where at most TOPK are seen, no
    scores are needed.
    """
    request = gl.load(tokens.requests + tokens.first + row)
    end = gl.load(tokens.cu_seqlens_q + request + 1) - tokens.first
    length = gl.load(tokens.seq_lens + request)
    stop = gl.maximum(gl.minimum(last, end), row + 1)
    start = gl.maximum(row, gl.maximum(begin, TOPK) + end - length)
    return request, start, stop, end, length


@gluon.jit
def load_queries(
    queries, w_tiles, rows, w_rows, tokens, row, last, begin,
    HEADS: gl.constexpr, TOPK: gl.constexpr,
):  # fmt: skip
    """Fill the channel with the heads of each row that sees a key of this program, and weights."""
    step = 0
    while row < last:
        _request, start, stop, _end, _length = next_rows(tokens, row, last, begin, TOPK)
        for r in range(start, stop):
            queries.wait_free(step)
            stage = queries.stage(step)
            full = queries.full.index(stage)
            mbarrier.expect(full, HEADS * (DIM + 4))
            first = tokens.first + r
            q_tile = queries.tile.index(stage)
            tma.async_copy_global_to_shared(rows, [first * HEADS, 0], full, q_tile)
            tma.async_copy_global_to_shared(w_rows, [first, 0], full, w_tiles.index(stage))
            step += 1
        row = stop


@gluon.jit
def store_scores(products, w, scale, out, position, row, end, length):
    """Weigh the positive products [KEYS, HEADS] of a row, and store its scores of what it sees."""
    score = gl.sum(products * w[None, :], 1) * scale
    visible = gl.minimum(length - (end - row) + 1, length)
    gl.store(out + position, score, mask=position < visible)


@gluon.jit
def score_rows(
    queries, w_tiles, k_tiles, keys, tokens, scores, row_stride, row, last, begin,
    HALF: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr, TOPK: gl.constexpr,
):  # fmt: skip
    """Score keys begin + KEYS · HALF … for all rows that see key `begin`."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    K: gl.constexpr = gl.DotOperandLayout(0, S, 4)
    B: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    k_tile = k_tiles.index(HALF)
    zeros = gl.full([KEYS, HEADS], 0.0, gl.float32, S)
    W: gl.constexpr = gl.SliceLayout(0, S)
    w_vectors = w_tiles._reinterpret(
        gl.float32, [STAGES, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    position = begin + HALF * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, S))
    step = 0
    while row < last:
        request, start, stop, end, length = next_rows(tokens, row, last, begin, TOPK)
        if start < stop:
            table = tokens.page_table + request.to(gl.int64) * tokens.table_stride
            positions = begin + HALF * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, B))
            page = gl.load(table + positions // PAGE, mask=positions < length, other=0).to(gl.int64)
            offsets = page * keys.page_stride + (positions % PAGE) * keys.token_stride
            d = gl.arange(0, DIM, gl.SliceLayout(0, B))
            tile = gl.load(keys.ptr + offsets[:, None] + d[None, :])
            page = gl.load(table + position // PAGE, mask=position < length, other=0).to(gl.int64)
            scale = gl.load(keys.scales + page * keys.scales_stride + position % PAGE)
            scale = gl.where(scale < float("inf"), scale, 0.0)  # as in load_index_keys
            barrier()  # the last request's keys have been read
            k_tile.store(tile)
            barrier()
            key_tile = k_tile.load(K)
            out = scores + start.to(gl.int64) * row_stride
            queries.wait_full(step)
            heads = queries.tile.index(queries.stage(step)).permute((1, 0))
            products = gl.maximum(hopper.warpgroup_mma(key_tile, heads, zeros, use_acc=False), 0.0)
            for r in range(start + 1, stop):
                queries.wait_full(step + 1)
                heads = queries.tile.index(queries.stage(step + 1)).permute((1, 0))
                coming = hopper.warpgroup_mma(key_tile, heads, zeros, use_acc=False, is_async=True)
                w = w_vectors.index(queries.stage(step)).load(W)
                store_scores(products, w, scale, out, position, r - 1, end, length)
                # into registers of their own: the next products come while these are added up
                products = gl.maximum(hopper.warpgroup_mma_wait(0, deps=[coming]), 0.0)
                queries.release(step)  # the scores that are stored needed all of its weights
                step += 1
                out += row_stride
            w = w_vectors.index(queries.stage(step)).load(W)
            store_scores(products, w, scale, out, position, stop - 1, end, length)
            queries.release(step)
            step += 1
        row = stop


@gluon.jit(do_not_specialize=["at_once", "count", "first", "row_stride", "table_stride"])
def score_prompts_hopper(
    rows, w_rows, page_table, table_stride, seq_lens, cu_seqlens_q, requests, first, count, scores,
    row_stride, at_once, ptr, scales, page_stride, token_stride, scales_stride,
    HEADS: gl.constexpr, PAGE: gl.constexpr, TOPK: gl.constexpr,
):  # fmt: skip
    """Do what index_scores does, 2 · KEYS keys for some tokens at once, whose q TMA brings."""
    keys = Keys(ptr, scales, page_stride, token_stride, scales_stride)
    tokens = Tokens(page_table, table_stride, seq_lens, cu_seqlens_q, requests, first)
    row = gl.program_id(0) * at_once
    last = gl.minimum(row + at_once, count)
    begin = gl.program_id(1) * (2 * KEYS)
    F8: gl.constexpr = rows.dtype
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, DIM], F8)
    KL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, DIM], F8)
    q_tiles = gl.allocate_shared_memory(F8, [STAGES, HEADS, DIM], L)
    WL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    w_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, HEADS], WL)
    k_tiles = gl.allocate_shared_memory(F8, [2, KEYS, DIM], KL)
    queries = new_channel(q_tiles, STAGES)
    init_barriers((queries,), 1, 2)
    gl.warp_specialize(
        [
            (
                score_rows,
                (queries, w_tiles, k_tiles, keys, tokens, scores, row_stride, row, last, begin,
                 0, HEADS, PAGE, TOPK),
            ),
            (
                score_rows,
                (queries, w_tiles, k_tiles, keys, tokens, scores, row_stride, row, last, begin,
                 1, HEADS, PAGE, TOPK),
            ),
            (load_queries, (queries, w_tiles, rows, w_rows, tokens, row, last, begin, HEADS, TOPK)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
