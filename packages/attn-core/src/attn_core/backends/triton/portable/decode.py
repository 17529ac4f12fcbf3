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
def quota_of(work_indptr, seqs, heads, programs, SPLIT: tl.constexpr):
    """Return all units of work and the quota of one program, no less than MIN_UNITS.

    seqs: requests, or spans if SHARED.
    """
    work = tl.load(work_indptr + seqs) * heads
    return work, tl.maximum(tl.cdiv(work, programs // SPLIT.ROW_BLOCKS), SPLIT.MIN_UNITS)


@triton.jit
def whole_rows(programs, tokens, level, token, q_head, BM: tl.constexpr, C: tl.constexpr):
    """Return where partials lie that are whole for the keys of a span: after those of programs."""
    heads = C.HEADS * C.GROUP
    first = programs.to(tl.int64) * (2 * BM) + level.to(tl.int64) * tokens * heads
    return first + token.to(tl.int64) * heads + q_head


@triton.jit(do_not_specialize=["batch", "drafts", "table_stride", "window"])
def decode_splits(
    q,
    out,
    partial,
    requests,
    work_indptr,
    spans,
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
    on nothing but the request. SHARED: the work is that of spans, whose queries may be those of
    several requests; what a request reads in more than one span is merged.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row_block = tl.program_id(0) % SPLIT.ROW_BLOCKS
    seqs = batch * 2 if SPLIT.SHARED else batch
    work, quota = quota_of(work_indptr, seqs, C.HEADS, tl.num_programs(0), SPLIT)
    at = tl.program_id(0) // SPLIT.ROW_BLOCKS * quota
    end = tl.minimum(at + quota, work)
    if at < end:
        seq = find_seq_idx(work_indptr, seqs, at, C.HEADS, 0)
        while at < end:
            before = tl.load(work_indptr + seq)
            units = tl.load(work_indptr + seq + 1) - before
            head = (at - before * C.HEADS) // units
            unit = (at - before * C.HEADS) % units

            b = seq
            first = 0
            level = 0
            if SPLIT.SHARED:
                first = tl.load(spans.begin + seq)
                if seq < batch:
                    query = tl.load(requests.cu_seqlens_q + seq)
                    queries = tl.load(requests.cu_seqlens_q + seq + 1) - query
                    length = tl.load(requests.seq_lens + seq)
                    prefix = length - queries
                    row_block = 0
                else:
                    b = tl.load(spans.request + seq)
                    query = tl.load(spans.token + seq)
                    queries = tl.load(spans.queries + seq)
                    length = tl.load(spans.end + seq)
                    level = tl.load(spans.level + seq)
                    prefix = length
                    units = (length - first) // BN  # of one tile of several
                    row_block = unit // units
                    unit = unit % units
            else:
                query = tl.load(requests.cu_seqlens_q + b)
                queries = tl.load(requests.cu_seqlens_q + b + 1) - query
                length = tl.load(requests.seq_lens + b)
                prefix = length - queries
                if C.WINDOW:
                    first = tl.maximum(prefix - window + 1, 0)
            stop = unit + 1 if SPLIT.BATCH_INVARIANT else tl.minimum(unit + end - at, units)
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
            whole = stop - unit == units
            if SPLIT.SHARED:
                final = whole & (first == 0) & (level == 0)
            else:
                final = whole
            if final:
                store_tile(out, tile, state, acc, sinks, scales.v, C)
            else:
                slot = at * SPLIT.ROW_BLOCKS + row_block
                if not SPLIT.BATCH_INVARIANT:
                    slot = 2 * tl.program_id(0) + (unit == 0).to(tl.int32)
                none = state.total == 0.0
                safe = tl.where(none, 1.0, state.total)
                p_at = slot.to(tl.int64) * BM + tl.arange(0, BM)
                if SPLIT.SHARED:
                    if whole:
                        tokens = tl.load(requests.cu_seqlens_q + batch)
                        p_at = whole_rows(
                            tl.num_programs(0), tokens, level, tile.token, tile.q_head,
                            BM, C,
                        )  # fmt: skip
                lse = tl.where(none, -float("inf"), state.m + tl.log2(safe))
                p_out = partial.out + p_at[:, None] * C.BDV + dv[None, :]
                if SPLIT.SHARED:  # a row that is not live has no place of its own
                    tl.store(p_out, acc / safe[:, None], mask=tile.live[:, None])
                    tl.store(partial.lse + p_at, lse, mask=tile.live)
                else:
                    tl.store(p_out, acc / safe[:, None])
                    tl.store(partial.lse + p_at, lse)
            at += stop - unit
            if at < end:
                seq = find_seq_idx(work_indptr, seqs, at, C.HEADS, 0)


@triton.jit
def add_partials(
    m, total, acc, partial, low, count, tile_row, row_block, whole_at, live, d,
    PARTIALS: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add the partials of one row of a tile to its state m, total [1] and acc [1, len(d)].

    They are those of `count` programs, from `low` on. whole_at: where the only one lies if SHARED.
    """
    i = tl.arange(0, PARTIALS)
    for part in range(0, count, PARTIALS):
        ok = (part + i < count) & live
        slot = (low + part + i) * SPLIT.ROW_BLOCKS + row_block
        # the first program stored this at the end of its quota, the others at the begin
        if not SPLIT.BATCH_INVARIANT:
            slot = 2 * slot + (part + i == 0).to(tl.int32)
        at = slot.to(tl.int64) * BM + tile_row
        if SPLIT.SHARED:
            at = tl.where(count == 1, whole_at, at)
        s = tl.load(partial.lse + at, mask=ok, other=-float("inf"))
        x = tl.load(partial.out + at[:, None] * C.BDV + d[None, :], mask=ok[:, None], other=0.0)
        new = tl.maximum(m, tl.max(s, 0))
        base = tl.where(new == -float("inf"), 0.0, new)
        weight = tl.exp2(s - base)
        shrink = tl.exp2(m - base)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink[:, None] + tl.sum(x * weight[:, None], 0)[None, :]
        m = new
    return m, total, acc


@triton.jit(do_not_specialize=["batch", "programs"])
def merge_splits(
    out,
    partial,
    cu,
    work_indptr,
    spans,
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
    SHARED: the partials of the request alone come first, then those of its groups by level.
    """
    tiles = C.HEADS * SPLIT.ROW_BLOCKS
    b = tl.program_id(0) // tiles
    kv_head = tl.program_id(0) % tiles // SPLIT.ROW_BLOCKS
    row_block = tl.program_id(0) % SPLIT.ROW_BLOCKS
    seqs = batch * 2 if SPLIT.SHARED else batch
    before = tl.load(work_indptr + b)
    units = tl.load(work_indptr + b + 1) - before
    _, quota = quota_of(work_indptr, seqs, C.HEADS, programs, SPLIT)
    begin = before * C.HEADS + kv_head * units
    if SPLIT.BATCH_INVARIANT:
        low = begin
        count = units
    else:
        low = begin // quota
        count = (begin + units - 1) // quota - low + 1
    query = tl.load(cu + b)
    queries = tl.load(cu + b + 1) - query
    outer = -1
    inner = -1
    tokens = 0
    if SPLIT.SHARED:
        outer = tl.load(spans.group + b)
        inner = tl.load(spans.group + batch + b)
        tokens = tl.load(cu + batch)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if (count > 1) | (outer >= 0):
        d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        one = tl.zeros([1], tl.int32)
        for turn in tl.static_range(ROWS):
            tile_row = tl.program_id(1) * ROWS + turn
            row = row_block * BM + tile_row
            live = (tile_row < BM) & (row < queries * C.GROUP)
            token = (query + row // C.GROUP).to(tl.int64)
            head = kv_head * C.GROUP + row % C.GROUP
            m = tl.full([1], -float("inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            acc = tl.zeros([1, COLUMNS], tl.float32)
            whole_at = 0
            if SPLIT.SHARED:
                whole_at = whole_rows(programs, tokens, one, token, head, BM, C)
            m, total, acc = add_partials(
                m, total, acc, partial, low, count, tile_row, row_block, whole_at, live, d,
                PARTIALS, BM, SPLIT, C,
            )  # fmt: skip
            if SPLIT.SHARED:
                for level in tl.static_range(1, 3):
                    span = outer if level == 1 else inner
                    if (outer >= 0) & (span >= 0):  # without groups nothing is known of levels
                        s_before = tl.load(work_indptr + span)
                        s_units = tl.load(work_indptr + span + 1) - s_before
                        s_row = (query - tl.load(spans.token + span)) * C.GROUP + row
                        s_tiles = tl.cdiv(tl.load(spans.queries + span) * C.GROUP, BM)
                        blocks = s_units // s_tiles
                        s_begin = s_before * C.HEADS + kv_head * s_units + s_row // BM * blocks
                        s_low = s_begin // quota
                        s_count = (s_begin + blocks - 1) // quota - s_low + 1
                        whole_at = whole_rows(programs, tokens, one + level, token, head, BM, C)
                        m, total, acc = add_partials(
                            m, total, acc, partial, s_low, s_count, s_row % BM, 0, whole_at, live,
                            d, PARTIALS, BM, SPLIT, C,
                        )  # fmt: skip
            sink = m
            if C.USE_SINKS:
                sink = tl.load(sinks + head + one, mask=live, other=0.0).to(tl.float32)
            result, lse = finalize(m, total, acc, sink, v_scale, C.USE_SINKS)
            o_at = out.ptr + token * out.token_stride + head.to(tl.int64) * out.head_stride
            inside = live & (d < C.DV)[None, :]
            tl.store(
                o_at + one[:, None] + d[None, :], result.to(out.ptr.dtype.element_ty), mask=inside
            )
            tl.store(out.lse + token * (C.HEADS * C.GROUP) + head + one, lse, mask=live)
