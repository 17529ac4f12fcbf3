"""Split-KV attention for few queries a request: decode, verify and absorbed MLA.

The blocks of keys of all requests, KV heads and row blocks form one line of work, which a fixed
number of programs cut into equal parts. A row that one program covers is finished there; of the
others each program keeps what it saw, at most two states, and `merge_splits` joins them. Neither
grid depends on a length, so that a captured CUDA graph serves every length (the idea is stream-K,
arXiv:2301.03598, applied to keys).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.portable.common import (
    attend_keys,
    find_request,
    finish,
    joined,
    unseen,
)


@triton.jit(do_not_specialize=["batch", "window"])
def plan_splits(
    cu,
    lengths,
    lines,
    batch,
    window,
    BN: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write lines[b], the units of work of a row of the requests before b; int32 [batch + 1].

    A unit is UNIT blocks of BN keys; a request without keys has one too, which writes its zeros.
    cu int32 [batch + 1] are the queries, lengths int32 [batch].
    """
    before = tl.zeros([], tl.int32)
    tl.store(lines, before)
    for low in range(0, batch, BLOCK):
        b = low + tl.arange(0, BLOCK)
        ok = b < batch
        queries = tl.load(cu + b + 1, mask=ok, other=0) - tl.load(cu + b, mask=ok, other=0)
        length = tl.load(lengths + b, mask=ok, other=0)
        first = tl.zeros([BLOCK], tl.int32)
        if WINDOW and CAUSAL:
            first = tl.maximum(length - queries - window + 1, 0)
        blocks = tl.cdiv(length, BN) - first // BN
        units = tl.where(ok & (queries > 0), tl.maximum(tl.cdiv(blocks, UNIT), 1), 0)
        tl.store(lines + b + 1, before + tl.cumsum(units, 0), mask=ok)
        before += tl.sum(units, 0)


@triton.jit
def share_of(lines, batch, rows, programs, LEAST: tl.constexpr):
    """Return all units of work and how many of them one program takes, no less than LEAST."""
    work = tl.load(lines + batch) * rows
    return work, tl.maximum(tl.cdiv(work, programs), LEAST)


