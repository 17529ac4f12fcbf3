"""Split-KV attention of few queries for Hopper: one group of warps multiplies, others load keys.

The queue of work, its cuts and what is kept of them are portable/decode.py's; two programs share a
multiprocessor.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from attn_core.backends.triton.hopper.channel import init_barriers, new_kv_channels
from attn_core.backends.triton.hopper.common import (
    Sizes,
    load_kv_tile,
    lookup_slots,
    row_offsets,
    zero_tail,
)
from attn_core.backends.triton.hopper.softmax import KeyMask, add_sink, softmax_step, store_output
from attn_core.backends.triton.hopper.split_kv import (
    is_final,
    next_block,
    partial_rows,
    program_work,
    split_item,
)
from attn_core.backends.triton.masks import MASK_CAUSAL, MASK_TREE


@gluon.jit
def load_keys_values(
    keys, values, k_rows, v_rows, k, v, requests, work, sizes, CONFIG: gl.constexpr
):  # fmt: skip
    """Fill both channels with the blocks of each item, in the order of next_block."""
    step = 0
    seq = work.seq
    next_unit = work.start
    while next_unit < work.last:
        item = split_item(work, seq, next_unit, requests, sizes, CONFIG)
        seq = item.seq
        pages = requests.page_table + item.request.to(gl.int64) * sizes.table_stride
        head = item.head
        block = item.begin_block
        start = block * CONFIG.BN
        slots = lookup_slots(pages, item.first_key, item.seq_len, start, CONFIG)
        for _ in range(0, item.num_blocks):
            block = next_block(item, block, CONFIG)
            next_start = block * CONFIG.BN
            next_slots = lookup_slots(pages, item.first_key, item.seq_len, next_start, CONFIG)
            keys.wait_free(step)
            load_kv_tile(
                keys, step, k_rows, k, pages, slots, 0, head, item.seq_len, start, CONFIG
            )  # fmt: skip
            values.wait_free(step)
            load_kv_tile(
                values, step, v_rows, v, pages, slots, 0, head, item.seq_len, start, CONFIG
            )  # fmt: skip
            slots = next_slots
            start = next_start
            step += 1
        next_unit = item.next_unit


@gluon.jit
def attend(
    q_tile,
    keys,
    values,
    q,
    out,
    partial,
    requests,
    work,
    tree_mask,
    sinks,
    scales,
    sizes,
    CONFIG: gl.constexpr,
):
    """Attend over this program's items with 64 rows each."""
    BN: gl.constexpr = CONFIG.BN
    D: gl.constexpr = CONFIG.D
    GROUP: gl.constexpr = CONFIG.GROUP
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    B: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    zeros = gl.full([64, BN], 0.0, gl.float32, S)
    step = 0
    seq = work.seq
    next_unit = work.start
    while next_unit < work.last:
        item = split_item(work, seq, next_unit, requests, sizes, CONFIG)
        seq = item.seq
        seq_len = item.seq_len
        head = item.head
        context_len = item.context_len
        first_row = item.row_block * 64
        q_rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, B))
        columns = gl.arange(0, D, gl.SliceLayout(0, B))
        q_offsets = row_offsets(q, item.q_start, head, q_rows, GROUP)
        valid = (q_rows // GROUP < item.q_len)[:, None] & (columns >= 0)[None, :]
        q_tile.store(gl.load(q.ptr + q_offsets[:, None] + columns[None, :], mask=valid, other=0.0))
        hopper.fence_async_shared()

        rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, S))
        q_idx = rows // GROUP
        unmasked_low = 0
        unmasked_high = seq_len
        if CONFIG.MASK == MASK_CAUSAL:
            unmasked_high = gl.minimum(seq_len, context_len + first_row // GROUP + 1)
        if CONFIG.MASK == MASK_TREE:
            unmasked_high = context_len
        if CONFIG.WINDOW:
            unmasked_low = gl.maximum(seq_len - sizes.window, 0)
        tree = tree_mask + item.request.to(gl.int64) * sizes.drafts * sizes.drafts
        mask = KeyMask(
            seq_len, context_len, unmasked_low, unmasked_high, sizes.window, tree, sizes.drafts
        )
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
                zero_tail(values.tile, stage, start, item.first_key, seq_len, BN, D)
            acc = hopper.warpgroup_mma(weights, values.tile.index(stage), acc)
            values.release(step)
            step += 1
            block = next_block(item, block, CONFIG)

        final = is_final(item, CONFIG)
        if CONFIG.USE_SINKS:
            if final:
                acc, m_i, l_i = add_sink(acc, m_i, l_i, sinks + head * GROUP, rows % GROUP)
        empty = l_i == 0.0
        l_i = gl.where(empty, 1.0, l_i)
        if final:
            store_output(
                acc, m_i, l_i, empty, out, scales.v, item.q_start, item.q_len, head, first_row,
                CONFIG,
            )  # fmt: skip
        else:
            normalized = acc * gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, O))[:, None]
            out_rows = gl.arange(0, 64, gl.SliceLayout(1, O))
            out_columns = gl.arange(0, D, gl.SliceLayout(0, O))
            state_rows = partial_rows(work, next_unit, item, out_rows, requests, sizes, CONFIG)
            row_mask = (first_row + out_rows < item.q_len * GROUP)[:, None]
            row_mask = row_mask & (out_columns >= 0)[None, :]
            gl.store(
                partial.out + state_rows[:, None] * D + out_columns[None, :],
                normalized,
                mask=row_mask,
            )
            lse_rows = gl.arange(0, 64, gl.SliceLayout(1, S))
            lse_at = partial_rows(work, next_unit, item, lse_rows, requests, sizes, CONFIG)
            lse = gl.where(empty, -float("inf"), m_i + gl.log2(l_i))
            if CONFIG.SHARED:  # a row that is not live has no place of its own
                live_rows = first_row + lse_rows < item.q_len * GROUP
                gl.store(partial.lse + lse_at, lse, mask=live_rows)
            else:
                gl.store(partial.lse + lse_at, lse)
        next_unit = item.next_unit


@gluon.jit(do_not_specialize=["batch", "drafts", "table_stride", "window"])
def decode_hopper(
    q,
    out,
    partial,
    requests,
    work_indptr,
    spans,
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
    """Do what decode_splits does, with 64 rows a tile and no positions for a tree's windows.

    k_rows, v_rows: the stores as rows of tokens for TMA, [min(max(PAGE, 8), BN), 64] at a time.
    """
    sizes = Sizes(batch, window, drafts, table_stride, 1)
    work = program_work(work_indptr, spans, sizes, CONFIG)
    if work.start < work.end:
        T: gl.constexpr = q.ptr.dtype.element_ty
        QS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, CONFIG.D], T)
        q_tile = gl.allocate_shared_memory(T, [64, CONFIG.D], QS)
        keys, values = new_kv_channels(T, CONFIG)
        init_barriers((keys, values), 128 if CONFIG.GATHERS else 1, 1)
        gl.warp_specialize(
            [
                (
                    attend,
                    (
                        q_tile, keys, values, q, out, partial, requests, work, tree_mask, sinks,
                        scales, sizes, CONFIG,
                    ),
                ),
                (
                    load_keys_values,
                    (keys, values, k_rows, v_rows, k, v, requests, work, sizes, CONFIG),
                ),
            ],
            [4 if CONFIG.GATHERS else 1],
            [56 if CONFIG.GATHERS else 40 if CONFIG.BN > 64 and CONFIG.MASK != MASK_TREE else 24],
        )  # fmt: skip
