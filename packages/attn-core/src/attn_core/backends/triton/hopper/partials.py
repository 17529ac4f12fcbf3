"""Where Hopper's decode stores the partial states that merge_splits merges."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_core.backends.triton.portable.arguments import LEVELS


@gluon.jit
def is_whole(item):
    """Say whether an item has all keys of its tile."""
    return item.end_unit - item.start_unit == item.num_units


@gluon.jit
def is_final(item, CONFIG: gl.constexpr):
    """Say whether an item has all keys of its rows, so that its output is the final one."""
    final = is_whole(item)
    if CONFIG.SHARED:
        final = final & (item.level == 0) & (item.first_key == 0)
    return final


@gluon.jit
def first_row_of(item, half, CONFIG: gl.constexpr):
    """Return the first of the 64 rows of an item's tile that a group of warps holds."""
    return item.row_block * CONFIG.TILE_ROWS + half * 64


@gluon.jit
def state_place(work, unit, item, CONFIG: gl.constexpr):
    """Return where the partial state lies of an item that begins at a unit, see partial_rows.

    It is the number of a slot. Each unit has one for each program of a part if BATCH_INVARIANT;
    else a program has two, the second for a tile's start. If SHARED and the item has all keys of
    its tile, it is token · (1 + LEVELS) + level of its first token, see whole_rows in
    portable/decode.py.
    """
    if CONFIG.BATCH_INVARIANT:
        place = unit * (CONFIG.HEADS_AT_ONCE * CONFIG.ROW_BLOCKS) + work.lane
    else:
        place = 2 * gl.program_id(0) + (item.start_unit == 0).to(gl.int32)
    if CONFIG.SHARED:
        place = gl.where(is_whole(item), item.q_start * (1 + LEVELS) + item.level, place)
    return place


@gluon.jit
def partial_rows(place, item, rows, CONFIG: gl.constexpr):
    """Return where the partial states of rows of an item's tile lie, see decode_splits."""
    first = place.to(gl.int64) * CONFIG.TILE_ROWS
    if CONFIG.SHARED:
        HEADS: gl.constexpr = CONFIG.HEADS * CONFIG.GROUP
        whole = is_whole(item)
        of_tokens = place.to(gl.int64) * HEADS + item.head * CONFIG.GROUP
        of_tokens += gl.num_programs(0) * (2 * CONFIG.TILE_ROWS)
        first = gl.where(whole, of_tokens, first)
        rows = rows + gl.where(whole, item.row_block * CONFIG.TILE_ROWS, 0)
        # from one token to the next
        stride = gl.where(whole, (1 + LEVELS) * HEADS, CONFIG.GROUP)
        rows = rows // CONFIG.GROUP * stride + rows % CONFIG.GROUP
    return first + rows
