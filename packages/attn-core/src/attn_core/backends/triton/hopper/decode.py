"""Split-KV attention of few queries for Hopper: some warps multiply, others load keys.

One group of warps holds 64 rows, and two programs share a multiprocessor; or two groups hold half
of 128 rows each, in one program. The queue of work, its cuts and what is kept of them are
portable/decode.py's.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from attn_core.backends.triton.hopper.channel import init_barriers, new_kv_channels
from attn_core.backends.triton.hopper.common import Sizes, zero_tail
from attn_core.backends.triton.hopper.decode_items import (
    begin_queries,
    gather_keys_values,
    item_mask,
    load_items,
    load_keys_values,
    store_state,
    wait_queries,
)
from attn_core.backends.triton.hopper.item_channel import new_items, read_item
from attn_core.backends.triton.hopper.online_softmax import (
    exp_and_sum,
    finish_product,
    no_sums,
    online_softmax,
    rescale,
    row_sums,
    update_max,
)
from attn_core.backends.triton.hopper.partials import first_row_of, state_place
from attn_core.backends.triton.hopper.program_work import (
    Plan,
    launch_dependents,
    prefetch_first_span,
    program_work,
)
from attn_core.backends.triton.hopper.softmax import softmax_step
from attn_core.backends.triton.hopper.split_kv import next_block, split_item


@gluon.jit
def attend(
    q_tiles, keys, values, q, out, partial, requests, plan, tree_mask, sinks, scales, sizes,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Attend over this program's items with 64 rows each."""
    work = program_work(plan, sizes, CONFIG)
    BN: gl.constexpr = CONFIG.BN
    D: gl.constexpr = CONFIG.D
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    zeros = gl.full([64, BN], 0.0, gl.float32, S)
    step = 0
    iteration = 0
    seq = work.seq
    next_unit = work.start
    if next_unit < work.last:
        first = split_item(work, seq, next_unit, requests, sizes, CONFIG)
        begin_queries(q, q_tiles, 0, first, 0, CONFIG)
    while next_unit < work.last:
        item = split_item(work, seq, next_unit, requests, sizes, CONFIG)
        seq = item.seq
        first_row = first_row_of(item, 0, CONFIG)
        wait_queries()
        q_tile = q_tiles.index(iteration % 2)
        if item.next_unit < work.last:  # its queries are there when this item ends
            following = split_item(work, seq, item.next_unit, requests, sizes, CONFIG)
            begin_queries(q, q_tiles, (iteration + 1) % 2, following, 0, CONFIG)
        iteration += 1
        q_idx = (first_row + gl.arange(0, 64, gl.SliceLayout(1, S))) // CONFIG.GROUP
        mask = item_mask(item, 0, tree_mask, sizes, CONFIG)
        m_i = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        l_i = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S))
        acc = gl.full([64, D], 0.0, gl.float32, O)
        block = item.begin_block
        for _ in range(0, item.num_blocks):
            start = block * BN
            stage = keys.stage(step)
            keys.wait_full(step)
            if CONFIG.GATHERS:
                hopper.fence_async_shared()
            k_tile = keys.tile.index(stage).permute((1, 0))
            s = hopper.warpgroup_mma(q_tile, k_tile, zeros, use_acc=False)
            keys.release(step)
            p, m_i, l_i, alpha = softmax_step(s, start, q_idx, m_i, l_i, mask, scales, CONFIG)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
            weights = gl.convert_layout(p.to(values.tile.dtype), P)
            values.wait_full(step)
            if CONFIG.GATHERS:
                hopper.fence_async_shared()
            else:
                zero_tail(values.tile, stage, start, item.first_key, item.seq_len, BN, D)
            acc = hopper.warpgroup_mma(weights, values.tile.index(stage), acc)
            values.release(step)
            step += 1
            block = next_block(item, block, CONFIG)
        if item.next_unit >= work.last:  # earlier would slow some shapes down
            launch_dependents()
        place = state_place(work, next_unit, item, CONFIG)
        store_state(acc, m_i, l_i, out, partial, place, item, 0, sinks, scales, CONFIG)
        next_unit = item.next_unit