@triton.jit(do_not_specialize=["batch", "window", "drafts", "table_row"])
def decode_splits(
    q,
    k_pool,
    v_pool,
    k_blocks,
    v_blocks,
    out,
    lse,
    parts,
    part_lse,
    cu,
    lengths,
    table,
    lines,
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
    UNIT: tl.constexpr,
    FIXED: tl.constexpr,
    LEAST: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    LATENT: tl.constexpr,
    FP4: tl.constexpr,
    HALVES: tl.constexpr,
    PTX: tl.constexpr,
    TWINS: tl.constexpr,
    WIDE: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SEES: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend over this program's part of the line of work.

    HEADS: KV heads. GROUP: q heads of each. A row is one of HEADS · ROW_BLOCKS of a request; its
    BM lines are (query, head of the group). FIXED: every unit has a state of its own, so that
    where a request is cut depends on nothing but the request.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    rows = HEADS * ROW_BLOCKS
    programs = tl.num_programs(0)
    work, share = share_of(lines, batch, rows, programs, LEAST)
    at = tl.program_id(0) * share
    end = tl.minimum(at + share, work)
    if at < end:
        b = find_request(lines, batch, at, HEADS * ROW_BLOCKS, 0)
        while at < end:
            before = tl.load(lines + b)
            units = tl.load(lines + b + 1) - before
            row = (at - before * rows) // units
            unit = (at - before * rows) % units
            stop = unit + 1 if FIXED else tl.minimum(unit + end - at, units)

            head = row // ROW_BLOCKS
            query = tl.load(cu + b)
            queries = tl.load(cu + b + 1) - query
            length = tl.load(lengths + b)
            prefix = length - queries
            first = 0
            if WINDOW:
                first = tl.maximum(prefix - window + 1, 0)
            origin = first // BN * BN
            lo = origin + unit * (UNIT * BN)
            hi = tl.minimum(origin + stop * (UNIT * BN), tl.cdiv(length, BN) * BN)

            line = (row % ROW_BLOCKS) * BM + tl.arange(0, BM)
            qi = line // GROUP
            live = qi < queries
            token = (query + qi).to(tl.int64)
            own_head = (head * GROUP + line % GROUP).to(tl.int64)
            q_at = token * q_token + own_head * q_head
            d1 = tl.arange(0, D1)
            in_q1 = live[:, None] & (d1 < D)[None, :]
            q1 = tl.load(q + q_at[:, None] + d1[None, :], mask=in_q1, other=0.0)
            q2 = q1
            if D2 > 0:
                d2 = D1 + tl.arange(0, D2)
                in_q2 = live[:, None] & (d2 < D)[None, :]
                q2 = tl.load(q + q_at[:, None] + d2[None, :], mask=in_q2, other=0.0)

            if not FP4 and k_pool.dtype.element_ty.primitive_bitwidth == 8:
                if (
                    q.dtype.element_ty == tl.bfloat16
                ):  # fp16 holds every fp8, and one instruction makes it
                    q1 = q1.to(tl.float16)
                    q2 = q2.to(tl.float16)
            k_off = head.to(tl.int64) * k_head
            v_off = head.to(tl.int64) * v_head
            m, total, acc, acc2 = unseen(BM, BDV, HALVES)
            m, total, acc, acc2 = attend_keys(
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
                HALVES,
                PTX,
                TWINS,
                WIDE,
                CAP,
                SEES,
                WINDOW,
                2,
                STAGES,
            )
            acc = joined(acc, acc2, BM, BDV, HALVES)
            dv = tl.arange(0, BDV)
            if stop - unit == units:
                sink = m
                if SINKS:
                    sink = tl.load(sinks + own_head).to(tl.float32)
                done, total_lse = finish(m, total, acc, sink, v_scale, SINKS)
                o_at = token * out_token + own_head * out_head
                in_out = live[:, None] & (dv < DV)[None, :]
                tl.store(
                    out + o_at[:, None] + dv[None, :], done.to(out.dtype.element_ty), mask=in_out
                )
                tl.store(lse + token * (HEADS * GROUP) + own_head, total_lse, mask=live)
            else:
                slot = at
                if not FIXED:
                    slot = 2 * tl.program_id(0) + (unit == 0).to(tl.int32)
                none = total == 0.0
                safe = tl.where(none, 1.0, total)
                p_at = slot.to(tl.int64) * BM + tl.arange(0, BM)
                tl.store(parts + p_at[:, None] * BDV + dv[None, :], acc / safe[:, None])
                tl.store(part_lse + p_at, tl.where(none, -float("inf"), m + tl.log2(safe)))
            at += stop - unit
            if at < end:
                b = find_request(lines, batch, at, HEADS * ROW_BLOCKS, 0)


@triton.jit(do_not_specialize=["batch", "programs"])
def merge_splits(
    parts,
    part_lse,
    out,
    lse,
    cu,
    lines,
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
    SINKS: tl.constexpr,
    FIXED: tl.constexpr,
    LEAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINES: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the states of LINES lines of a row that several programs saw; PARTS at a time.

    Grid: (batch · HEADS · ROW_BLOCKS, lines of a row / LINES, BDV / COLUMNS). OVERLAP: the launch
    begins before the states are complete, and waits for them here (programmatic dependent launch).
    """
    rows = HEADS * ROW_BLOCKS
    b = tl.program_id(0) // rows
    row = tl.program_id(0) % rows
    before = tl.load(lines + b)
    units = tl.load(lines + b + 1) - before
    _, share = share_of(lines, batch, rows, programs, LEAST)
    begin = before * rows + row * units
    if FIXED:
        low = begin
        count = units
    else:
        low = begin // share
        count = (begin + units - 1) // share - low + 1
    query = tl.load(cu + b)
    queries = tl.load(cu + b + 1) - query
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if count > 1:
        d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        i = tl.arange(0, PARTS)
        one = tl.zeros([1], tl.int32)
        for turn in tl.static_range(LINES):
            mine = tl.program_id(1) * LINES + turn
            line = row % ROW_BLOCKS * BM + mine
            live = (mine < BM) & (line < queries * GROUP)
            m = tl.full([1], -float("inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            acc = tl.zeros([1, COLUMNS], tl.float32)
            for part in range(0, count, PARTS):
                ok = (part + i < count) & live
                slot = low + part + i
                if not FIXED:  # the first program came to the end of its share, the others began
                    slot = 2 * slot + (part + i == 0).to(tl.int32)
                at = slot.to(tl.int64) * BM + mine
                s = tl.load(part_lse + at, mask=ok, other=-float("inf"))
                x = tl.load(parts + at[:, None] * BDV + d[None, :], mask=ok[:, None], other=0.0)
                new = tl.maximum(m, tl.max(s, 0))
                base = tl.where(new == -float("inf"), 0.0, new)
                weight = tl.exp2(s - base)
                shrink = tl.exp2(m - base)
                total = total * shrink + tl.sum(weight, 0)
                acc = acc * shrink[:, None] + tl.sum(x * weight[:, None], 0)[None, :]
                m = new
            head = row // ROW_BLOCKS * GROUP + line % GROUP
            sink = m
            if SINKS:
                sink = tl.load(sinks + head + one, mask=live, other=0.0).to(tl.float32)
            done, total_lse = finish(m, total, acc, sink, v_scale, SINKS)
            token = (query + line // GROUP).to(tl.int64)
            o_at = out + token * out_token + head.to(tl.int64) * out_head
            inside = live & (d < DV)[None, :]
            tl.store(o_at + one[:, None] + d[None, :], done.to(out.dtype.element_ty), mask=inside)
            tl.store(lse + token * (HEADS * GROUP) + head + one, total_lse, mask=live)
