"""Dual chunk attention in one pass over the keys: each part of them meets its own queries."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.portable.arguments import Keys, Queries, State
from attn_core.backends.triton.portable.common import MASKED_AT_EDGES, attention_loop
from attn_core.backends.triton.portable.loads import load_tile


@triton.jit
def dual_chunk_loop(
    q,
    row,
    query,
    queries,
    head,
    state,
    keys,
    scales,
    lo,
    hi,
    first_query,
    last_query,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    C: tl.constexpr,
):
    """Attend over keys lo..hi, multiples of BN, with the rows of one tile; return the new state.

    q [T, 3 · Hq, D]: a token's intra queries, then succ, then inter. row, query, queries, head: as
    load_tile takes them. first_query, last_query: of the rows, counted from 0. Rows of several
    chunks are attended chunk by chunk.
    """
    m, total, acc = state
    prefix = keys.prefix
    chunk = (prefix + first_query) // C.CHUNK
    last_chunk = (prefix + last_query) // C.CHUNK
    rotation_stride = q.head_stride * (C.HEADS * C.GROUP)
    # the keys of all earlier chunks, of the chunk before and of the rows' own, in this order
    for part in range(3 * chunk, 3 * last_chunk + 3):
        own_chunk = part // 3
        rotation = 2 - part % 3
        first = tl.where(rotation == 2, 0, tl.maximum(own_chunk - rotation, 0) * C.CHUNK)
        end = tl.minimum(tl.maximum(own_chunk - rotation + 1, 0) * C.CHUNK, keys.length)
        seen_by_all = end
        if rotation == 0:
            seen_by_all = tl.minimum(end, prefix + first_query + 1)
        if chunk != last_chunk:
            seen_by_all = end * 0
        rotated = Queries(
            q.ptr + tl.cast(rotation, tl.int64) * rotation_stride, q.token_stride, q.head_stride
        )
        tile = load_tile(rotated, row, query, queries, head, C)
        part_keys = Keys(
            keys.cache, keys.table, first, end, prefix, keys.tree, keys.window, keys.drafts,
            own_chunk, seen_by_all,
        )  # fmt: skip
        m, total, acc = attention_loop(
            tile,
            State(m, total, acc),
            part_keys,
            scales,
            tl.maximum(lo, first // BN * BN),
            tl.minimum(hi, tl.cdiv(end, BN) * BN),
            BN,
            MASKED_AT_EDGES,
            STAGES,
            C,
        )
    return State(m, total, acc)
