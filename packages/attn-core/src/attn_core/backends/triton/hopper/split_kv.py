"""The queue of work of kernels whose keys are cut: which units of keys a program attends to."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_core.backends.triton.hopper.program_work import tile_units_of
from attn_core.backends.triton.portable.arguments import (
    BEGIN,
    END,
    FIRST_BLOCK,
    FIRST_UNIT,
    LEVEL,
    PAGES,
    QUERIES,
    REQUEST,
    SPAN,
    TOKEN,
)


class SplitItem(NamedTuple):
    """Keys of one tile that a program attends to at a time.

    request: the one whose pages have the keys. level: of its span. row_block: which TILE_ROWS.
    q_start, q_len: the first query of the span, and how many it has. If SHARED and GROUP divides
    TILE_ROWS, they count from the tile's first query instead, and row_block is 0.
    context_len: keys that every query sees. start_unit … end_unit: of the tile's num_units.
    first_key: the first that any row sees. first_block … first_block + num_blocks: of keys, the
    first one attended to is begin_block, see next_block. next_unit: of the queue of work.
    """

    seq: Any
    request: Any
    level: Any
    row_block: Any
    head: Any
    start_unit: Any
    end_unit: Any
    num_units: Any
    q_start: Any
    q_len: Any
    seq_len: Any
    context_len: Any
    first_key: Any
    first_block: Any
    num_blocks: Any
    begin_block: Any
    next_unit: Any


@gluon.jit
def divided(n, divisor):
    """Return a quotient and its remainder by one division."""
    quotient = n // divisor
    return quotient, n - quotient * divisor


@gluon.jit
def split_item(work, seq, unit, requests, sizes, CONFIG: gl.constexpr):
    """Return what lies at a unit of the queue of work, as far as work.end or its tile's end.

    seq: a sequence that begins no later: that of the item before.
    """
    TURNS: gl.constexpr = CONFIG.HEADS // CONFIG.HEADS_AT_ONCE
    indptr = work.indptr + seq
    if CONFIG.SHARED:
        # what the plan has looked up, so that a program does not begin with load after load
        is_first = unit == work.start
        indptr = gl.where(is_first, work.first_span + FIRST_UNIT, indptr)
    while gl.load(indptr + 1) * TURNS <= unit:
        seq = seq + 1
        indptr = indptr + 1
    first_unit = gl.load(indptr)
    num_units = gl.load(indptr + 1) - first_unit
    head = work.lane // CONFIG.ROW_BLOCKS
    start_unit = unit - first_unit * TURNS
    if TURNS > 1:
        turn, start_unit = divided(start_unit, num_units)
        head += turn * CONFIG.HEADS_AT_ONCE
    request = seq
    level = 0
    row_block = work.row_block
    first_key = 0
    if CONFIG.SHARED:
        span = gl.where(is_first, work.first_span, work.spans + seq * SPAN)
        request = gl.load(span + REQUEST)
        level = gl.load(span + LEVEL)
        q_start = gl.load(span + TOKEN)
        q_len = gl.load(span + QUERIES)
        first_key = gl.load(span + BEGIN)
        seq_len = gl.load(span + END)
        context_len = gl.where(level > 0, seq_len, seq_len - q_len)
        num_blocks = (seq_len + CONFIG.BN - 1) // CONFIG.BN - first_key // CONFIG.BN
        num_units = gl.maximum(num_blocks, 1) + CONFIG.TILE_UNITS  # of one tile of several
        row_block, start_unit = divided(start_unit, num_units)
        if CONFIG.TILE_ROWS % CONFIG.GROUP == 0:  # less arithmetic for each row, see SplitItem
            first_query = row_block * (CONFIG.TILE_ROWS // CONFIG.GROUP)
            q_start = q_start + first_query
            q_len = q_len - first_query
            row_block = 0
    else:
        q_start = gl.load(requests.cu_seqlens_q + seq)
        q_len = gl.load(requests.cu_seqlens_q + seq + 1) - q_start
        seq_len = gl.load(requests.seq_lens + seq)
        context_len = seq_len - q_len
        if CONFIG.WINDOW:
            first_key = gl.maximum(seq_len - q_len - sizes.window + 1, 0)
    if CONFIG.BATCH_INVARIANT:
        end_unit = start_unit + 1
    else:
        end_unit = gl.minimum(start_unit + work.end - unit, num_units)
    next_unit = unit + end_unit - start_unit
    if CONFIG.TILE_UNITS > 0 or CONFIG.PLANNED_QUOTA:  # from here on units of keys
        tile_units = tile_units_of(work.indptr, sizes, CONFIG)
        start_unit = gl.maximum(start_unit - tile_units, 0)
        end_unit -= tile_units
        num_units -= tile_units
    skipped = first_key // CONFIG.BN
    first_block = skipped + start_unit * CONFIG.BLOCKS_PER_UNIT
    end_block = skipped + end_unit * CONFIG.BLOCKS_PER_UNIT
    end_block = gl.minimum(end_block, (seq_len + CONFIG.BN - 1) // CONFIG.BN)
    if CONFIG.TILE_ROWS > 64:  # attend_half takes its first block without a branch
        end_block = gl.maximum(end_block, first_block + 1)
    begin_block = end_block - 1
    if CONFIG.SHARED:
        if level > 0:
            count, elapsed = end_block - first_block, unit - work.start
            rotation = rotation_of(start_unit, count, num_units, elapsed, work.quota)
            begin_block = gl.where(rotation > 0, first_block + rotation - 1, begin_block)
    return SplitItem(
        seq, request, level, row_block, head, start_unit, end_unit, num_units, q_start, q_len,
        seq_len, context_len, first_key, first_block, end_block - first_block, begin_block,
        next_unit,
    )  # fmt: skip


@gluon.jit
def item_pages(work, unit, item, requests, sizes, CONFIG: gl.constexpr):
    """Return a pointer for the pages of an item's first block, and one for those of all its blocks.

    Page p of the request lies p places behind each. For a program's first item, the plan has looked
    up the pages of the first block, so that its keys need not wait for the page table. Of an item
    without keys nothing is read: its block is -1, as the plan says of no block.
    """
    pages = requests.page_table + item.request.to(gl.int64) * sizes.table_stride
    first = pages
    if CONFIG.SHARED:
        block = gl.load(work.first_span + FIRST_BLOCK)
        looked_up = work.first_span + (PAGES - block * CONFIG.BN // CONFIG.PAGE)
        is_first = (unit == work.start) & (block == item.begin_block)
        first = gl.where(is_first, looked_up, pages)
    return first, pages


@gluon.jit
def rotation_of(start, count, num_units, elapsed, quota):
    """Return how many blocks of an item of a group come before its last one, see next_block.

    Tiles of a group read the same keys, and programs cut each of them elsewhere. They are to come
    by a block at about the same time, so that one of them alone brings it from memory: what a
    program does after `elapsed` units is the same key of each tile, or the same but for a multiple
    of the quota where it has a part of a tile. start, count: units of keys, of num_units.
    """
    is_complete = count == num_units
    # only a program's first item begins within a tile
    before = gl.where(is_complete, 2 * quota - 1 - elapsed, start)
    _, remaining = divided(before, gl.where(is_complete, num_units, quota))
    rotation = 1 + gl.where(is_complete, remaining, quota - 1 - elapsed - remaining)
    return gl.where(rotation < count, rotation, 0)


@gluon.jit
def next_block(item, block, CONFIG: gl.constexpr):
    """Return the block of keys that comes after one of an item: the one before it."""
    block = block - 1
    if CONFIG.SHARED:
        block = gl.where(block < item.first_block, block + item.num_blocks, block)
    return block