@gluon.jit
def begin_following(
    items, iteration, item, last_unit, q, q_tiles, HALF: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Begin to copy 64 rows of the queries of the item after this one, if there is one.

    Call it at the end of an item: at the start it would delay the item's first product.
    """
    if item.next_unit < last_unit:
        items.wait_full(iteration + 1)
        following, _ = read_item(items, iteration + 1, 4)
        buffer = (iteration + 1) % 2 * 2 + HALF
        begin_queries(q, q_tiles, buffer, following, HALF, CONFIG)


@gluon.jit
def attend_half(
    items, plan, q_tiles, keys, values, q, out, partial, tree_mask, sinks, scales, sizes,
    HALF: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Attend over this program's items with rows 64 · HALF … of each.

    The next block meets the queries while this one is still summed, as in prefill. No other program
    shares the processor, so the warp that loads looks the items up, see load_items.
    """
    work = program_work(plan, sizes, CONFIG)
    BN: gl.constexpr = CONFIG.BN
    D: gl.constexpr = CONFIG.D
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    zeros = gl.full([64, BN], 0.0, gl.float32, S)
    step = 0
    iteration = 0
    next_unit = work.start
    if next_unit < work.last:
        items.wait_full(0)
        first, _ = read_item(items, 0, 4)
        begin_queries(q, q_tiles, HALF, first, HALF, CONFIG)
    while next_unit < work.last:
        item, _ = read_item(items, iteration, 4)
        first_row = first_row_of(item, HALF, CONFIG)
        wait_queries()
        q_tile = q_tiles.index(iteration % 2 * 2 + HALF)
        if first_row < item.q_len * CONFIG.GROUP:
            q_idx = (first_row + gl.arange(0, 64, gl.SliceLayout(1, S))) // CONFIG.GROUP
            mask = item_mask(item, HALF, tree_mask, sizes, CONFIG)
            m_i = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S))
            l_i = no_sums(S, CONFIG)
            acc = gl.full([64, D], 0.0, gl.float32, O)
            block = item.begin_block
            start = block * BN
            keys.wait_full(step)
            k_tile = keys.tile.index(keys.stage(step)).permute((1, 0))
            s = hopper.warpgroup_mma(q_tile, k_tile, zeros, use_acc=False)
            keys.release(step)
            p, m_i, l_i, alpha = online_softmax(s, start, q_idx, m_i, l_i, mask, scales, CONFIG)
            weights = gl.convert_layout(p.to(values.tile.dtype), P)
            for _ in range(1, item.num_blocks):
                v_stage = values.stage(step)
                v_start = start
                block = next_block(item, block, CONFIG)
                start = block * BN
                keys.wait_full(step + 1)
                k_tile = keys.tile.index(keys.stage(step + 1)).permute((1, 0))
                next_s = hopper.warpgroup_mma(q_tile, k_tile, zeros, use_acc=False, is_async=True)
                values.wait_full(step)
                zero_tail(values.tile, v_stage, v_start, item.first_key, item.seq_len, BN, D)
                next_acc = hopper.warpgroup_mma(
                    weights, values.tile.index(v_stage), acc, is_async=True
                )  # fmt: skip
                s = hopper.warpgroup_mma_wait(1, deps=[next_s])
                keys.release(step + 1)
                s, log2_scale, m_new = update_max(s, start, q_idx, m_i, mask, scales, CONFIG)
                # before the exponentials: small pages want the place of values
                acc = finish_product(next_acc, weights, values, step, step)
                p, l_i, alpha = exp_and_sum(s, log2_scale, m_i, m_new, l_i, CONFIG)
                m_i = m_new
                acc = rescale(acc, gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None], CONFIG)
                weights = gl.convert_layout(p.to(values.tile.dtype), P)
                step += 1
            v_stage = values.stage(step)
            values.wait_full(step)
            zero_tail(values.tile, v_stage, start, item.first_key, item.seq_len, BN, D)
            acc = hopper.warpgroup_mma(weights, values.tile.index(v_stage), acc)
            values.release(step)
            step += 1
            l_i = row_sums(l_i, m_i, CONFIG)
            item, place = read_item(items, iteration, 4)  # again: few registers are left
            begin_following(items, iteration, item, work.last, q, q_tiles, HALF, CONFIG)
            store_state(acc, m_i, l_i, out, partial, place, item, HALF, sinks, scales, CONFIG)
        else:  # keys of few rows, all of them in the other half
            begin_following(items, iteration, item, work.last, q, q_tiles, HALF, CONFIG)
            for _ in range(0, item.num_blocks):
                keys.wait_full(step)
                keys.release(step)
                values.wait_full(step)
                values.release(step)
                step += 1
        next_unit = item.next_unit
        items.release(iteration)
        iteration += 1


@gluon.jit(do_not_specialize=["batch", "drafts", "table_stride", "window"])
def decode_hopper(
    q,
    out,
    partial,
    requests,
    work_indptr,
    spans,
    first_spans,
    tree_mask,
    batch,
    drafts,
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
    """Do what decode_splits does, with TILE_ROWS rows a tile and no positions for a tree's windows.

    k_rows, v_rows: the stores as rows of tokens for TMA, [COPY_ROWS, 64] at a time.
    """
    sizes = Sizes(batch, window, drafts, table_stride, 1)
    plan = Plan(work_indptr, spans, first_spans)
    prefetch_first_span(plan, CONFIG)
    T: gl.constexpr = q.ptr.dtype.element_ty
    HALVES: gl.constexpr = CONFIG.TILE_ROWS // 64
    QS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, CONFIG.D], T)
    q_tiles = gl.allocate_shared_memory(T, [2 * HALVES, 64, CONFIG.D], QS)
    keys, values = new_kv_channels(T, CONFIG)
    init_barriers((keys, values), 128 if CONFIG.GATHERS else 1, HALVES)
    if HALVES == 2:
        launch_dependents()
        items = new_items()
        init_barriers((items,), 1, HALVES)
        gl.warp_specialize(
            [
                (
                    attend_half,
                    (
                        items, plan, q_tiles, keys, values, q, out, partial, tree_mask, sinks,
                        scales, sizes, 0, CONFIG,
                    ),
                ),
                (
                    attend_half,
                    (
                        items, plan, q_tiles, keys, values, q, out, partial, tree_mask, sinks,
                        scales, sizes, 1, CONFIG,
                    ),
                ),
                (load_items, (items, keys, values, k_rows, v_rows, requests, plan, sizes, CONFIG)),
            ],
            [4, 1],
            [224, 56],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    attend,
                    (
                        q_tiles, keys, values, q, out, partial, requests, plan, tree_mask,
                        sinks, scales, sizes, CONFIG,
                    ),
                ),
                (
                    gather_keys_values if CONFIG.GATHERS else load_keys_values,
                    (
                        keys, values, k if CONFIG.GATHERS else k_rows,
                        v if CONFIG.GATHERS else v_rows, requests, plan, sizes, CONFIG,
                    ),
                ),
            ],
            [4 if CONFIG.GATHERS else 1],
            [56 if CONFIG.GATHERS else 40],
        )  # fmt: skip
