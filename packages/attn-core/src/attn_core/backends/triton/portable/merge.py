"""Merges the partials that split-KV attention leaves, by their log-sum-exp."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.portable.arguments import INNER, OUTER, QUERIES, SPAN, TOKEN
from attn_core.backends.triton.portable.common import finalize
from attn_core.backends.triton.portable.decode import quota_of, tile_units_of, whole_rows
from attn_core.backends.triton.portable.partials import Source, add_first_partials, add_partials


@triton.jit
def count_ended(work_indptr, seqs, unit, TURNS: tl.constexpr):
    """Return how many sequences end no later than a unit: that of the unit."""
    i = tl.arange(0, 128)
    num_ended = tl.zeros([128], tl.int32)
    for low in range(0, seqs, 128):
        ok = low + i < seqs
        ends = tl.load(work_indptr + 1 + low + i, mask=ok, other=0)
        num_ended += (ok & (ends * TURNS <= unit)).to(tl.int32)
    return tl.sum(num_ended, 0)


@triton.jit
def find_group(work_indptr, spans, span, BM: tl.constexpr, C: tl.constexpr):
    """Return where the work of a group begins, its units, those of a tile, and its first query.

    span: that of the group; all are 0 where it is -1.
    """
    in_group = span >= 0
    first_unit = tl.load(work_indptr + span, mask=in_group, other=0)
    units = tl.load(work_indptr + span + 1, mask=in_group, other=0) - first_unit
    fields = spans + span * SPAN
    tiles = tl.cdiv(tl.load(fields + QUERIES, mask=in_group, other=0) * C.GROUP, BM)
    query = tl.load(fields + TOKEN, mask=in_group, other=0)
    return first_unit, units, units // tl.maximum(tiles, 1), query


@triton.jit
def find_rows(
    query, queries, kv_head, row_block, BM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return which rows and columns of a tile of a request's queries a program merges.

    They are the rows' places in the tile, their numbers in the request, which of them there are,
    their tokens and heads; and the columns.
    """
    tile_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = row_block * BM + tile_row
    row_mask = (tile_row < BM) & (row < queries * C.GROUP)
    token = (query + row // C.GROUP).to(tl.int64)
    head = kv_head * C.GROUP + row % C.GROUP
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    return tile_row, row, row_mask, token, head, d


@triton.jit
def store_merged(
    m, total, acc, out, sinks, v_scale, token, head, row_mask, d, C: tl.constexpr
):  # fmt: skip
    """Store outputs of rows and their LSE, of a state with all their partials."""
    sink = m
    if C.USE_SINKS:
        sink = tl.load(sinks + head, mask=row_mask, other=0.0).to(tl.float32)
    result, lse = finalize(m, total, acc, sink, v_scale, C.USE_SINKS)
    offsets = token * out.token_stride + head.to(tl.int64) * out.head_stride
    mask = row_mask[:, None] & (d < C.DV)[None, :]
    out_ptrs = out.ptr + offsets[:, None] + d[None, :]
    tl.store(out_ptrs, result.to(out.ptr.dtype.element_ty), mask=mask)
    tl.store(out.lse + token * (C.HEADS * C.GROUP) + head, lse, mask=row_mask)


@triton.jit
def merge_alone(
    out, partial, sinks, v_scale, rows, low, count, lane,
    BM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTIALS: tl.constexpr,
    OVERLAP: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Merge the `count` partials of rows, see find_rows, where no request is in a group."""
    LANES: tl.constexpr = SPLIT.HEADS_AT_ONCE * SPLIT.ROW_BLOCKS
    tile_row, _, row_mask, token, head, d = rows
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if count > 1:
        zero = tl.zeros([ROWS], tl.int32)
        m = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        source = Source(zero + low * LANES + lane, zero + count, tile_row, zero)
        m, total, acc = add_partials(
            m, total, acc, partial, source, row_mask, d, 0, PARTIALS, BM, False, SPLIT, C
        )
        store_merged(m, total, acc, out, sinks, v_scale, token, head, row_mask, d, C)


@triton.jit
def source_of_group(
    group, query, row, complete_row, head_turn, quota, lane, TURNS: tl.constexpr,
    LANES: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return the Source of what a group leaves of rows of a request.

    group: see find_group. row [ROWS]: of the request, whose first query is `query`.
    """
    first_unit, units, tile_units, first_query = group
    row = (query - first_query) * C.GROUP + row
    begin = first_unit * TURNS + head_turn * units + row // BM * tile_units
    first = (begin + SPLIT.TILE_UNITS) // quota
    count = (begin + tile_units - 1) // quota - first + 1
    count = tl.where(tile_units > 0, count, 0)
    return Source(first * LANES + lane, count, row % BM, complete_row)


@triton.jit
def merge_grouped(
    out, partial, work_indptr, spans, sinks, v_scale, programs, quota, b, query, head_turn, rows,
    low, count, lane,
    BM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTIALS: tl.constexpr,
    GROUP_PARTIALS: tl.constexpr, OVERLAP: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Merge the `count` partials of a request alone, and then those of its groups by level.

    query: the first one of request b. GROUP_PARTIALS: those that are loaded at first, two of the
    request and the others of its outer group; 0 of several rows.
    """
    TURNS: tl.constexpr = C.HEADS // SPLIT.HEADS_AT_ONCE
    LANES: tl.constexpr = SPLIT.HEADS_AT_ONCE * SPLIT.ROW_BLOCKS
    ALONE: tl.constexpr = 2 if GROUP_PARTIALS > 0 else 0
    SHARED: tl.constexpr = GROUP_PARTIALS - ALONE
    tile_row, row, row_mask, token, head, d = rows
    outer = tl.load(spans + b * SPAN + OUTER)
    inner = tl.load(spans + b * SPAN + INNER)
    outer_group = find_group(work_indptr, spans, outer, BM, C)
    inner_group = find_group(work_indptr, spans, inner, BM, C)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if (count > 1) | (outer >= 0):
        zero = tl.zeros([ROWS], tl.int32)
        m = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        complete_row = whole_rows(programs, 0, token, head, BM, C)
        alone = Source(zero + low * LANES + lane, zero + count, tile_row, complete_row)
        complete_row = whole_rows(programs, 1, token, head, BM, C)
        shared = source_of_group(
            outer_group, query, row, complete_row, head_turn, quota, lane, TURNS, LANES, BM,
            SPLIT, C,
        )  # fmt: skip
        if GROUP_PARTIALS > 0:
            m, total, acc = add_first_partials(
                m, total, acc, partial, alone, shared, row_mask, d, ALONE, SHARED, BM, SPLIT, C
            )
        m, total, acc = add_partials(
            m, total, acc, partial, alone, row_mask, d, ALONE, PARTIALS, BM, True, SPLIT, C
        )
        m, total, acc = add_partials(
            m, total, acc, partial, shared, row_mask, d, SHARED, PARTIALS, BM, True, SPLIT, C
        )
        complete_row = whole_rows(programs, 2, token, head, BM, C)
        shared = source_of_group(
            inner_group, query, row, complete_row, head_turn, quota, lane, TURNS, LANES, BM,
            SPLIT, C,
        )  # fmt: skip
        m, total, acc = add_partials(
            m, total, acc, partial, shared, row_mask, d, 0, PARTIALS, BM, True, SPLIT, C
        )
        store_merged(m, total, acc, out, sinks, v_scale, token, head, row_mask, d, C)


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
    GROUP_PARTIALS: tl.constexpr,
    OVERLAP: tl.constexpr,
    BY_CUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    C: tl.constexpr,
):
    """Merge the partials of ROWS rows of a tile that was split. ROWS is a power of two.

    Grid: (batch · HEADS · ROW_BLOCKS, rows of a tile / ROWS, BDV / COLUMNS), of tiles; BY_CUTS:
    (programs, …), of those of decode_splits, for the tile that is cut at the end of each one's
    quota. GROUP_PARTIALS: see merge_grouped. OVERLAP: the launch begins before the partials are
    complete, and waits for them (programmatic dependent launch). Before the wait it loads only what
    decode does not store.
    SHARED: a pass without groups runs merge_alone, which lies first and in one piece. A jump over
    instructions that no cache holds would wait for memory.
    """
    TURNS: tl.constexpr = C.HEADS // SPLIT.HEADS_AT_ONCE
    LANES: tl.constexpr = SPLIT.HEADS_AT_ONCE * SPLIT.ROW_BLOCKS
    seqs = batch * 2 if SPLIT.SHARED else batch
    work, quota = quota_of(work_indptr, seqs, C.HEADS, programs, SPLIT)
    row_block = tl.program_id(0) % SPLIT.ROW_BLOCKS
    cut = tl.program_id(0) // LANES
    if BY_CUTS:
        lane = tl.program_id(0) % LANES
        unit = tl.minimum((cut + 1) * quota, work - 1)  # the first one behind the cut
        b = count_ended(work_indptr, batch, unit, TURNS)
        first_unit = tl.load(work_indptr + b)
        units = tl.load(work_indptr + b + 1) - first_unit
        head_turn = (unit - first_unit * TURNS) // tl.maximum(units, 1)
        kv_head = head_turn * SPLIT.HEADS_AT_ONCE + lane // SPLIT.ROW_BLOCKS
    else:
        tiles = C.HEADS * SPLIT.ROW_BLOCKS
        b = tl.program_id(0) // tiles
        kv_head = tl.program_id(0) % tiles // SPLIT.ROW_BLOCKS
        head_turn = kv_head // SPLIT.HEADS_AT_ONCE
        lane = kv_head % SPLIT.HEADS_AT_ONCE * SPLIT.ROW_BLOCKS + row_block
        first_unit = tl.load(work_indptr + b)
        units = tl.load(work_indptr + b + 1) - first_unit
    begin = first_unit * TURNS + head_turn * units
    if SPLIT.BATCH_INVARIANT:
        low = begin
        count = units
    else:
        low = (begin + tile_units_of(work_indptr, seqs, SPLIT)) // quota
        count = (begin + units - 1) // quota - low + 1
    if BY_CUTS:
        count = tl.where(low == cut, count, 0)  # another one is the tile's first cut
    if SPLIT.SHARED:
        # decode has brought spans into the cache, but not cu
        query = tl.load(spans + b * SPAN + TOKEN)
        queries = tl.load(spans + b * SPAN + QUERIES)
    else:
        query = tl.load(cu + b)
        queries = tl.load(cu + b + 1) - query
    rows = find_rows(query, queries, kv_head, row_block, BM, ROWS, COLUMNS, C)
    if SPLIT.SHARED:
        if tl.load(work_indptr + batch) * TURNS == work:
            merge_alone(
                out, partial, sinks, v_scale, rows, low, count, lane,
                BM, ROWS, COLUMNS, PARTIALS, OVERLAP, SPLIT, C,
            )  # fmt: skip
        else:
            merge_grouped(
                out, partial, work_indptr, spans, sinks, v_scale, programs, quota, b, query,
                head_turn, rows, low, count, lane,
                BM, ROWS, COLUMNS, PARTIALS, GROUP_PARTIALS, OVERLAP, SPLIT, C,
            )  # fmt: skip
    else:
        merge_alone(
            out, partial, sinks, v_scale, rows, low, count, lane,
            BM, ROWS, COLUMNS, PARTIALS, OVERLAP, SPLIT, C,
        )  # fmt: skip
