"""Attention of many queries a request, over pages or plain K and V: prefill, encoders."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.masks import MASK_NONE, MASK_TREE
from attn_core.backends.triton.portable.arguments import Keys, Tree
from attn_core.backends.triton.portable.common import (
    MASKED,
    UNMASKED,
    attention_loop,
    concat_acc,
    init_state,
    store_tile,
)
from attn_core.backends.triton.portable.dual_chunk import dual_chunk_loop
from attn_core.backends.triton.portable.loads import at_head, find_seq_idx, load_tile


@triton.jit(do_not_specialize=["batch", "drafts", "table_stride", "window"])
def extend_tiles(
    q,
    out,
    requests,
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
    MIN_QUERIES: tl.constexpr,
    C: tl.constexpr,
):
    """Attend with one tile: BM rows, (query, head of the group) pairs of one request and KV head.

    Grid: (upper bound of all tiles, HEADS), where the bound is tokens · GROUP // BM + batch. A
    request's last tile comes first, since it sees most keys. PAGE 0: K and V are plain tensors and
    `seq_lens` is their cu_seqlens. Requests of fewer queries than MIN_QUERIES are left out.
    """
    item = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = find_seq_idx(requests.cu_seqlens_q, batch, item, C.GROUP, BM)
    query = tl.load(requests.cu_seqlens_q + b)
    queries = tl.load(requests.cu_seqlens_q + b + 1) - query
    index = item - (query * C.GROUP // BM + b)
    has_rows = index * BM < queries * C.GROUP
    if MIN_QUERIES:
        has_rows = has_rows & (queries >= MIN_QUERIES)
    if has_rows:
        row = index * BM + tl.arange(0, BM)
        begin = 0
        if C.PAGE == 0:
            begin = tl.load(requests.seq_lens + b)
            length = tl.load(requests.seq_lens + b + 1) - begin
        else:
            length = tl.load(requests.seq_lens + b)
        prefix = length - queries
        tile = load_tile(q, row, query, queries, head, C)

        # keys lo..unmasked_lo and unmasked_hi..hi need a mask, every row sees those between
        first = 0
        lo = 0
        unmasked_lo = 0
        last = length
        unmasked_hi = length // BN * BN
        if C.MASK != MASK_NONE:
            last_query = tl.minimum((index * BM + BM - 1) // C.GROUP, queries - 1)
            if C.MASK == MASK_TREE:
                unmasked_hi = tl.maximum(prefix, 0) // BN * BN
            else:
                last = tl.minimum(length, prefix + last_query + 1)
                unmasked_hi = tl.maximum(prefix + index * BM // C.GROUP + 1, 0) // BN * BN
            if C.WINDOW:
                earliest = prefix
                latest = prefix + last_query
                if C.MASK != MASK_TREE:
                    earliest += index * BM // C.GROUP
                first = tl.maximum(earliest - window + 1, 0)
                lo = first // BN * BN
                unmasked_lo = tl.cdiv(tl.maximum(latest - window + 1, 0), BN) * BN
                if C.MASK == MASK_TREE:
                    unmasked_lo = unmasked_hi  # a draft's position is not known before it is loaded
                unmasked_lo = tl.minimum(tl.maximum(unmasked_lo, lo), tl.maximum(unmasked_hi, lo))
        hi = tl.cdiv(last, BN) * BN
        unmasked_hi = tl.maximum(unmasked_hi, unmasked_lo)

        keys = Keys(
            at_head(cache, head, begin, C.PAGE),
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
        state = init_state(BM, C.BDV, C.VALUE_PARTS)
        if C.CHUNK:
            first_query = index * BM // C.GROUP
            state = dual_chunk_loop(
                q, row, query, queries, head, state, keys, scales, lo, hi, first_query,
                last_query, BN, STAGES, C,
            )  # fmt: skip
        else:
            if C.WINDOW:
                state = attention_loop(
                    tile, state, keys, scales, lo, unmasked_lo, BN, MASKED, STAGES, C
                )
            state = attention_loop(
                tile, state, keys, scales, unmasked_lo, unmasked_hi, BN, UNMASKED, STAGES, C
            )
            state = attention_loop(
                tile, state, keys, scales, unmasked_hi, hi, BN, MASKED, STAGES, C
            )
        acc = concat_acc(state, BM, C.BDV, C.VALUE_PARTS)
        store_tile(out, tile, state, acc, sinks, scales.v, C)
