"""The queue of work of kernels whose keys are cut: which units of keys a program attends to."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_core.backends.triton.portable.arguments import LEVELS


class Work(NamedTuple):
    """Units start … end of the queue of work, a program's share; indptr: see plan_splits.

    No item begins from unit `last` on. quota: the units of each program but the last ones. A
    sequence is a request, or a span if SHARED. seq: that of the first unit. lane: of a part's
    programs this one; row_block: which TILE_ROWS of each head that makes, see decode_splits.
    """

    indptr: Any
    spans: Any
    start: Any
    end: Any
    last: Any
    quota: Any
    seq: Any
    lane: Any
    row_block: Any


class SplitItem(NamedTuple):
    """Keys of one tile that a program attends to at a time.

    request: the one whose pages have the keys. level: of its span. row_block: which TILE_ROWS.
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
def launch_dependents():
    """Let the launch of merge_splits begin, which waits for the partial states by itself."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def prefetch(ptr):
    """Bring what lies at a pointer into the L2 cache; nobody waits for it."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch_request(requests, sizes):
    """Prefetch the lengths and pages of what is this program's request if all are as long.

    Between two layers the weights of others have passed the caches.
    """
    seq = gl.program_id(0) * sizes.batch // gl.num_programs(0)
    prefetch(requests.cu_seqlens_q + seq)
    prefetch(requests.seq_lens + seq)
    prefetch(requests.page_table + seq.to(gl.int64) * sizes.table_stride)


@gluon.jit
def tile_units_of(indptr, sizes, CONFIG: gl.constexpr):
    """Return the units that come before the keys of each tile."""
    tile_units = CONFIG.TILE_UNITS
    if CONFIG.PLANNED_QUOTA:
        tile_units = gl.load(indptr + sizes.batch + 2)
    return tile_units


@gluon.jit
def program_work(indptr, spans, sizes, CONFIG: gl.constexpr):
    """Return the units of this program: as many for each part, the last ones may have none."""
    seqs = sizes.batch
    if CONFIG.SHARED:
        seqs = 2 * sizes.batch
    # all at once: a search would wait for one load after the other
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # each warp has all of them
    i = gl.arange(0, 128, L)
    ends = gl.load(indptr + 1 + i, mask=i < seqs, other=0)
    TURNS: gl.constexpr = CONFIG.HEADS // CONFIG.HEADS_AT_ONCE
    LANES: gl.constexpr = CONFIG.HEADS_AT_ONCE * CONFIG.ROW_BLOCKS
    num_units = gl.load(indptr + seqs) * TURNS
    if CONFIG.PLANNED_QUOTA:
        quota = gl.load(indptr + seqs + 1)
    else:
        parts = gl.num_programs(0) // LANES
        quota = gl.maximum((num_units + parts - 1) // parts, CONFIG.MIN_UNITS)
    start = gl.program_id(0) // LANES * quota
    earlier = ((i < seqs) & (ends * TURNS <= start)).to(gl.int32)
    for low in range(128, seqs, 128):
        ends = gl.load(indptr + 1 + low + i, mask=low + i < seqs, other=0)
        earlier += ((low + i < seqs) & (ends * TURNS <= start)).to(gl.int32)
    end = gl.minimum(start + quota, num_units)
    last = end
    if CONFIG.TILE_UNITS > 0 or CONFIG.PLANNED_QUOTA:
        last = end - tile_units_of(indptr, sizes, CONFIG)
        last = gl.maximum(last, gl.minimum(start + 1, end))
    lane = gl.program_id(0) % LANES
    row_block = lane % CONFIG.ROW_BLOCKS
    return Work(indptr, spans, start, end, last, quota, gl.sum(earlier, 0), lane, row_block)


@gluon.jit
def split_item(work, seq, unit, requests, sizes, CONFIG: gl.constexpr):
    """Return what lies at a unit of the queue of work, as far as work.end or its tile's end.

    seq: a sequence that begins no later: that of the item before.
    """
    TURNS: gl.constexpr = CONFIG.HEADS // CONFIG.HEADS_AT_ONCE
    while gl.load(work.indptr + seq + 1) * TURNS <= unit:
        seq = seq + 1
    first_unit = gl.load(work.indptr + seq)
    num_units = gl.load(work.indptr + seq + 1) - first_unit
    head = work.lane // CONFIG.ROW_BLOCKS
    start_unit = unit - first_unit * TURNS
    if TURNS > 1:
        head += start_unit // num_units * CONFIG.HEADS_AT_ONCE
        start_unit = start_unit % num_units
    request = seq
    level = 0
    row_block = work.row_block
    first_key = 0
    if CONFIG.SHARED:
        first_key = gl.load(work.spans.begin + seq)
        if seq < sizes.batch:
            q_start = gl.load(requests.cu_seqlens_q + seq)
            q_len = gl.load(requests.cu_seqlens_q + seq + 1) - q_start
            seq_len = gl.load(requests.seq_lens + seq)
            context_len = seq_len - q_len
        else:
            request = gl.load(work.spans.request + seq)
            level = gl.load(work.spans.level + seq)
            q_start = gl.load(work.spans.token + seq)
            q_len = gl.load(work.spans.queries + seq)
            seq_len = gl.load(work.spans.end + seq)
            context_len = seq_len
            # of one tile of several
            num_units = (seq_len - first_key) // CONFIG.BN + CONFIG.TILE_UNITS
            row_block = start_unit // num_units
            start_unit = start_unit % num_units
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
def rotation_of(start, count, num_units, elapsed, quota):
    """Return how many blocks of an item of a group come before its last one, see next_block.

    Tiles of a group read the same keys, and programs cut each of them elsewhere. They are to come
    by a block at about the same time, so that one of them alone brings it from memory: what a
    program does after `elapsed` units is the same key of each tile, or the same but for a multiple
    of the quota where it has a part of a tile. start, count: units of keys, of num_units.
    """
    is_complete = count == num_units
    # only a program's first item begins within a tile
    remaining = gl.where(is_complete, 2 * quota - 1 - elapsed, start) % gl.where(
        is_complete, num_units, quota
    )
    rotation = 1 + gl.where(is_complete, remaining, quota - 1 - elapsed - remaining)
    return gl.where(rotation < count, rotation, 0)


@gluon.jit
def next_block(item, block, CONFIG: gl.constexpr):
    """Return the block of keys that comes after one of an item: the one before it."""
    block = block - 1
    if CONFIG.SHARED:
        block = gl.where(block < item.first_block, block + item.num_blocks, block)
    return block


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
        if is_whole(item):
            place = item.q_start * (1 + LEVELS) + item.level
    return place


@gluon.jit
def partial_rows(place, item, rows, CONFIG: gl.constexpr):
    """Return where the partial states of rows of an item's tile lie, see decode_splits."""
    rows_out = place.to(gl.int64) * CONFIG.TILE_ROWS + rows
    if CONFIG.SHARED:
        HEADS: gl.constexpr = CONFIG.HEADS * CONFIG.GROUP
        if is_whole(item):
            row = item.row_block * CONFIG.TILE_ROWS + rows
            first = place.to(gl.int64) * HEADS + item.head * CONFIG.GROUP
            first += gl.num_programs(0) * (2 * CONFIG.TILE_ROWS)
            rows_out = first + row // CONFIG.GROUP * ((1 + LEVELS) * HEADS) + row % CONFIG.GROUP
    return rows_out
