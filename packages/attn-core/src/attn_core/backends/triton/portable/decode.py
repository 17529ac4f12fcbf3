"""Split-KV attention for few queries a request: decode, verify and absorbed MLA.

A tile is BM rows of one KV head of a request: (query, head of the group) pairs. The blocks of keys
of all tiles form one queue of work, which a fixed number of programs share evenly. A tile that one
program covers is finished there. Of a tile that several programs share, each stores its partial
output and LSE, and `merge_splits` merges them. A program stores at most two partials. No grid
depends on a length, so that a captured CUDA graph serves every length. This is stream-K
(arXiv:2301.03598), applied to keys.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.portable.common import (
    MASKED_AT_EDGES,
    attention_loop,
    concat_acc,
    finalize,
    find_seq_idx,
    init_state,
)


@triton.jit(do_not_specialize=["batch", "window"])
def plan_splits(
    cu,
    lengths,
    work_indptr,
    batch,
    window,
    BN: tl.constexpr,
    BLOCKS_PER_UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write work_indptr int32 [batch + 1]: the units of work that come before each request.

    A unit is BLOCKS_PER_UNIT blocks of BN keys of one tile. The units counted are those of one tile
    of each request; its other tiles have as many. A request without keys has one unit, which writes
    zeros. cu: int32 [batch + 1], cumulated queries. lengths: int32 [batch], keys.
    """
    before = tl.zeros([], tl.int32)
    tl.store(work_indptr, before)
    for low in range(0, batch, BLOCK):
        b = low + tl.arange(0, BLOCK)
        ok = b < batch
        queries = tl.load(cu + b + 1, mask=ok, other=0) - tl.load(cu + b, mask=ok, other=0)
        length = tl.load(lengths + b, mask=ok, other=0)
        first = tl.zeros([BLOCK], tl.int32)
        if WINDOW and CAUSAL:
            first = tl.maximum(length - queries - window + 1, 0)
        blocks = tl.cdiv(length, BN) - first // BN
        units = tl.where(ok & (queries > 0), tl.maximum(tl.cdiv(blocks, BLOCKS_PER_UNIT), 1), 0)
        tl.store(work_indptr + b + 1, before + tl.cumsum(units, 0), mask=ok)
        before += tl.sum(units, 0)


@triton.jit
def quota_of(work_indptr, batch, tiles, programs, MIN_UNITS: tl.constexpr):
    """Return all units of work and the quota of one program, no less than MIN_UNITS."""
    work = tl.load(work_indptr + batch) * tiles
    return work, tl.maximum(tl.cdiv(work, programs), MIN_UNITS)


