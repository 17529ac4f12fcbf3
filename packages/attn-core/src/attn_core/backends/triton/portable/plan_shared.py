"""The plan of a pass whose requests share keys: one launch finds groups and their work."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.portable.arguments import (
    BEGIN,
    END,
    INNER,
    LEVEL,
    OUTER,
    QUERIES,
    REQUEST,
    SPAN,
    TOKEN,
)
from attn_core.backends.triton.portable.first_spans import store_first_span, store_first_spans

NONE = tl.constexpr(1 << 30)  # more granules than any request has


@triton.jit
def _or_least(ends_1, least_1, edge_1, ends_2, least_2, edge_2):
    """Combine two parts of a scan that begins anew where `ends` is 1: the least value, the edge."""
    minimum = tl.where(ends_2 > 0, least_2, tl.minimum(least_1, least_2))
    return ends_1 | ends_2, minimum, tl.where(ends_2 > 0, edge_2, edge_1)


@triton.jit
def _join(request, left, right, base):
    """Group neighbours that share more than `base` granules int32 [BLOCK], which their group does.

    left, right: the granules that a request shares with its neighbours. Return whether a request is
    in a group, the group's first and last request and the granules that all of its members share.
    """
    starts = (left <= base).to(tl.int32)
    _, min_before, first = tl.associative_scan(
        (starts, tl.where(right > base, right, NONE), request), 0, _or_least
    )
    starts = (right <= base).to(tl.int32)
    _, min_after, last = tl.associative_scan(
        (starts, tl.where(left > base, left, NONE), request), 0, _or_least, reverse=True
    )
    return last > first, first, last, tl.minimum(min_before, min_after)


@triton.jit
def _store_spans(spans, i, mask, request, level, token, queries, begin, end):
    """Store the fields of spans i int32 [BLOCK], but for the groups of a request."""
    span = spans + i * SPAN
    tl.store(span + REQUEST, request, mask=mask)
    tl.store(span + LEVEL, level, mask=mask)
    tl.store(span + TOKEN, token, mask=mask)
    tl.store(span + QUERIES, queries, mask=mask)
    tl.store(span + BEGIN, begin, mask=mask)
    tl.store(span + END, end, mask=mask)


@triton.jit
def _units_of(queries, length, begin, BN: tl.constexpr, TILE_UNITS: tl.constexpr):
    """Return the units of work of what a request reads alone, from key `begin` on."""
    units = tl.maximum(tl.cdiv(length, BN) - begin // BN, 1) + TILE_UNITS
    return tl.where(queries > 0, units, 0)


@triton.jit
def _store_requests(
    work_indptr, spans, request, batch, token, queries, lengths, begin,
    BN: tl.constexpr, TILE_UNITS: tl.constexpr,
):  # fmt: skip
    """Store what each request reads alone, from key `begin` on, and return its units of work."""
    ok = request < batch
    units = _units_of(queries, lengths, begin, BN, TILE_UNITS)
    tl.store(work_indptr, 0)
    tl.store(work_indptr + 1 + request, tl.cumsum(units, 0), mask=ok)
    _store_spans(spans, request, ok, request, request * 0, token, queries, begin, lengths)
    return tl.sum(units, 0)


@triton.jit
def _store_groups(
    cu,
    work_indptr,
    spans,
    batch,
    request,
    level,
    groups,
    work,
    grouped,
    first,
    last,
    begin,
    end,
    GROUP: tl.constexpr,
    GRANULE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TILE_UNITS: tl.constexpr,
):
    """Store the groups of a level as spans; return how many there are now, and their work.

    groups, work: those before. begin, end: granules.
    """
    ok = request < batch
    is_first = grouped & (request == first)
    number = groups + tl.cumsum(is_first.to(tl.int32), 0) - 1  # of the group of each request
    span = batch + number
    token = tl.load(cu + request, mask=ok, other=0)
    queries = tl.load(cu + last + 1, mask=is_first, other=0) - token
    units = tl.cdiv(queries * GROUP, BM) * ((end - begin) * (GRANULE // BN) + TILE_UNITS)
    units = tl.where(is_first, units, 0)
    tl.store(work_indptr + span + 1, work + tl.cumsum(units, 0), mask=is_first)
    _store_spans(
        spans, span, is_first, request, level + request * 0, token, queries, begin * GRANULE,
        end * GRANULE,
    )  # fmt: skip
    column = OUTER if level == 1 else INNER
    tl.store(spans + request * SPAN + column, tl.where(grouped, span, -1), mask=ok)
    return groups + tl.sum(is_first.to(tl.int32), 0), work + tl.sum(units, 0)


@triton.jit
def _compare(
    cu,
    lengths,
    table,
    common,
    counter,
    b,
    batch,
    table_stride,
    GRANULE: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store how many granules request b and the next one share; say whether it is the last one."""
    if b < batch - 1:
        middle = tl.load(cu + b + 1)
        queries = middle - tl.load(cu + b)
        next_queries = tl.load(cu + b + 2) - middle
        limit = tl.minimum(tl.load(lengths + b) - queries, tl.load(lengths + b + 1) - next_queries)
        # a group without queries would have no tile
        limit = tl.where(tl.minimum(queries, next_queries) > 0, tl.maximum(limit, 0), 0) // PAGE
        row = table + b.to(tl.int64) * table_stride
        low = 0
        while low < limit:
            i = low + tl.arange(0, WIDTH)
            valid = i < limit
            page = tl.load(row + i, mask=valid, other=0)
            next_page = tl.load(row + table_stride + i, mask=valid, other=0)
            limit = tl.min(tl.where(valid & (page != next_page), i, limit), 0)
            low += WIDTH
        tl.store(common + b, limit * PAGE // GRANULE)
    tl.debug_barrier()  # the thread that counts releases what this one stored
    last = tl.atomic_add(counter, 1) == batch - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit(do_not_specialize=["batch", "table_stride", "columns"])
def plan_shared(
    cu,
    lengths,
    table,
    buffer,
    counter,
    batch,
    table_stride,
    columns,
    GRANULE: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    CUT: tl.constexpr,
):
    """Find groups of neighbours whose first pages are equal; plan the work of groups and requests.

    Each program compares the pages of a request and the next one, WIDTH at a time. The last one to
    finish groups them (the intervals of an array of longest common prefixes), and writes the spans
    int32 [2 · batch, SPAN] and work_indptr int32 [2 · batch + 1], the units before each span. First
    come those of what each request reads alone, then those of the groups, then none. A tile has a
    unit for BN keys, and TILE_UNITS more. Queries come after all shared keys.
    Where no first pages are equal, the first program does so at once, for requests alone.

    Of a span, REQUEST is the first request, whose row of the page table has the keys; LEVEL is 0 of
    a request, 1 of a group and 2 of a group within one; TOKEN and QUERIES are the first query and
    how many there are; BEGIN and END are the first key and the one after the last. OUTER and INNER
    are the groups of a request at levels 1 and 2, -1 for none. Nothing stores or reads them if the
    pass has no groups.

    The work is cut into PARTS, of MIN_UNITS or more, KV heads take it in TURNS. If PARTS is not 0,
    each part also has a first span int32 [FIRST_SPAN]: the fields REQUEST … END of the span that it
    begins in, that span's work FIRST_UNIT … END_UNIT and its NUMBER, the QUOTA of a part, and
    ALL_UNITS of all turns. FIRST_BLOCK is the block of BN keys that it attends to first, and PAGES
    has the pages of that block. It is -1 for none, or where a block has more pages than MOST_PAGES.
    So a program has one place to look, and not the same as all others.
    """
    b = tl.program_id(0)
    request = tl.arange(0, BLOCK)
    ok = request < batch
    token = tl.load(cu + request, mask=ok, other=0)
    queries = tl.load(cu + request + 1, mask=ok, other=0) - token
    length = tl.load(lengths + request, mask=ok, other=0)
    has_next = request < batch - 1
    row = table + request.to(tl.int64) * table_stride
    page = tl.load(row, mask=ok, other=0)
    next_page = tl.load(row + table_stride, mask=has_next, other=0)
    long = length - queries >= GRANULE
    alone = tl.sum((has_next & long & (page == next_page)).to(tl.int32), 0) == 0
    spans = buffer + columns
    common = spans + SPAN * columns
    first_spans = common + columns
    zeros = request * 0
    if alone:
        units = _units_of(queries, length, zeros, CUT.BN, CUT.TILE_UNITS)
        work = tl.sum(units, 0)
        if b == 0:
            _store_requests(
                buffer, spans, request, batch, token, queries, length, zeros, CUT.BN, CUT.TILE_UNITS
            )
            tl.store(buffer + batch + 1 + request, work, mask=ok)
        if CUT.PARTS > 0:
            first_unit = tl.sum(tl.where(request < b, units, 0), 0)
            first_query = tl.load(cu + b)
            num_queries = tl.load(cu + b + 1) - first_query
            num_keys = tl.load(lengths + b)
            end_unit = first_unit + _units_of(num_queries, num_keys, 0, CUT.BN, CUT.TILE_UNITS)
            store_first_span(
                first_spans, table, table_stride, b, first_query, num_queries, num_keys,
                first_unit, end_unit, work, CUT,
            )  # fmt: skip
    elif _compare(
        cu, lengths, table, common, counter, b, batch, table_stride, GRANULE, CUT.PAGE, WIDTH
    ):
        right = tl.load(common + request, mask=has_next, other=0, cache_modifier=".cg")
        left = tl.load(common + request - 1, mask=ok & (request > 0), other=0, cache_modifier=".cg")
        in_outer, outer_first, outer_last, outer_end = _join(request, left, right, zeros)
        base = tl.where(in_outer, outer_end, NONE)
        in_inner, inner_first, inner_last, inner_end = _join(request, left, right, base)
        begin = tl.where(in_inner, inner_end, tl.where(in_outer, outer_end, 0)) * GRANULE
        work = _store_requests(
            buffer, spans, request, batch, token, queries, length, begin, CUT.BN, CUT.TILE_UNITS
        )
        groups, work = _store_groups(
            cu, buffer, spans, batch, request, 1, 0, work, in_outer, outer_first,
            outer_last, zeros, outer_end, GROUP, GRANULE, BM, CUT.BN, CUT.TILE_UNITS,
        )  # fmt: skip
        groups, work = _store_groups(
            cu, buffer, spans, batch, request, 2, groups, work, in_inner, inner_first,
            inner_last, outer_end, inner_end, GROUP, GRANULE, BM, CUT.BN, CUT.TILE_UNITS,
        )  # fmt: skip
        tl.store(buffer + batch + 1 + request, work + zeros, mask=ok & (request >= groups))
        if CUT.PARTS > 0:
            store_first_spans(
                buffer, spans, first_spans, table, table_stride, 2 * batch, work, CUT, 2 * BLOCK,
            )  # fmt: skip
