"""Split-KV attention for few queries a request: decode, verify and absorbed MLA.

A tile is BM rows of one KV head of a request: (query, head of the group) pairs. The blocks of keys
form one queue of work, which a fixed number of programs share evenly, or, of latents, so that parts
end where requests do (choose_quota). Each part of it is that of several programs: of each of
HEADS_AT_ONCE heads ROW_BLOCKS, one for each tile of its keys. They run side by side, so that keys
are read from memory once, and all heads of a token at about the same time. Where HEADS_AT_ONCE is
less than HEADS, a request is on the queue so many times as it takes, its next heads behind.
A tile that one program covers is finished there. Of a tile that several programs share, each stores
its partial output and LSE, and `merge_splits` merges them. A program stores at most two partials.
No grid depends on a length, so that a captured CUDA graph serves every length. This is stream-K
(arXiv:2301.03598), applied to keys.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.portable.arguments import (
    BEGIN,
    END,
    LEVEL,
    LEVELS,
    QUERIES,
    REQUEST,
    SPAN,
    TOKEN,
    Keys,
    Tree,
)
from attn_core.backends.triton.portable.common import (
    MASKED_AT_EDGES,
    attention_loop,
    concat_acc,
    init_state,
    store_tile,
)
from attn_core.backends.triton.portable.dual_chunk import dual_chunk_loop
from attn_core.backends.triton.portable.loads import at_head, find_seq_idx, load_tile


@triton.jit
def quota_of(work_indptr, seqs, heads, programs, SPLIT: tl.constexpr):
    """Return all units of work and the quota of one program, no less than MIN_UNITS.

    seqs: requests, or spans if SHARED. heads: KV heads.
    """
    work = tl.load(work_indptr + seqs) * (heads // SPLIT.HEADS_AT_ONCE)
    if SPLIT.PLANNED_QUOTA:
        return work, tl.load(work_indptr + seqs + 1)
    parts = programs // (SPLIT.HEADS_AT_ONCE * SPLIT.ROW_BLOCKS)
    return work, tl.maximum(tl.cdiv(work, parts), SPLIT.MIN_UNITS)


@triton.jit
def tile_units_of(work_indptr, seqs, SPLIT: tl.constexpr):
    """Return the units that come before the keys of each tile."""
    tile_units = SPLIT.TILE_UNITS
    if SPLIT.PLANNED_QUOTA:
        tile_units = tl.load(work_indptr + seqs + 2)
    return tile_units


@triton.jit
def whole_rows(programs, level, token, q_head, BM: tl.constexpr, C: tl.constexpr):
    """Return where partials lie that are whole for the keys of a span: after those of programs.

    Those of a token lie side by side, of what its request reads alone and then of each level.
    """
    first = programs.to(tl.int64) * (2 * BM)
    return first + (token.to(tl.int64) * (1 + LEVELS) + level) * (C.HEADS * C.GROUP) + q_head


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
    TURNS: tl.constexpr = C.HEADS // SPLIT.HEADS_AT_ONCE
    LANES: tl.constexpr = SPLIT.HEADS_AT_ONCE * SPLIT.ROW_BLOCKS
    lane = tl.program_id(0) % LANES
    row_block = lane % SPLIT.ROW_BLOCKS
    seqs = batch * 2 if SPLIT.SHARED else batch
    work, quota = quota_of(work_indptr, seqs, C.HEADS, tl.num_programs(0), SPLIT)
    position = tl.program_id(0) // LANES * quota
    end = tl.minimum(position + quota, work)
    if position < end:
        tile_units = tile_units_of(work_indptr, seqs, SPLIT)
        last = tl.maximum(end - tile_units, position + 1)  # later no keys are left
        seq = find_seq_idx(work_indptr, seqs, position, TURNS, 0)
        while position < last:
            first_unit = tl.load(work_indptr + seq)
            units = tl.load(work_indptr + seq + 1) - first_unit
            head_turn = (position - first_unit * TURNS) // units
            head = head_turn * SPLIT.HEADS_AT_ONCE + lane // SPLIT.ROW_BLOCKS
            unit = (position - first_unit * TURNS) % units

            b = seq
            first = 0
            level = 0
            if SPLIT.SHARED:
                span = spans + seq * SPAN
                b = tl.load(span + REQUEST)
                level = tl.load(span + LEVEL)
                query = tl.load(span + TOKEN)
                queries = tl.load(span + QUERIES)
                first = tl.load(span + BEGIN)
                length = tl.load(span + END)
                prefix = tl.where(level > 0, length, length - queries)
                blocks = tl.maximum(tl.cdiv(length, BN) - first // BN, 1)
                units = blocks + SPLIT.TILE_UNITS  # of one tile of several
                row_block = unit // units
                unit = unit % units
            else:
                query = tl.load(requests.cu_seqlens_q + b)
                queries = tl.load(requests.cu_seqlens_q + b + 1) - query
                length = tl.load(requests.seq_lens + b)
                prefix = length - queries
                if C.WINDOW:
                    first = tl.maximum(prefix - window + 1, 0)
            stop = unit + 1 if SPLIT.BATCH_INVARIANT else tl.minimum(unit + end - position, units)
            next_at = position + stop - unit
            if SPLIT.TILE_UNITS or SPLIT.PLANNED_QUOTA:  # from here on units of keys
                unit = tl.maximum(unit - tile_units, 0)
                stop -= tile_units
                units -= tile_units
            origin = first // BN * BN
            lo = origin + unit * (SPLIT.BLOCKS_PER_UNIT * BN)
            hi = tl.minimum(origin + stop * (SPLIT.BLOCKS_PER_UNIT * BN), tl.cdiv(length, BN) * BN)

            row = row_block * BM + tl.arange(0, BM)
            tile = load_tile(q, row, query, queries, head, C)
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
            state = init_state(BM, C.BDV, C.VALUE_PARTS)
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
            acc = concat_acc(state, BM, C.BDV, C.VALUE_PARTS)
            dv = tl.arange(0, C.BDV)
            is_complete = stop - unit == units
            if SPLIT.SHARED:
                final = is_complete & (first == 0) & (level == 0)
            else:
                final = is_complete
            if final:
                store_tile(out, tile, state, acc, sinks, scales.v, C)
            else:
                slot = position * LANES + lane
                if not SPLIT.BATCH_INVARIANT:
                    slot = 2 * tl.program_id(0) + (unit == 0).to(tl.int32)
                empty = state.total == 0.0
                safe = tl.where(empty, 1.0, state.total)
                p_at = slot.to(tl.int64) * BM + tl.arange(0, BM)
                if SPLIT.SHARED:
                    if is_complete:
                        p_at = whole_rows(tl.num_programs(0), level, tile.token, tile.q_head, BM, C)
                lse = tl.where(empty, -float("inf"), state.m + tl.log2(safe))
                p_out = partial.out + p_at[:, None] * C.BDV + dv[None, :]
                if SPLIT.SHARED:  # a row that is not live has no place of its own
                    tl.store(p_out, acc / safe[:, None], mask=tile.live[:, None])
                    tl.store(partial.lse + p_at, lse, mask=tile.live)
                else:
                    tl.store(p_out, acc / safe[:, None])
                    tl.store(partial.lse + p_at, lse)
            position = next_at
            if position < last:
                seq = find_seq_idx(work_indptr, seqs, position, TURNS, 0)
