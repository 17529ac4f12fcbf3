"""The items of Hopper's decode: their keys and queries, what they see, what is stored."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attn_core.backends.triton.hopper.common import (
    barrier,
    gather_kv_tile,
    lookup_slots,
    row_offsets,
)
from attn_core.backends.triton.hopper.item_channel import push_item, read_item
from attn_core.backends.triton.hopper.partials import (
    first_row_of,
    is_final,
    partial_rows,
    state_place,
)
from attn_core.backends.triton.hopper.program_work import prefetch_for_merge, program_work
from attn_core.backends.triton.hopper.softmax import KeyMask, add_sink, store_output
from attn_core.backends.triton.hopper.split_kv import item_pages, next_block, split_item
from attn_core.backends.triton.masks import MASK_CAUSAL, MASK_TREE


@gluon.jit
def gather_keys_values(keys, values, k, v, requests, plan, sizes, CONFIG: gl.constexpr):
    """Do what load_keys_values does with pages that are too small for TMA."""
    work = program_work(plan, sizes, CONFIG)
    prefetch_for_merge(work, sizes, CONFIG)
    step = 0
    seq = work.seq
    next_unit = work.start
    while next_unit < work.last:
        item = split_item(work, seq, next_unit, requests, sizes, CONFIG)
        seq = item.seq
        pages = requests.page_table + item.request.to(gl.int64) * sizes.table_stride
        block = item.begin_block
        slots = lookup_slots(pages, item.first_key, item.seq_len, block * CONFIG.BN, CONFIG)
        for _ in range(0, item.num_blocks):
            block = next_block(item, block, CONFIG)
            start = block * CONFIG.BN
            next_slots = lookup_slots(pages, item.first_key, item.seq_len, start, CONFIG)
            keys.wait_free(step)
            gather_kv_tile(keys, step, k, slots, item.head, CONFIG)
            values.wait_free(step)
            gather_kv_tile(values, step, v, slots, item.head, CONFIG)
            slots = next_slots
            step += 1
        next_unit = item.next_unit


@gluon.jit
def load_keys_values(keys, values, k_rows, v_rows, requests, plan, sizes, CONFIG: gl.constexpr):
    """Fill both channels with the blocks of each item, in the order of next_block.

    The pages of a block are looked up while the block before it is brought.
    """
    work = program_work(plan, sizes, CONFIG)
    prefetch_for_merge(work, sizes, CONFIG)
    step = 0
    seq = work.seq
    next_unit = work.start
    while next_unit < work.last:
        item = split_item(work, seq, next_unit, requests, sizes, CONFIG)
        seq = item.seq
        block = item.begin_block
        first_pages, pages = item_pages(work, next_unit, item, requests, sizes, CONFIG)
        rows = lookup_rows(first_pages, item, block, CONFIG)
        for _ in range(0, item.num_blocks):
            block = next_block(item, block, CONFIG)
            next_rows = lookup_rows(pages, item, block, CONFIG)
            copy_rows(keys, step, k_rows, rows, item.head, CONFIG)
            copy_rows(values, step, v_rows, rows, item.head, CONFIG)
            rows = next_rows
            step += 1
        next_unit = item.next_unit


@gluon.jit
def lookup_rows(pages, item, block, CONFIG: gl.constexpr):
    """Return the rows of a store where the copies of a block begin, int32 [32] of one warp.

    pages: see item_pages. Each lane has the row of one copy, which brings a page or a part of one:
    all pages are looked up at once.
    """
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ROWS: gl.constexpr = min(CONFIG.PAGE, CONFIG.BN, CONFIG.COPY_ROWS)
    copy = gl.minimum(gl.arange(0, 32, L), CONFIG.BN // ROWS - 1)
    last = gl.maximum(item.seq_len - 1, 0)
    token = gl.maximum(block * CONFIG.BN + copy * ROWS, 0)
    if CONFIG.COPY_ROWS < CONFIG.BN:  # rows that are in the cache by now, not nobody's
        token = gl.minimum(token, last // ROWS * ROWS)
    page = gl.load(pages + gl.minimum(token, last) // CONFIG.PAGE)
    if CONFIG.HND:
        page = page * CONFIG.HEADS + item.head
    return page * CONFIG.PAGE + token % CONFIG.PAGE


@gluon.jit
def copy_rows(channel, step, kv_rows, rows, head, CONFIG: gl.constexpr):
    """Copy a block into the channel's tile of a step, when it is free. rows: see lookup_rows."""
    PANELS: gl.constexpr = CONFIG.D // 64
    ROWS: gl.constexpr = min(CONFIG.PAGE, CONFIG.BN, CONFIG.COPY_ROWS)
    COPIES: gl.constexpr = CONFIG.BN // ROWS
    channel.wait_free(step)
    stage = channel.stage(step)
    full = channel.full.index(stage)
    panels = channel.tile._reinterpret(
        channel.tile.dtype, [channel.STAGES * PANELS * COPIES, ROWS, 64], kv_rows.layout
    )
    mbarrier.expect(full, CONFIG.BN * CONFIG.D * 2)
    first_column = 0 if CONFIG.HND else head * CONFIG.D
    lane = gl.arange(0, 32, rows.type.layout)
    for copy in gl.static_range(COPIES):
        row = gl.sum(gl.where(lane == copy, rows, 0), 0)
        for panel in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(
                kv_rows,
                [row, first_column + panel * 64],
                full,
                panels.index((stage * PANELS + panel) * COPIES + copy),
            )


