"""Attention of many queries a request, over pages or plain K and V: prefill, encoders."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.portable.common import (
    SEE_ALL,
    SEE_TREE,
    attend_keys,
    find_request,
    finish,
    joined,
    unseen,
)


@triton.jit(do_not_specialize=["batch", "window", "drafts", "table_row"])
def extend_tiles(
    q,
    k_pool,
    v_pool,
    k_blocks,
    v_blocks,
    out,
    lse,
    cu,
    lengths,
    table,
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
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
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
):
    """Attend with BM lines, (query, head of the group) pairs of one request and KV head.

    Grid: (upper bound of all tiles, HEADS): tokens · GROUP // BM + batch; a request's last tile
    comes first, since it sees most keys. PAGE 0: `lengths` is cu_seqlens of plain K and V.
    """
    item = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = find_request(cu, batch, item, GROUP, BM)
    query = tl.load(cu + b)
    queries = tl.load(cu + b + 1) - query
    tile = item - (query * GROUP // BM + b)
    if tile * BM < queries * GROUP:
        line = tile * BM + tl.arange(0, BM)
        qi = line // GROUP
        live = qi < queries
        k_off = head.to(tl.int64) * k_head
        v_off = head.to(tl.int64) * v_head
        if PAGE == 0:
            begin = tl.load(lengths + b)
            length = tl.load(lengths + b + 1) - begin
            k_off += begin.to(tl.int64) * k_token
            v_off += begin.to(tl.int64) * v_token
        else:
            length = tl.load(lengths + b)
        prefix = length - queries

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
        # keys lo..whole_lo and whole_hi..hi need a mask, those between are seen by every line
        first = 0
        lo = 0
        whole_lo = 0
        last = length
        whole_hi = length // BN * BN
        if SEES != SEE_ALL:
            last_query = tl.minimum((tile * BM + BM - 1) // GROUP, queries - 1)
            if SEES == SEE_TREE:
                whole_hi = tl.maximum(prefix, 0) // BN * BN
            else:
                last = tl.minimum(length, prefix + last_query + 1)
                whole_hi = tl.maximum(prefix + tile * BM // GROUP + 1, 0) // BN * BN
            if WINDOW:
                earliest = prefix
                latest = prefix + last_query
                if SEES != SEE_TREE:
                    earliest += tile * BM // GROUP
                first = tl.maximum(earliest - window + 1, 0)
                lo = first // BN * BN
                whole_lo = tl.cdiv(tl.maximum(latest - window + 1, 0), BN) * BN
                if SEES == SEE_TREE:
                    whole_lo = whole_hi  # a draft's position is not known before it is loaded
                whole_lo = tl.minimum(tl.maximum(whole_lo, lo), tl.maximum(whole_hi, lo))
        hi = tl.cdiv(last, BN) * BN
        whole_hi = tl.maximum(whole_hi, whole_lo)

        m, total, acc, acc2 = unseen(BM, BDV, HALVES)
        for stretch in tl.static_range(0, 3):
            if stretch != 0 or WINDOW:
                if stretch == 0:
                    begin_key = lo
                    end_key = whole_lo
                elif stretch == 1:
                    begin_key = whole_lo
                    end_key = whole_hi
                else:
                    begin_key = whole_hi
                    end_key = hi
                m, total, acc, acc2 = attend_keys(
                    q1,
                    q2,
                    m,
                    total,
                    acc,
                    acc2,
                    qi,
                    begin_key,
                    end_key,
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
                    0 if stretch == 1 else 1,
                    STAGES,
                )
        acc = joined(acc, acc2, BM, BDV, HALVES)
        sink = m
        if SINKS:
            sink = tl.load(sinks + own_head).to(tl.float32)
        done, total_lse = finish(m, total, acc, sink, v_scale, SINKS)
        dv = tl.arange(0, BDV)
        o_at = token * out_token + own_head * out_head
        in_out = live[:, None] & (dv < DV)[None, :]
        tl.store(out + o_at[:, None] + dv[None, :], done.to(out.dtype.element_ty), mask=in_out)
        tl.store(lse + token * (HEADS * GROUP) + own_head, total_lse, mask=live)
