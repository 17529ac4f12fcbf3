"""The tiles of prompts: the order in which programs take them, and what lies in each."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn_core.backends.triton import schedule
from attn_core.backends.triton.hopper.common import find_seq_idx
from attn_core.backends.triton.masks import MASK_CAUSAL

TILE_ROWS = gl.constexpr(schedule.TILE_ROWS)


class TileOrder(NamedTuple):
    """tile_offsets, request_order: see order_requests, for tiles of TILE_ROWS.

    counter: int32 [2], zeros before and after: the items that were taken beside a program's first,
    and the programs that are done.
    """

    tile_offsets: Any
    request_order: Any
    counter: Any


class TileItem(NamedTuple):
    """One tile of a KV head: where its rows lie and which keys they see.

    index: of the tile in its sequence. kv_start: the first row of its keys where there are no
    pages. first_key, first_block … first_block + num_blocks: what any row sees, or of that one of
    `parts`, whose state has a slot of its own. unmasked_low … unmasked_high: the keys that every
    row sees.
    """

    head: Any
    index: Any
    q_start: Any
    q_len: Any
    kv_start: Any
    seq_len: Any
    first_key: Any
    first_block: Any
    num_blocks: Any
    unmasked_low: Any
    unmasked_high: Any
    parts: Any
    slot: Any


@gluon.jit
def next_item(order, sizes, CONFIG: gl.constexpr, FIRST: gl.constexpr):
    """Take an item; return tile · HEADS + head and the sequence, -1 and any at the end.

    FIRST: the one that is the program's own. The longest sequence comes first with all its heads: a
    long one that began late would end alone. heads_at_once of its heads take turns: their keys fit
    the cache. A sequence's last tile comes first, since it sees most keys.
    """
    item = gl.program_id(0)
    if not FIRST:
        item = gl.atomic_add(order.counter, 1, sem="relaxed") + gl.num_programs(0)
    num_tiles = gl.load(order.tile_offsets + sizes.batch)
    place = find_seq_idx(order.tile_offsets, sizes.batch, item, CONFIG.HEADS)
    first_tile = gl.load(order.tile_offsets + place)
    tiles = gl.load(order.tile_offsets + place + 1) - first_tile
    index = item - first_tile * CONFIG.HEADS
    turn_items = gl.maximum(tiles * sizes.heads_at_once, 1)
    first_head = index // turn_items * sizes.heads_at_once
    index = index % turn_items
    tile = tiles - 1 - index // sizes.heads_at_once
    item_index = tile * CONFIG.HEADS + first_head + index % sizes.heads_at_once
    item_index = gl.where(item < num_tiles * CONFIG.HEADS, item_index, -1)
    return item_index, gl.load(order.request_order + place)


@gluon.jit
def leave_counter(order):
    """Let the last program leave the counter as the next launch wants to find it."""
    if gl.atomic_add(order.counter + 1, 1, sem="relaxed") == gl.num_programs(0) - 1:
        gl.store(order.counter, 0)
        gl.store(order.counter + 1, 0)


@gluon.jit
def push_item(queue, iteration, item, seq, WARPS: gl.constexpr):
    """Hand an item and its sequence on to those that attend."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    queue.wait_free(iteration)
    packed = (seq.to(gl.int64) << 32) | (item.to(gl.int64) & 0xFFFFFFFF)
    stage = queue.stage(iteration)
    queue.tile.index(stage).store(gl.full([1], packed, gl.int64, L))
    mbarrier.arrive(queue.full.index(stage), count=1)


@gluon.jit
def pop_item(queue, iteration):
    """Return the item of a turn, -1 at the end, and its sequence."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    queue.wait_full(iteration)
    packed = gl.sum(queue.tile.index(queue.stage(iteration)).load(L), 0)
    queue.release(iteration)
    return packed.to(gl.int32), (packed >> 32).to(gl.int32)


@gluon.jit
def tile_index(item, q_len, CONFIG: gl.constexpr):
    """Return which tile of its sequence an item is, and which part of its keys."""
    index = item // CONFIG.HEADS
    part = 0
    if CONFIG.CUT_TILES:  # the same part of all tiles comes together: they read the same keys
        tiles = gl.maximum((q_len * CONFIG.GROUP + TILE_ROWS - 1) // TILE_ROWS, 1)
        part = index // tiles
        index = index % tiles
    return index, part


@gluon.jit
def tile_item(item, seq, requests, cuts, sizes, CONFIG: gl.constexpr):
    """Return the tile of an item of a sequence. cuts: KeyParts."""
    GROUP: gl.constexpr = CONFIG.GROUP
    head = item % CONFIG.HEADS
    q_start = gl.load(requests.cu_seqlens_q + seq)
    q_len = gl.load(requests.cu_seqlens_q + seq + 1) - q_start
    index, part = tile_index(item, q_len, CONFIG)
    kv_start = 0
    if CONFIG.PAGE == 0:
        kv_start = gl.load(requests.seq_lens + seq)
        seq_len = gl.load(requests.seq_lens + seq + 1) - kv_start
    else:
        seq_len = gl.load(requests.seq_lens + seq)
    context_len = seq_len - q_len
    first_key = 0
    end_key = seq_len
    unmasked_low = 0
    unmasked_high = seq_len
    if CONFIG.MASK == MASK_CAUSAL:
        first_query = index * TILE_ROWS // GROUP
        last_query = gl.minimum((index * TILE_ROWS + TILE_ROWS - 1) // GROUP, q_len - 1)
        end_key = gl.minimum(seq_len, context_len + last_query + 1)
        unmasked_high = gl.minimum(seq_len, context_len + first_query + 1)
        if CONFIG.WINDOW:
            first_key = gl.maximum(context_len + first_query - sizes.window + 1, 0)
            unmasked_low = gl.maximum(context_len + last_query - sizes.window + 1, 0)
    first_block = first_key // CONFIG.BN
    num_blocks = (end_key + CONFIG.BN - 1) // CONFIG.BN - first_block
    parts = 1
    slot = 0
    if CONFIG.CUT_TILES:
        parts = gl.load(cuts.counts + seq)
        slot = gl.load(cuts.slots + seq) + item
        blocks_of_part = (num_blocks + parts - 1) // parts
        first_block += part * blocks_of_part
        num_blocks = gl.minimum(num_blocks - part * blocks_of_part, blocks_of_part)
    num_blocks = gl.maximum(num_blocks, 1)  # one that no row sees, where none is seen
    return TileItem(
        head, index, q_start, q_len, kv_start, seq_len, first_key, first_block, num_blocks,
        unmasked_low, unmasked_high, parts, slot,
    )  # fmt: skip
