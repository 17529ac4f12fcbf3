"""The span that each part of the work begins in, so that no program has to look for it."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.portable.arguments import (
    ALL_UNITS,
    BEGIN,
    END,
    END_UNIT,
    FIRST_SPAN,
    FIRST_UNIT,
    LEVEL,
    NUMBER,
    OUTER,
    QUERIES,
    QUOTA,
    REQUEST,
    SPAN,
    TOKEN,
)


@triton.jit
def _quota_of(units, MIN_UNITS: tl.constexpr, TURNS: tl.constexpr, PARTS: tl.constexpr):
    return tl.maximum(tl.cdiv(units * TURNS, PARTS), MIN_UNITS)


@triton.jit
def store_first_span(
    first_spans, b, token, queries, length, first_unit, end_unit, units,
    MIN_UNITS: tl.constexpr, TURNS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store request b for the parts that begin in it, where no keys are shared; see plan_shared.

    Its work is first_unit … end_unit of all `units`, of one turn each. Parts without work have
    request 0. All requests do this at once.
    """
    quota = _quota_of(units, MIN_UNITS, TURNS, PARTS)
    part = tl.arange(0, WIDTH)
    start = part * quota
    begins = (start >= first_unit * TURNS) & (start < end_unit * TURNS)
    ok = (part < PARTS) & (begins | ((b == 0) & (start >= units * TURNS)))
    span = first_spans + part * FIRST_SPAN
    tl.store(span + REQUEST, b, mask=ok)
    tl.store(span + LEVEL, 0, mask=ok)
    tl.store(span + TOKEN, token, mask=ok)
    tl.store(span + QUERIES, queries, mask=ok)
    tl.store(span + BEGIN, 0, mask=ok)
    tl.store(span + END, length, mask=ok)
    tl.store(span + FIRST_UNIT, first_unit, mask=ok)
    tl.store(span + END_UNIT, end_unit, mask=ok)
    tl.store(span + NUMBER, b, mask=ok)
    tl.store(span + QUOTA, quota, mask=ok)
    tl.store(span + ALL_UNITS, units * TURNS, mask=ok)


@triton.jit
def store_first_spans(
    work_indptr, spans, first_spans, seqs, units, MIN_UNITS: tl.constexpr, TURNS: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the first span of each part, of the `seqs` spans of a plan, at most BLOCK."""
    quota = _quota_of(units, MIN_UNITS, TURNS, PARTS)
    tl.debug_barrier()  # other threads have stored what is read here
    i = tl.arange(0, BLOCK)
    end = tl.load(work_indptr + 1 + i, mask=i < seqs, other=0)
    next_part = tl.cdiv(end * TURNS, quota)  # the first that does not begin before this end
    ended = tl.histogram(next_part, WIDTH, mask=(i < seqs) & (next_part < PARTS))
    part = tl.arange(0, WIDTH)
    ok = part < PARTS
    number = tl.where(part * quota < units * TURNS, tl.cumsum(ended, 0), 0)
    span = spans + number * SPAN
    first_span = first_spans + part * FIRST_SPAN
    for field in tl.static_range(OUTER):
        tl.store(first_span + field, tl.load(span + field, mask=ok), mask=ok)
    tl.store(first_span + FIRST_UNIT, tl.load(work_indptr + number, mask=ok), mask=ok)
    tl.store(first_span + END_UNIT, tl.load(work_indptr + number + 1, mask=ok), mask=ok)
    tl.store(first_span + NUMBER, number, mask=ok)
    tl.store(first_span + QUOTA, quota, mask=ok)
    tl.store(first_span + ALL_UNITS, units * TURNS, mask=ok)
