"""Attention of many queries a request, over pages or plain K and V: prefill, encoders."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.masks import MASK_NONE, MASK_TREE
from attn_core.backends.triton.portable.common import (
    MASKED,
    UNMASKED,
    attention_loop,
    concat_acc,
    finalize,
    find_seq_idx,
    init_state,
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
    SPLIT_FP8_COLUMNS: tl.constexpr,
    PTX: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    USE_SOFTCAP: tl.constexpr,
    USE_SINKS: tl.constexpr,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend with one tile: BM rows, (query, head of the group) pairs of one request and KV head.

    Grid: (upper bound of all tiles, HEADS), where the bound is tokens · GROUP // BM + batch. A
    request's last tile comes first, since it sees most keys. PAGE 0: K and V are plain tensors and
    `lengths` is their cu_seqlens.
    """
    item = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = find_seq_idx(cu, batch, item, GROUP, BM)
    query = tl.load(cu + b)
    queries = tl.load(cu + b + 1) - query
    tile = item - (query * GROUP // BM + b)
    if tile * BM < queries * GROUP:
        row = tile * BM + tl.arange(0, BM)
        qi = row // GROUP
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
        # keys lo..unmasked_lo and unmasked_hi..hi need a mask, every row sees those between
        first = 0
        lo = 0
        unmasked_lo = 0
        last = length
        unmasked_hi = length // BN * BN
        if MASK != MASK_NONE:
            last_query = tl.minimum((tile * BM + BM - 1) // GROUP, queries - 1)
            if MASK == MASK_TREE:
                unmasked_hi = tl.maximum(prefix, 0) // BN * BN
            else:
                last = tl.minimum(length, prefix + last_query + 1)
                unmasked_hi = tl.maximum(prefix + tile * BM // GROUP + 1, 0) // BN * BN
            if WINDOW:
                earliest = prefix
                latest = prefix + last_query
                if MASK != MASK_TREE:
                    earliest += tile * BM // GROUP
                first = tl.maximum(earliest - window + 1, 0)
                lo = first // BN * BN
                unmasked_lo = tl.cdiv(tl.maximum(latest - window + 1, 0), BN) * BN
                if MASK == MASK_TREE:
                    unmasked_lo = unmasked_hi  # a draft's position is not known before it is loaded
                unmasked_lo = tl.minimum(tl.maximum(unmasked_lo, lo), tl.maximum(unmasked_hi, lo))
        hi = tl.cdiv(last, BN) * BN
        unmasked_hi = tl.maximum(unmasked_hi, unmasked_lo)

        m, total, acc, acc2 = init_state(BM, BDV, SPLIT_FP8_COLUMNS)
        for stage in tl.static_range(0, 3):
            if stage != 0 or WINDOW:
                if stage == 0:
                    begin_key = lo
                    end_key = unmasked_lo
                elif stage == 1:
                    begin_key = unmasked_lo
                    end_key = unmasked_hi
                else:
                    begin_key = unmasked_hi
                    end_key = hi
                m, total, acc, acc2 = attention_loop(
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
                    SPLIT_FP8_COLUMNS,
                    PTX,
                    SAME_STRIDES,
                    INT64_OFFSETS,
                    USE_SOFTCAP,
                    MASK,
                    WINDOW,
                    UNMASKED if stage == 1 else MASKED,
                    STAGES,
                )
        acc = concat_acc(acc, acc2, BM, BDV, SPLIT_FP8_COLUMNS)
        sink = m
        if USE_SINKS:
            sink = tl.load(sinks + q_heads).to(tl.float32)
        result, total_lse = finalize(m, total, acc, sink, v_scale, USE_SINKS)
        dv = tl.arange(0, BDV)
        o_at = token * out_token + q_heads * out_head
        in_out = live[:, None] & (dv < DV)[None, :]
        tl.store(out + o_at[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=in_out)
        tl.store(lse + token * (HEADS * GROUP) + q_heads, total_lse, mask=live)
