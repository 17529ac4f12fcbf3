"""Loads the partials of rows, and adds them to a state by their log-sum-exp."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Source(NamedTuple):
    """Where the partials of rows lie, int32 [n] each: those of one lane of `count` parts.

    first: the program of the first part. tile_row: the row's place in the tile. complete_row: the
    place of the only partial, where the tile was not split.
    """

    first: Any
    count: Any
    tile_row: Any
    complete_row: Any


@triton.jit
def load_partials(
    partial, part, source, row_mask, d, BM: tl.constexpr, GROUPED: tl.constexpr,
    SPLIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return partials of rows: their lse [n] and their outputs [n, len(d)]; -inf and 0 for none.

    They are n partials of one row, part int32 [n], or one of each of n rows, part int32 [1].
    GROUPED: whether a tile may be complete.
    """
    slot = source.first + part * (SPLIT.HEADS_AT_ONCE * SPLIT.ROW_BLOCKS)
    # the first program stored this at the end of its quota, the others at the begin
    if not SPLIT.BATCH_INVARIANT:
        slot = 2 * slot + (part == 0).to(tl.int32)
    row = slot.to(tl.int64) * BM + source.tile_row
    if GROUPED:
        row = tl.where(source.count == 1, source.complete_row, row)
    ok = (part < source.count) & row_mask
    s = tl.load(partial.lse + row, mask=ok, other=-float("inf"))
    x = tl.load(partial.out + row[:, None] * C.BDV + d[None, :], mask=ok[:, None], other=0.0)
    return s, x


@triton.jit
def add_loaded(m, total, acc, s, x):
    """Add what load_partials returned to the state m, total [ROWS] and acc [ROWS, len(d)]."""
    if m.shape[0] == 1:
        new = tl.maximum(m, tl.max(s, 0))
    else:
        new = tl.maximum(m, s)
    base = tl.where(new == -float("inf"), 0.0, new)
    weight = tl.exp2(s - base)
    shrink = tl.exp2(m - base)
    if m.shape[0] == 1:
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink[:, None] + tl.sum(x * weight[:, None], 0)[None, :]
    else:
        total = total * shrink + weight
        acc = acc * shrink[:, None] + x * weight[:, None]
    return new, total, acc


@triton.jit
def add_partials(
    m, total, acc, partial, source, row_mask, d, START: tl.constexpr, PARTIALS: tl.constexpr,
    BM: tl.constexpr, GROUPED: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add the partials of rows from part START on to their state.

    PARTIALS of one row are added at a time, one of several rows.
    """
    i = tl.arange(0, PARTIALS if m.shape[0] == 1 else 1)
    for part in range(START, tl.max(source.count, 0), i.shape[0]):
        s, x = load_partials(partial, part + i, source, row_mask, d, BM, GROUPED, SPLIT, C)
        m, total, acc = add_loaded(m, total, acc, s, x)
    return m, total, acc


@triton.jit
def add_first_partials(
    m, total, acc, partial, alone, shared, row_mask, d, ALONE: tl.constexpr, SHARED: tl.constexpr,
    BM: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add the first ALONE + SHARED partials of one row, from two sources, to its state.

    They are loaded at once, so that those of a group do not wait for those of its request.
    """
    i = tl.arange(0, ALONE + SHARED)
    is_shared = i >= ALONE
    source = Source(
        tl.where(is_shared, shared.first, alone.first),
        tl.where(is_shared, shared.count, alone.count),
        tl.where(is_shared, shared.tile_row, alone.tile_row),
        tl.where(is_shared, shared.complete_row, alone.complete_row),
    )
    part = tl.where(is_shared, i - ALONE, i)
    s, x = load_partials(partial, part, source, row_mask, d, BM, True, SPLIT, C)
    return add_loaded(m, total, acc, s, x)
