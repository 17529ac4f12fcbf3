"""extend for Hopper: warps that copy pages (TMA) beside warps that multiply (wgmma), in Gluon.

Two groups of four warps hold 64 rows each; further warps load the blocks of keys they share. A
group multiplies the next block by its queries while it still adds up the last one, so that the
exponentials hide behind matrix products (FlashAttention-3, arXiv:2407.08608, section 3.2).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from attn_core.backends.triton.hopper.channel import init_barriers, new_channel, new_kv_channels
from attn_core.backends.triton.hopper.common import (
    Sizes,
    barrier,
    load_kv_tile,
    lookup_slots,
    row_offsets,
    zero_tail,
)
from attn_core.backends.triton.hopper.online_softmax import (
    exp_and_sum,
    finish_product,
    no_sums,
    online_softmax,
    rescale,
    row_sums,
    update_max,
)
from attn_core.backends.triton.hopper.softmax import KeyMask, add_sink, store_output, store_part
from attn_core.backends.triton.hopper.tile_queue import (
    TILE_ROWS,
    leave_counter,
    next_item,
    pop_item,
    push_item,
    tile_index,
    tile_item,
)


@gluon.jit
def load_keys_values(
    queue, keys, values, k_rows, v_rows, k, v, requests, order, cuts, sizes, CONFIG: gl.constexpr
):  # fmt: skip
    """Take items and fill both channels with the blocks of each, the last one first."""
    WARPS: gl.constexpr = 4 if CONFIG.GATHERS else 1
    LAG: gl.constexpr = 1 if CONFIG.GATHERS else 0  # values come as late as they are needed
    k_step = 0
    v_step = 0
    iteration = 0
    item, seq = next_item(order, sizes, CONFIG, FIRST=True)
    push_item(queue, iteration, item, seq, WARPS)
    while item >= 0:
        tile = tile_item(item, seq, requests, cuts, sizes, CONFIG)
        pages = requests.page_table + seq.to(gl.int64) * sizes.table_stride
        item_after = -1
        seq_after = 0
        start = (tile.first_block + tile.num_blocks - 1) * CONFIG.BN
        slots = lookup_slots(pages, tile.first_key, tile.seq_len, start, CONFIG)
        v_slots = slots + 0  # Triton 3.6 carries no name through a loop that is another's at first
        for i in range(0, tile.num_blocks + LAG):
            next_slots = lookup_slots(
                pages, tile.first_key, tile.seq_len, start - CONFIG.BN, CONFIG
            )  # fmt: skip
            if i < tile.num_blocks:
                keys.wait_free(k_step)
                load_kv_tile(
                    keys, k_step, k_rows, k, pages, slots, tile.kv_start, tile.head, tile.seq_len,
                    start, CONFIG,
                )  # fmt: skip
                k_step += 1
            if i >= LAG:
                values.wait_free(v_step)
                load_kv_tile(
                    values, v_step, v_rows, v, pages, v_slots, tile.kv_start, tile.head,
                    tile.seq_len, start + LAG * CONFIG.BN, CONFIG,
                )  # fmt: skip
                v_step += 1
            v_slots = slots
            slots = next_slots
            start -= CONFIG.BN
            if i == gl.minimum(tile.num_blocks, CONFIG.STAGES) - 1 + LAG:  # before it is needed
                iteration += 1
                item_after, seq_after = next_item(order, sizes, CONFIG, FIRST=False)
                push_item(queue, iteration, item_after, seq_after, WARPS)
        item = item_after
        seq = seq_after
    leave_counter(order)


@gluon.jit
def load_q_tile(
    q, q_tile, requests, item, seq, HALF: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Begin to copy rows 64 · HALF … of an item's queries; none of item -1.

    No branch: a matrix product may be under way, and its registers must stay where they are.
    """
    D: gl.constexpr = CONFIG.D
    GROUP: gl.constexpr = CONFIG.GROUP
    B: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    q_start = gl.load(requests.cu_seqlens_q + seq)
    q_len = gl.load(requests.cu_seqlens_q + seq + 1) - q_start
    index, _ = tile_index(item, q_len, CONFIG)
    rows = index * TILE_ROWS + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, B))
    columns = gl.arange(0, D, gl.SliceLayout(0, B))
    offsets = row_offsets(q, q_start, item % CONFIG.HEADS, rows, GROUP)
    valid = (rows // GROUP < q_len)[:, None] & (columns >= 0)[None, :] & (item >= 0)
    async_copy.async_copy_global_to_shared(
        q_tile, q.ptr + offsets[:, None] + columns[None, :], mask=valid
    )
    async_copy.commit_group()


@gluon.jit
def finish(acc, m_i, l_i, out, sinks, scales, tile, first_row, CONFIG: gl.constexpr):
    """Store the outputs of the 64 rows of a tile from first_row on: they have met all keys."""
    if CONFIG.USE_SINKS:
        rows = first_row + gl.arange(0, 64, m_i.type.layout)
        heads = sinks + tile.head * CONFIG.GROUP
        acc, m_i, l_i = add_sink(acc, m_i, l_i, heads, rows % CONFIG.GROUP)
    empty = l_i == 0.0
    l_i = gl.where(empty, 1.0, l_i)
    store_output(
        acc, m_i, l_i, empty, out, scales.v, tile.q_start, tile.q_len, tile.head, first_row, CONFIG
    )


@gluon.jit
def attend(
    queue, q_tiles, keys, values, q, out, requests, cuts, sinks, scales, sizes,
    HALF: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Attend with rows 64 · HALF … of each tile.

    Where small pages come slowly, the place of values is given back before the exponentials.
    """
    BN: gl.constexpr = CONFIG.BN
    D: gl.constexpr = CONFIG.D
    GROUP: gl.constexpr = CONFIG.GROUP
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    SLOW_COPIES: gl.constexpr = CONFIG.GATHERS or (CONFIG.PAGE % 64 > 0 and D > 64)
    q_tile = q_tiles.index(HALF)
    zeros = gl.full([64, BN], 0.0, gl.float32, S)
    step = 0
    iteration = 0
    item, seq = pop_item(queue, iteration)
    load_q_tile(q, q_tile, requests, item, seq, HALF, CONFIG)
    while item >= 0:
        tile = tile_item(item, seq, requests, cuts, sizes, CONFIG)
        async_copy.wait_group(0)
        barrier()
        hopper.fence_async_shared()
        first_row = tile.index * TILE_ROWS + HALF * 64
        rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, S))
        q_idx = rows // GROUP
        mask = KeyMask(
            tile.seq_len, tile.seq_len - tile.q_len, tile.unmasked_low, tile.unmasked_high,
            sizes.window, 0, 0,
        )  # fmt: skip
        m_i = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        l_i = no_sums(S, CONFIG)
        acc = gl.full([64, D], 0.0, gl.float32, O)
        start = (tile.first_block + tile.num_blocks - 1) * BN
        keys.wait_full(step)
        if CONFIG.GATHERS:
            hopper.fence_async_shared()
        k_tile = keys.tile.index(keys.stage(step)).permute((1, 0))
        s = hopper.warpgroup_mma(q_tile, k_tile, zeros, use_acc=False)
        keys.release(step)
        p, m_i, l_i, alpha = online_softmax(s, start, q_idx, m_i, l_i, mask, scales, CONFIG)
        weights = gl.convert_layout(p.to(values.tile.dtype), P)
        for i in range(1, tile.num_blocks):
            v_step = step
            v_stage = values.stage(v_step)
            step += 1
            keys.wait_full(step)
            if CONFIG.GATHERS:
                hopper.fence_async_shared()
            k_tile = keys.tile.index(keys.stage(step)).permute((1, 0))
            next_s = hopper.warpgroup_mma(q_tile, k_tile, zeros, use_acc=False, is_async=True)
            values.wait_full(v_step)
            if CONFIG.GATHERS:
                hopper.fence_async_shared()
            else:
                zero_tail(values.tile, v_stage, start, tile.first_key, tile.seq_len, BN, D)
            next_acc = hopper.warpgroup_mma(
                weights, values.tile.index(v_stage), acc, is_async=True
            )  # fmt: skip
            s = hopper.warpgroup_mma_wait(1, deps=[next_s])
            keys.release(step)
            start = (tile.first_block + tile.num_blocks - 1 - i) * BN
            s, log2_scale, m_new = update_max(s, start, q_idx, m_i, mask, scales, CONFIG)
            if SLOW_COPIES:
                acc = finish_product(next_acc, weights, values, v_step, v_step)
            p, l_i, alpha = exp_and_sum(s, log2_scale, m_i, m_new, l_i, CONFIG)
            m_i = m_new
            if not SLOW_COPIES:
                acc = finish_product(next_acc, weights, values, v_step, step)
            acc = rescale(acc, gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None], CONFIG)
            weights = gl.convert_layout(p.to(values.tile.dtype), P)

        v_stage = values.stage(step)
        values.wait_full(step)
        if CONFIG.GATHERS:
            hopper.fence_async_shared()
        else:
            zero_tail(values.tile, v_stage, start, tile.first_key, tile.seq_len, BN, D)
        next_acc = hopper.warpgroup_mma(weights, values.tile.index(v_stage), acc, is_async=True)
        # this tile has met all its keys: the queries of the next one come while it is finished
        iteration += 1
        next_item, next_seq = pop_item(queue, iteration)
        load_q_tile(q, q_tile, requests, next_item, next_seq, HALF, CONFIG)
        acc, _ = hopper.warpgroup_mma_wait(0, deps=[next_acc, weights])  # both are in use till then
        values.release(step)
        step += 1
        l_i = row_sums(l_i, m_i, CONFIG)

        if CONFIG.CUT_TILES:
            if tile.parts > 1:
                store_part(acc, m_i, l_i, cuts, tile.slot, HALF, CONFIG)
            else:
                finish(acc, m_i, l_i, out, sinks, scales, tile, first_row, CONFIG)
        else:
            finish(acc, m_i, l_i, out, sinks, scales, tile, first_row, CONFIG)
        item = next_item
        seq = next_seq


@gluon.jit(do_not_specialize=["batch", "heads_at_once", "table_stride", "window"])
def extend_hopper(
    q,
    out,
    requests,
    order,
    cuts,
    batch,
    heads_at_once,
    table_stride,
    k_rows,
    v_rows,
    k,
    v,
    sinks,
    scales,
    window,
    CONFIG: gl.constexpr,
):
    """Do what extend_tiles does, with 128 rows a tile; a program takes one tile after another.

    k_rows, v_rows: the stores as rows of tokens for TMA, [min(max(PAGE, 8), BN) or BN, 64] at a
    time. cuts: KeyParts, which merge_tiles reads then, if CUT_TILES.
    """
    sizes = Sizes(batch, window, 0, table_stride, heads_at_once)
    T: gl.constexpr = q.ptr.dtype.element_ty
    QS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, CONFIG.D], T)
    q_tiles = gl.allocate_shared_memory(T, [2, 64, CONFIG.D], QS)
    keys, values = new_kv_channels(T, CONFIG)
    items = gl.allocate_shared_memory(gl.int64, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queue = new_channel(items, 2)
    init_barriers((queue,), 1, 2)
    init_barriers((keys, values), 128 if CONFIG.GATHERS else 1, 2)
    gl.warp_specialize(
        [
            (
                attend,
                (
                    queue, q_tiles, keys, values, q, out, requests, cuts, sinks, scales, sizes, 0,
                    CONFIG,
                ),
            ),
            (
                attend,
                (
                    queue, q_tiles, keys, values, q, out, requests, cuts, sinks, scales, sizes, 1,
                    CONFIG,
                ),
            ),
            (
                load_keys_values,
                (
                    queue, keys, values, k_rows, v_rows, k, v, requests, order, cuts, sizes, CONFIG,
                ),
            ),
        ],
        [4, 4 if CONFIG.GATHERS else 1],
        [224 if CONFIG.GATHERS else 240, 56 if CONFIG.GATHERS else 24],
    )  # fmt: skip