@triton.jit(do_not_specialize=["batch", "window", "drafts", "table_row"])
def decode_splits(
    q,
    k_pool,
    v_pool,
    k_blocks,
    v_blocks,
    out,
    lse,
    partial_out,
    partial_lse,
    cu,
    lengths,
    table,
    work_indptr,
    tree,
    positions,
    sinks,
    batch,
    scale,
    cap,
    v_scale,
    window,
    drafts,
    q_token,
    q_head,
    out_token,
    out_head,
    table_row,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    kb_page,
    kb_token,
    kb_head,
    vb_page,
    vb_token,
    vb_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCKS_PER_UNIT: tl.constexpr,
    BATCH_INVARIANT: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    LATENT: tl.constexpr,
    FP4: tl.constexpr,
    SPLIT_FP8_COLUMNS: tl.constexpr,
    PTX: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    USE_SOFTCAP: tl.constexpr,
    USE_SINKS: tl.constexpr,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend over this program's quota of the work.

    HEADS: KV heads. GROUP: query heads of each. A request has HEADS · ROW_BLOCKS tiles.
    BATCH_INVARIANT: every unit has a partial of its own, so that where a request is split depends
    on nothing but the request.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    tiles = HEADS * ROW_BLOCKS
    programs = tl.num_programs(0)
    work, quota = quota_of(work_indptr, batch, tiles, programs, MIN_UNITS)
    at = tl.program_id(0) * quota
    end = tl.minimum(at + quota, work)
    if at < end:
        b = find_seq_idx(work_indptr, batch, at, HEADS * ROW_BLOCKS, 0)
        while at < end:
            before = tl.load(work_indptr + b)
            units = tl.load(work_indptr + b + 1) - before
            tile = (at - before * tiles) // units
            unit = (at - before * tiles) % units
            stop = unit + 1 if BATCH_INVARIANT else tl.minimum(unit + end - at, units)

            head = tile // ROW_BLOCKS
            query = tl.load(cu + b)
            queries = tl.load(cu + b + 1) - query
            length = tl.load(lengths + b)
            prefix = length - queries
            first = 0
            if WINDOW:
                first = tl.maximum(prefix - window + 1, 0)
            origin = first // BN * BN
            lo = origin + unit * (BLOCKS_PER_UNIT * BN)
            hi = tl.minimum(origin + stop * (BLOCKS_PER_UNIT * BN), tl.cdiv(length, BN) * BN)

            row = (tile % ROW_BLOCKS) * BM + tl.arange(0, BM)
            qi = row // GROUP
            live = qi < queries
            token = (query + qi).to(tl.int64)
            q_heads = (head * GROUP + row % GROUP).to(tl.int64)
            q_at = token * q_token + q_heads * q_head
            d1 = tl.arange(0, D1)
            in_q1 = live[:, None] & (d1 < D)[None, :]
            q1 = tl.load(q + q_at[:, None] + d1[None, :], mask=in_q1, other=0.0)
            q2 = q1
            if D2 > 0:
                d2 = D1 + tl.arange(0, D2)
                in_q2 = live[:, None] & (d2 < D)[None, :]
                q2 = tl.load(q + q_at[:, None] + d2[None, :], mask=in_q2, other=0.0)

            if not FP4 and k_pool.dtype.element_ty.primitive_bitwidth == 8:
                # fp16 holds every fp8 number, and one instruction converts to it
                if q.dtype.element_ty == tl.bfloat16:
                    q1 = q1.to(tl.float16)
                    q2 = q2.to(tl.float16)
            k_off = head.to(tl.int64) * k_head
            v_off = head.to(tl.int64) * v_head
            m, total, acc, acc2 = init_state(BM, BDV, SPLIT_FP8_COLUMNS)
            m, total, acc, acc2 = attention_loop(
                q1,
                q2,
                m,
                total,
                acc,
                acc2,
                qi,
                lo,
                hi,
                first,
                length,
                prefix,
                k_pool + k_off,
                v_pool + v_off,
                k_blocks + head.to(tl.int64) * kb_head,
                v_blocks + head.to(tl.int64) * vb_head,
                table + b.to(tl.int64) * table_row,
                k_page,
                k_token,
                v_page,
                v_token,
                kb_page,
                kb_token,
                vb_page,
                vb_token,
                scale,
                cap,
                drafts,
                tree + b.to(tl.int64) * drafts * drafts,
                positions + query,
                window,
                PAGE,
                BN,
                D,
                D1,
                D2,
                DV,
                BDV,
                LATENT,
                FP4,
                SPLIT_FP8_COLUMNS,
                PTX,
                SAME_STRIDES,
                INT64_OFFSETS,
                USE_SOFTCAP,
                MASK,
                WINDOW,
                MASKED_AT_EDGES,
                STAGES,
            )
            acc = concat_acc(acc, acc2, BM, BDV, SPLIT_FP8_COLUMNS)
            dv = tl.arange(0, BDV)
            if stop - unit == units:
                sink = m
                if USE_SINKS:
                    sink = tl.load(sinks + q_heads).to(tl.float32)
                result, total_lse = finalize(m, total, acc, sink, v_scale, USE_SINKS)
                o_at = token * out_token + q_heads * out_head
                in_out = live[:, None] & (dv < DV)[None, :]
                tl.store(
                    out + o_at[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=in_out
                )
                tl.store(lse + token * (HEADS * GROUP) + q_heads, total_lse, mask=live)
            else:
                slot = at
                if not BATCH_INVARIANT:
                    slot = 2 * tl.program_id(0) + (unit == 0).to(tl.int32)
                none = total == 0.0
                safe = tl.where(none, 1.0, total)
                p_at = slot.to(tl.int64) * BM + tl.arange(0, BM)
                tl.store(partial_out + p_at[:, None] * BDV + dv[None, :], acc / safe[:, None])
                tl.store(partial_lse + p_at, tl.where(none, -float("inf"), m + tl.log2(safe)))
            at += stop - unit
            if at < end:
                b = find_seq_idx(work_indptr, batch, at, HEADS * ROW_BLOCKS, 0)


@triton.jit(do_not_specialize=["batch", "programs"])
def merge_splits(
    partial_out,
    partial_lse,
    out,
    lse,
    cu,
    work_indptr,
    sinks,
    batch,
    v_scale,
    programs,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    USE_SINKS: tl.constexpr,
    BATCH_INVARIANT: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTIALS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge the partials of ROWS rows of a tile that was split, PARTIALS at a time.

    Grid: (batch · HEADS · ROW_BLOCKS, rows of a tile / ROWS, BDV / COLUMNS). OVERLAP: the launch
    begins before the partials are complete, and waits for them (programmatic dependent launch).
    """
    tiles = HEADS * ROW_BLOCKS
    b = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    before = tl.load(work_indptr + b)
    units = tl.load(work_indptr + b + 1) - before
    _, quota = quota_of(work_indptr, batch, tiles, programs, MIN_UNITS)
    begin = before * tiles + tile * units
    if BATCH_INVARIANT:
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
            row = tile % ROW_BLOCKS * BM + tile_row
            live = (tile_row < BM) & (row < queries * GROUP)
            m = tl.full([1], -float("inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            acc = tl.zeros([1, COLUMNS], tl.float32)
            for part in range(0, count, PARTIALS):
                ok = (part + i < count) & live
                slot = low + part + i
                # the first program stored this at the end of its quota, the others at the begin
                if not BATCH_INVARIANT:
                    slot = 2 * slot + (part + i == 0).to(tl.int32)
                at = slot.to(tl.int64) * BM + tile_row
                s = tl.load(partial_lse + at, mask=ok, other=-float("inf"))
                partial_at = partial_out + at[:, None] * BDV + d[None, :]
                x = tl.load(partial_at, mask=ok[:, None], other=0.0)
                new = tl.maximum(m, tl.max(s, 0))
                base = tl.where(new == -float("inf"), 0.0, new)
                weight = tl.exp2(s - base)
                shrink = tl.exp2(m - base)
                total = total * shrink + tl.sum(weight, 0)
                acc = acc * shrink[:, None] + tl.sum(x * weight[:, None], 0)[None, :]
                m = new
            head = tile // ROW_BLOCKS * GROUP + row % GROUP
            sink = m
            if USE_SINKS:
                sink = tl.load(sinks + head + one, mask=live, other=0.0).to(tl.float32)
            result, total_lse = finalize(m, total, acc, sink, v_scale, USE_SINKS)
            token = (query + row // GROUP).to(tl.int64)
            o_at = out + token * out_token + head.to(tl.int64) * out_head
            inside = live & (d < DV)[None, :]
            tl.store(o_at + one[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=inside)
            tl.store(lse + token * (HEADS * GROUP) + head + one, total_lse, mask=live)
