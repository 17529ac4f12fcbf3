"""Split-KV attention for few queries a request: decode, verify and absorbed MLA.

A tile is BM rows of one KV head of a request: (query, head of the group) pairs. The blocks of keys
of all heads form one queue of work, which a fixed number of programs share evenly: each part of it
is that of ROW_BLOCKS programs, one for each tile of its keys. They run side by side, so that these
keys are read from memory once. A tile that one program covers is finished there. Of a tile that
several programs share, each stores its partial output and LSE, and `merge_splits` merges them. A
program stores at most two partials. No grid depends on a length, so that a captured CUDA graph
serves every length. This is stream-K (arXiv:2301.03598), applied to keys.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.portable.arguments import Keys, Tree
from attn_core.backends.triton.portable.common import (
    MASKED_AT_EDGES,
    attention_loop,
    concat_acc,
    finalize,
    init_state,
    store_tile,
)
from attn_core.backends.triton.portable.dual_chunk import dual_chunk_loop
from attn_core.backends.triton.portable.loads import at_head, find_seq_idx, load_tile


@triton.jit
def quota_of(work_indptr, batch, heads, programs, SPLIT: tl.constexpr):
    """Return all units of work and the quota of one program, no less than MIN_UNITS."""
    work = tl.load(work_indptr + batch) * heads
    return work, tl.maximum(tl.cdiv(work, programs // SPLIT.ROW_BLOCKS), SPLIT.MIN_UNITS)


@triton.jit(do_not_specialize=["batch", "drafts", "table_stride", "window"])
def decode_splits(
    q,
    out,
    partial,
    requests,
    work_indptr,
    tree,
    batch,
    drafts,
    table_stride,
    cache,
    sinks,
    scales,
    window,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
    SPLIT: tl.constexpr,
    C: tl.constexpr,
):
    """Attend over this program's quota of the work.

    HEADS: KV heads. GROUP: query heads of each. A request has HEADS · ROW_BLOCKS tiles.
    BATCH_INVARIANT: every unit has a partial of its own, so that where a request is split depends
    on nothing but the request.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row_block = tl.program_id(0) % SPLIT.ROW_BLOCKS
    work, quota = quota_of(work_indptr, batch, C.HEADS, tl.num_programs(0), SPLIT)
    at = tl.program_id(0) // SPLIT.ROW_BLOCKS * quota
    end = tl.minimum(at + quota, work)
    if at < end:
        b = find_seq_idx(work_indptr, batch, at, C.HEADS, 0)
        while at < end:
            before = tl.load(work_indptr + b)
            units = tl.load(work_indptr + b + 1) - before
            head = (at - before * C.HEADS) // units
            unit = (at - before * C.HEADS) % units
            stop = unit + 1 if SPLIT.BATCH_INVARIANT else tl.minimum(unit + end - at, units)

            query = tl.load(requests.cu_seqlens_q + b)
            queries = tl.load(requests.cu_seqlens_q + b + 1) - query
            length = tl.load(requests.seq_lens + b)
            prefix = length - queries
            first = 0
            if C.WINDOW:
                first = tl.maximum(prefix - window + 1, 0)
            origin = first // BN * BN
            lo = origin + unit * (SPLIT.BLOCKS_PER_UNIT * BN)
            hi = tl.minimum(origin + stop * (SPLIT.BLOCKS_PER_UNIT * BN), tl.cdiv(length, BN) * BN)

            row = row_block * BM + tl.arange(0, BM)
            tile = load_tile(q, cache.k, row, query, queries, head, C)
            keys = Keys(
                at_head(cache, head, 0, C.PAGE),
                requests.page_table + b.to(tl.int64) * table_stride,
                first,
                length,
                prefix,
                Tree(tree.mask + b.to(tl.int64) * drafts * drafts, tree.positions + query),
                window,
                drafts,
                0,
                0,
            )
            state = init_state(BM, C.BDV, C.SPLIT_FP8_COLUMNS)
            if C.CHUNK:
                first_query = row_block * BM // C.GROUP
                last_query = (row_block * BM + BM - 1) // C.GROUP
                last_query = tl.minimum(last_query, queries - 1)
                state = dual_chunk_loop(
                    q, row, query, queries, head, state, keys, scales, lo, hi, first_query,
                    last_query, BN, STAGES, C,
                )  # fmt: skip
            else:
                state = attention_loop(
                    tile, state, keys, scales, lo, hi, BN, MASKED_AT_EDGES, STAGES, C
                )
            acc = concat_acc(state, BM, C.BDV, C.SPLIT_FP8_COLUMNS)
            dv = tl.arange(0, C.BDV)
            if stop - unit == units:
                store_tile(out, tile, state, acc, sinks, scales.v, C)
            else:
                slot = at * SPLIT.ROW_BLOCKS + row_block
                if not SPLIT.BATCH_INVARIANT:
                    slot = 2 * tl.program_id(0) + (unit == 0).to(tl.int32)
                none = state.total == 0.0
                safe = tl.where(none, 1.0, state.total)
                p_at = slot.to(tl.int64) * BM + tl.arange(0, BM)
                tl.store(partial.out + p_at[:, None] * C.BDV + dv[None, :], acc / safe[:, None])
                tl.store(partial.lse + p_at, tl.where(none, -float("inf"), state.m + tl.log2(safe)))
            at += stop - unit
            if at < end:
                b = find_seq_idx(work_indptr, batch, at, C.HEADS, 0)


