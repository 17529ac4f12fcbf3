"""What each part of the work begins with, so that no program has to look for it."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from attn_core.backends.triton.portable.arguments import (
    ALL_UNITS,
    BEGIN,
    END,
    END_UNIT,
    FIRST_BLOCK,
    FIRST_SPAN,
    FIRST_UNIT,
    LEVEL,
    MOST_PAGES,
    NUMBER,
    PAGES,
    QUERIES,
    QUOTA,
    REQUEST,
    SPAN,
    TOKEN,
)


class Cut(NamedTuple):
    """Constants of how the work is cut, see plan_shared. WIDTH: a power of two, PARTS or more."""

    PAGE: int
    BN: int
    TILE_UNITS: int
    MIN_UNITS: int
    TURNS: int
    PARTS: int
    WIDTH: int


@triton.jit
def _quota_of(units, CUT: tl.constexpr):
    return tl.maximum(tl.cdiv(units * CUT.TURNS, CUT.PARTS), CUT.MIN_UNITS)


@triton.jit
def _first_block(start, quota, all_units, first_unit, level, begin, end, CUT: tl.constexpr):
    """Return the block of keys that parts attend to first, as split_item has it; -1 for none.

    start: the unit that a part begins with. The other numbers are those of its first span.
    """
    blocks = tl.maximum(tl.cdiv(end, CUT.BN) - begin // CUT.BN, 1)  # of a tile
    unit = (start - first_unit * CUT.TURNS) % (blocks + CUT.TILE_UNITS)  # of a tile, too
    behind = tl.minimum(unit + tl.minimum(quota, all_units - start), blocks + CUT.TILE_UNITS)
    low = tl.maximum(unit - CUT.TILE_UNITS, 0)
    high = behind - CUT.TILE_UNITS
    # what rotation_of does where nothing of the part came before
    is_complete = high - low == blocks
    remaining = tl.where(is_complete, (2 * quota - 1) % blocks, low % quota)
    rotation = 1 + tl.where(is_complete, remaining, quota - 1 - remaining)
    last = tl.where((level > 0) & (rotation < high - low), low + rotation, high) - 1
    return tl.where((high > low) & (end > 0), begin // CUT.BN + last, -1)


@triton.jit
def _store(
    first_spans, table, table_stride, ok, request, level, token, queries, begin, end, first_unit,
    end_unit, number, units, CUT: tl.constexpr,
):  # fmt: skip
    """Store the first span of each part that is `ok` [WIDTH], and the pages of its first block."""
    quota = _quota_of(units, CUT)
    part = tl.arange(0, CUT.WIDTH)
    all_units = units * CUT.TURNS
    block = _first_block(part * quota, quota, all_units, first_unit, level, begin, end, CUT)
    span = first_spans + part * FIRST_SPAN
    tl.store(span + REQUEST, request, mask=ok)
    tl.store(span + LEVEL, level, mask=ok)
    tl.store(span + TOKEN, token, mask=ok)
    tl.store(span + QUERIES, queries, mask=ok)
    tl.store(span + BEGIN, begin, mask=ok)
    tl.store(span + END, end, mask=ok)
    tl.store(span + FIRST_UNIT, first_unit, mask=ok)
    tl.store(span + END_UNIT, end_unit, mask=ok)
    tl.store(span + NUMBER, number, mask=ok)
    tl.store(span + QUOTA, quota, mask=ok)
    tl.store(span + ALL_UNITS, all_units, mask=ok)
    COUNT: tl.constexpr = max(CUT.BN // CUT.PAGE, 1)
    if COUNT <= MOST_PAGES:
        tl.store(span + FIRST_BLOCK, block, mask=ok)
        known = ok & (block >= 0)
        row = table + request.to(tl.int64) * table_stride
        for i in tl.static_range(COUNT):
            page = tl.minimum(block * CUT.BN // CUT.PAGE + i, (end - 1) // CUT.PAGE)
            tl.store(span + PAGES + i, tl.load(row + page, mask=known, other=0), mask=known)
    else:
        tl.store(span + FIRST_BLOCK, -1, mask=ok)


@triton.jit
def store_first_span(
    first_spans, table, table_stride, b, token, queries, length, first_unit, end_unit, units,
    CUT: tl.constexpr,
):  # fmt: skip
    """Store request b for the parts that begin in it, where no keys are shared; see plan_shared.

    Its work is first_unit … end_unit of all `units`, of one turn each. Parts without work have
    request 0. All requests do this at once.
    """
    quota = _quota_of(units, CUT)
    part = tl.arange(0, CUT.WIDTH)
    zero = part * 0
    start = part * quota
    begins = (start >= first_unit * CUT.TURNS) & (start < end_unit * CUT.TURNS)
    ok = (part < CUT.PARTS) & (begins | ((b == 0) & (start >= units * CUT.TURNS)))
    _store(
        first_spans, table, table_stride, ok, zero + b, zero, zero + token, zero + queries, zero,
        zero + length, zero + first_unit, zero + end_unit, zero + b, units, CUT,
    )  # fmt: skip


@triton.jit
def store_first_spans(
    work_indptr, spans, first_spans, table, table_stride, seqs, units, CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the first span of each part, of the `seqs` spans of a plan, at most BLOCK."""
    quota = _quota_of(units, CUT)
    tl.debug_barrier()  # other threads have stored what is read here
    i = tl.arange(0, BLOCK)
    end = tl.load(work_indptr + 1 + i, mask=i < seqs, other=0)
    next_part = tl.cdiv(end * CUT.TURNS, quota)  # the first that does not begin before this end
    ended = tl.histogram(next_part, CUT.WIDTH, mask=(i < seqs) & (next_part < CUT.PARTS))
    part = tl.arange(0, CUT.WIDTH)
    ok = part < CUT.PARTS
    number = tl.where(part * quota < units * CUT.TURNS, tl.cumsum(ended, 0), 0)
    span = spans + number * SPAN
    _store(
        first_spans, table, table_stride, ok,
        tl.load(span + REQUEST, mask=ok, other=0), tl.load(span + LEVEL, mask=ok, other=0),
        tl.load(span + TOKEN, mask=ok, other=0), tl.load(span + QUERIES, mask=ok, other=0),
        tl.load(span + BEGIN, mask=ok, other=0), tl.load(span + END, mask=ok, other=0),
        tl.load(work_indptr + number, mask=ok, other=0),
        tl.load(work_indptr + number + 1, mask=ok, other=0), number, units, CUT,
    )  # fmt: skip