@gluon.jit
def load_items(items, keys, values, k_rows, v_rows, requests, plan, sizes, CONFIG: gl.constexpr):
    """Do what load_keys_values does, and hand on each item one item ahead."""
    work = program_work(plan, sizes, CONFIG)
    prefetch_for_merge(work, sizes, CONFIG)
    step = 0
    iteration = 0
    next_unit = work.start
    if next_unit < work.last:
        first = split_item(work, work.seq, next_unit, requests, sizes, CONFIG)
        push_item(items, 0, first, state_place(work, next_unit, first, CONFIG))
    while next_unit < work.last:
        item, _ = read_item(items, iteration, 1)
        block = item.begin_block
        first_pages, pages = item_pages(work, next_unit, item, requests, sizes, CONFIG)
        rows = lookup_rows(first_pages, item, block, CONFIG)
        next_unit = item.next_unit
        for i in range(0, item.num_blocks):
            block = next_block(item, block, CONFIG)
            next_rows = lookup_rows(pages, item, block, CONFIG)
            copy_rows(keys, step, k_rows, rows, item.head, CONFIG)
            copy_rows(values, step, v_rows, rows, item.head, CONFIG)
            rows = next_rows
            step += 1
            if (i == 0) & (next_unit < work.last):  # the first keys do not wait for it
                following = split_item(work, item.seq, next_unit, requests, sizes, CONFIG)
                place = state_place(work, next_unit, following, CONFIG)
                push_item(items, iteration + 1, following, place)
        iteration += 1


@gluon.jit
def begin_queries(q, q_tiles, buffer, item, half, CONFIG: gl.constexpr):
    """Begin to copy 64 rows of an item's tile into a buffer; wait_queries waits for them."""
    D: gl.constexpr = CONFIG.D
    B: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows = first_row_of(item, half, CONFIG) + gl.arange(0, 64, gl.SliceLayout(1, B))
    columns = gl.arange(0, D, gl.SliceLayout(0, B))
    offsets = row_offsets(q, item.q_start, item.head, rows, CONFIG.GROUP)
    valid = (rows // CONFIG.GROUP < item.q_len)[:, None] & (columns >= 0)[None, :]
    async_copy.async_copy_global_to_shared(
        q_tiles.index(buffer), q.ptr + offsets[:, None] + columns[None, :], mask=valid
    )
    async_copy.commit_group()


@gluon.jit
def wait_queries():
    """Wait for the queries that this group of warps has begun to copy."""
    async_copy.wait_group(0)
    barrier()
    hopper.fence_async_shared()


@gluon.jit
def item_mask(item, half, tree_mask, sizes, CONFIG: gl.constexpr):
    """Return which keys 64 rows of an item's tile see."""
    first_row = first_row_of(item, half, CONFIG)
    unmasked_low = 0
    unmasked_high = item.seq_len
    if CONFIG.MASK == MASK_CAUSAL:
        first_end = item.context_len + first_row // CONFIG.GROUP + 1
        unmasked_high = gl.minimum(item.seq_len, first_end)
    if CONFIG.MASK == MASK_TREE:
        unmasked_high = item.context_len
    if CONFIG.WINDOW:
        unmasked_low = gl.maximum(item.seq_len - sizes.window, 0)
    tree = tree_mask + item.request.to(gl.int64) * sizes.drafts * sizes.drafts
    return KeyMask(
        item.seq_len, item.context_len, unmasked_low, unmasked_high, sizes.window, tree,
        sizes.drafts,
    )  # fmt: skip


@gluon.jit
def store_state(
    acc, m_i, l_i, out, partial, place, item, half, sinks, scales, CONFIG: gl.constexpr
):  # fmt: skip
    """Store the outputs of 64 rows of an item's tile, or their partial state, see state_place."""
    first_row = first_row_of(item, half, CONFIG)
    D: gl.constexpr = CONFIG.D
    O: gl.constexpr = acc.type.layout  # noqa: E741
    final = is_final(item, CONFIG)
    if CONFIG.USE_SINKS:
        if final:
            rows = first_row + gl.arange(0, 64, m_i.type.layout)
            heads = sinks + item.head * CONFIG.GROUP
            acc, m_i, l_i = add_sink(acc, m_i, l_i, heads, rows % CONFIG.GROUP)
    empty = l_i == 0.0
    l_i = gl.where(empty, 1.0, l_i)
    if final:
        store_output(
            acc, m_i, l_i, empty, out, scales.v, item.q_start, item.q_len, item.head, first_row,
            CONFIG,
        )  # fmt: skip
    else:
        normalized = acc * gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, O))[:, None]
        out_rows = gl.arange(0, 64, gl.SliceLayout(1, O))
        out_columns = gl.arange(0, D, gl.SliceLayout(0, O))
        tile_rows = half * 64 + out_rows
        state_rows = partial_rows(place, item, tile_rows, CONFIG)
        row_mask = (first_row + out_rows < item.q_len * CONFIG.GROUP)[:, None]
        row_mask = row_mask & (out_columns >= 0)[None, :]
        gl.store(
            partial.out + state_rows[:, None] * D + out_columns[None, :], normalized, mask=row_mask
        )
        lse_rows = gl.arange(0, 64, m_i.type.layout)
        lse_at = partial_rows(place, item, half * 64 + lse_rows, CONFIG)
        lse = gl.where(empty, -float("inf"), m_i + gl.log2(l_i))
        if CONFIG.SHARED:  # a row that is not live has no place of its own
            live_rows = first_row + lse_rows < item.q_len * CONFIG.GROUP
            gl.store(partial.lse + lse_at, lse, mask=live_rows)
        else:
            gl.store(partial.lse + lse_at, lse)