@triton.jit(do_not_specialize=["batch", "programs"])
def merge_splits(
    out,
    partial,
    cu,
    work_indptr,
    batch,
    programs,
    sinks,
    v_scale,
    BM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTIALS: tl.constexpr,
    OVERLAP: tl.constexpr,
    SPLIT: tl.constexpr,
    C: tl.constexpr,
):
    """Merge the partials of ROWS rows of a tile that was split, PARTIALS at a time.

    Grid: (batch · HEADS · ROW_BLOCKS, rows of a tile / ROWS, BDV / COLUMNS). OVERLAP: the launch
    begins before the partials are complete, and waits for them (programmatic dependent launch).
    """
    tiles = C.HEADS * SPLIT.ROW_BLOCKS
    b = tl.program_id(0) // tiles
    kv_head = tl.program_id(0) % tiles // SPLIT.ROW_BLOCKS
    row_block = tl.program_id(0) % SPLIT.ROW_BLOCKS
    before = tl.load(work_indptr + b)
    units = tl.load(work_indptr + b + 1) - before
    _, quota = quota_of(work_indptr, batch, C.HEADS, programs, SPLIT)
    begin = before * C.HEADS + kv_head * units
    if SPLIT.BATCH_INVARIANT:
        low = begin
        count = units
    else:
        low = begin // quota
        count = (begin + units - 1) // quota - low + 1
    query = tl.load(cu + b)
    queries = tl.load(cu + b + 1) - query
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if count > 1:
        d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        i = tl.arange(0, PARTIALS)
        one = tl.zeros([1], tl.int32)
        for turn in tl.static_range(ROWS):
            tile_row = tl.program_id(1) * ROWS + turn
            row = row_block * BM + tile_row
            live = (tile_row < BM) & (row < queries * C.GROUP)
            m = tl.full([1], -float("inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            acc = tl.zeros([1, COLUMNS], tl.float32)
            for part in range(0, count, PARTIALS):
                ok = (part + i < count) & live
                slot = (low + part + i) * SPLIT.ROW_BLOCKS + row_block
                # the first program stored this at the end of its quota, the others at the begin
                if not SPLIT.BATCH_INVARIANT:
                    slot = 2 * slot + (part + i == 0).to(tl.int32)
                at = slot.to(tl.int64) * BM + tile_row
                s = tl.load(partial.lse + at, mask=ok, other=-float("inf"))
                x = tl.load(
                    partial.out + at[:, None] * C.BDV + d[None, :], mask=ok[:, None], other=0.0
                )
                new = tl.maximum(m, tl.max(s, 0))
                base = tl.where(new == -float("inf"), 0.0, new)
                weight = tl.exp2(s - base)
                shrink = tl.exp2(m - base)
                total = total * shrink + tl.sum(weight, 0)
                acc = acc * shrink[:, None] + tl.sum(x * weight[:, None], 0)[None, :]
                m = new
            head = kv_head * C.GROUP + row % C.GROUP
            sink = m
            if C.USE_SINKS:
                sink = tl.load(sinks + head + one, mask=live, other=0.0).to(tl.float32)
            result, lse = finalize(m, total, acc, sink, v_scale, C.USE_SINKS)
            token = (query + row // C.GROUP).to(tl.int64)
            o_at = out.ptr + token * out.token_stride + head.to(tl.int64) * out.head_stride
            inside = live & (d < C.DV)[None, :]
            tl.store(
                o_at + one[:, None] + d[None, :], result.to(out.ptr.dtype.element_ty), mask=inside
            )
            tl.store(out.lse + token * (C.HEADS * C.GROUP) + head + one, lse, mask=live)
