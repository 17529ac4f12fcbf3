"""Absorbed MLA decode for Hopper: TMA brings each latent once, two groups of warps share it.

One group scores the 64 rows of a tile and hands their weights over through shared memory. Each
group sums the values of half of the columns: an accumulator of 64 by 512 is more than the registers
of one hold. The line of work is portable/decode.py's.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.
# No `from __future__ import annotations`: an aggregate checks its fields by these annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attn_core.backends.triton.hopper.channel import aggregate, init_barriers, new_channel
from attn_core.backends.triton.hopper.common import (
    Sizes,
    row_offsets,
    zero_tail,
)
from attn_core.backends.triton.hopper.softmax import KeyMask, softmax_step, store_lse
from attn_core.backends.triton.hopper.split_kv import (
    launch_dependents,
    partial_slot,
    program_work,
    split_item,
)
from attn_core.backends.triton.masks import MASK_CAUSAL


@aggregate
class LatentTile:
    """64 rows of 576 columns: the low and the high 256 of the latent, and 64 rotary ones."""

    low: gl.shared_memory_descriptor
    high: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, low, high, rope):
        self.low = low
        self.high = high
        self.rope = rope


@aggregate
class WeightTile:
    """Weights of 64 rows and 64 keys, and the float32 factor [64] of what was summed before."""

    p: gl.shared_memory_descriptor
    factor: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, p, factor):
        self.p = p
        self.factor = factor


@gluon.jit
def alloc_latents(dtype: gl.constexpr, STAGES: gl.constexpr):
    """Allocate STAGES latent tiles."""
    HALF_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], dtype)
    ROPE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    low = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], HALF_LAYOUT)
    high = gl.allocate_shared_memory(dtype, [STAGES, 64, 256], HALF_LAYOUT)
    rope = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], ROPE_LAYOUT)
    return LatentTile(low, high, rope)


@gluon.jit
def alloc_weights(dtype: gl.constexpr):
    """Allocate what one group hands to the other."""
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    FACTOR_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    p = gl.allocate_shared_memory(dtype, [64, 64], P_LAYOUT)
    return WeightTile(p, gl.allocate_shared_memory(gl.float32, [64], FACTOR_LAYOUT))


@gluon.jit
def load_columns(
    tma_rows, row, tile, index, full, FIRST: gl.constexpr, COPIES: gl.constexpr, ALL: gl.constexpr
):
    """Copy rows from `row` on, columns FIRST … of them, into part `index` of COPIES of a stage.

    index: stage · COPIES + copy. ALL: columns of the tile.
    """
    PANELS: gl.constexpr = ALL // 64
    SHAPE: gl.constexpr = [tile.shape[0] * PANELS * COPIES, 64 // COPIES, 64]
    parts = tile._reinterpret(tile.dtype, SHAPE, tma_rows.layout)
    stage = index // COPIES
    copy = index % COPIES
    for panel in gl.static_range(PANELS):
        tma.async_copy_global_to_shared(
            tma_rows,
            [row, FIRST + panel * 64],
            full,
            parts.index((stage * PANELS + panel) * COPIES + copy),
        )


@gluon.jit
def load_latents(
    queries, low, high, q_rows, k_rows, requests, work, sizes, CONFIG: gl.constexpr
):  # fmt: skip
    """Bring the queries and then the latents of each item, the last block first."""
    ROWS: gl.constexpr = min(CONFIG.PAGE, 64)
    COPIES: gl.constexpr = 64 // ROWS
    step = 0
    turn = 0
    seq = work.seq
    next_unit = work.start
    while next_unit < work.end:
        item = split_item(work, seq, next_unit, requests, sizes, CONFIG)
        seq = item.seq
        pages = requests.page_table + seq.to(gl.int64) * sizes.table_stride
        q_row = item.q_start * CONFIG.GROUP + work.row_block * 64
        queries.wait_free(turn)
        q_full = queries.full.index(0)
        mbarrier.expect(q_full, 64 * 576 * 2)
        load_columns(q_rows, q_row, queries.tile.rope, 0, q_full, 512, 1, 64)
        load_columns(q_rows, q_row, queries.tile.low, 0, q_full, 0, 1, 256)
        load_columns(q_rows, q_row, queries.tile.high, 0, q_full, 256, 1, 256)
        for i in range(0, item.num_blocks):
            start = (item.first_block + item.num_blocks - 1 - i) * 64
            rows = ()
            for copy in gl.static_range(COPIES):
                token = start + copy * ROWS
                page = gl.load(pages + gl.minimum(token, item.seq_len - 1) // CONFIG.PAGE)
                rows = rows + (page * CONFIG.PAGE + token % CONFIG.PAGE,)
            stage = low.stage(step)
            low.wait_free(step)
            full = low.full.index(stage)
            mbarrier.expect(full, 64 * 320 * 2)
            for copy in gl.static_range(COPIES):
                part = stage * COPIES + copy
                load_columns(k_rows, rows[copy], low.tile.rope, part, full, 512, COPIES, 64)
                load_columns(k_rows, rows[copy], low.tile.low, part, full, 0, COPIES, 256)
            high.wait_free(step)
            full = high.full.index(stage)
            mbarrier.expect(full, 64 * 256 * 2)
            for copy in gl.static_range(COPIES):
                part = stage * COPIES + copy
                load_columns(k_rows, rows[copy], high.tile.high, part, full, 256, COPIES, 256)
            step += 1
        next_unit += item.end_unit - item.start_unit
        turn += 1


@gluon.jit
def begin_scores(queries, low, step):
    """Begin the products of the rotary and the low columns of a block, when they are there."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    zeros = gl.full([64, 64], 0.0, gl.float32, S)
    stage = low.stage(step)
    low.wait_full(step)
    k_rope = low.tile.rope.index(stage).permute((1, 0))
    k_low = low.tile.low.index(stage).permute((1, 0))
    q = queries.tile
    s = hopper.warpgroup_mma(q.rope.index(0), k_rope, zeros, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(q.low.index(0), k_low, s, is_async=True)


@gluon.jit
def finish_scores(queries, high, step, s):
    """Add the product of the high columns and wait for the scores of a block."""
    high.wait_full(step)
    k_high = high.tile.high.index(high.stage(step)).permute((1, 0))
    s = hopper.warpgroup_mma(queries.tile.high.index(0), k_high, s, is_async=True)
    return hopper.warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def store_half(
    acc, factor, out, partial, work, unit, item, HALF: gl.constexpr, CONFIG: gl.constexpr
):
    """Store columns 256 · HALF … of acc · factor: outputs, or those of an item's partial state."""
    GROUP: gl.constexpr = CONFIG.GROUP
    L: gl.constexpr = acc.type.layout
    acc = acc * factor[:, None]
    rows = gl.arange(0, 64, gl.SliceLayout(1, L))
    tile_rows = work.row_block * 64 + rows
    columns = 256 * HALF + gl.arange(0, 256, gl.SliceLayout(0, L))
    valid = (tile_rows < item.q_len * GROUP)[:, None] & (columns >= 0)[None, :]
    if item.end_unit - item.start_unit == item.num_units:
        offsets = row_offsets(out, item.q_start, 0, tile_rows, GROUP)
        result = acc.to(out.ptr.dtype.element_ty)
        gl.store(out.ptr + offsets[:, None] + columns[None, :], result, mask=valid)
    else:
        offsets = (partial_slot(work, unit, item, CONFIG).to(gl.int64) * 64 + rows) * 512
        gl.store(partial.out + offsets[:, None] + columns[None, :], acc, mask=valid)


@gluon.jit
def attend_low(
    queries,
    low,
    high,
    weights,
    out,
    partial,
    requests,
    work,
    scales,
    sizes,
    CONFIG: gl.constexpr,
):
    """Score the blocks of this program's items, and sum the low columns of their values.

    The product of the next block's scores follows that of a block's values without a pause.
    """
    GROUP: gl.constexpr = CONFIG.GROUP
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    first_row = work.row_block * 64
    q_idx = (first_row + gl.arange(0, 64, gl.SliceLayout(1, S))) // GROUP
    step = 0
    message = 0
    turn = 0
    seq = work.seq
    next_unit = work.start
    while next_unit < work.end:
        item = split_item(work, seq, next_unit, requests, sizes, CONFIG)
        seq = item.seq
        seq_len = item.seq_len
        context_len = seq_len - item.q_len
        unmasked_high = seq_len
        if CONFIG.MASK == MASK_CAUSAL:
            unmasked_high = gl.minimum(seq_len, context_len + first_row // GROUP + 1)
        mask = KeyMask(seq_len, context_len, 0, unmasked_high, 0, 0, 0)
        m_i = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        l_i = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S))
        acc = gl.full([64, 256], 0.0, gl.float32, O)
        s = gl.full([64, 64], 0.0, gl.float32, S)
        queries.wait_full(turn)
        if item.num_blocks > 0:
            s = finish_scores(queries, high, step, begin_scores(queries, low, step))
        for i in range(0, item.num_blocks):
            start = (item.first_block + item.num_blocks - 1 - i) * 64
            p, m_i, l_i, alpha = softmax_step(
                s, start, q_idx, m_i, l_i, mask, scales, CONFIG, SCALE_AFTER_MAX=False
            )
            p = p.to(low.tile.low.dtype)
            weights.wait_free(message)
            weights.tile.p.store(p)
            weights.tile.factor.store(alpha)
            hopper.fence_async_shared()
            weights.fill(message)
            message += 1
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
            stage = low.stage(step)
            zero_tail(low.tile.low, stage, start, 0, seq_len, 64, 256)
            p = gl.convert_layout(p, P)
            summed = hopper.warpgroup_mma(p, low.tile.low.index(stage), acc, is_async=True)
            if i + 1 < item.num_blocks:
                begun = begin_scores(queries, low, step + 1)
                acc, p = hopper.warpgroup_mma_wait(2, deps=[summed, p])
                low.release(step)
                s = finish_scores(queries, high, step + 1, begun)
            else:
                queries.release(turn)
                acc, p = hopper.warpgroup_mma_wait(0, deps=[summed, p])
                low.release(step)
            step += 1
        if item.num_blocks == 0:  # no keys: nobody has given the queries back
            queries.release(turn)
        empty = l_i == 0.0
        l_i = gl.where(empty, 1.0, l_i)
        unsplit = item.end_unit - item.start_unit == item.num_units
        factor = gl.where(unsplit, scales.v, 1.0) / l_i
        weights.wait_free(message)
        weights.tile.factor.store(factor)
        weights.fill(message)
        message += 1
        if unsplit:
            store_lse(m_i, l_i, empty, out, item.q_start, item.q_len, 0, first_row, CONFIG)
        else:
            slot = partial_slot(work, next_unit, item, CONFIG)
            lse_rows = slot.to(gl.int64) * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
            gl.store(partial.lse + lse_rows, gl.where(empty, -float("inf"), m_i + gl.log2(l_i)))
        factor = gl.convert_layout(factor, gl.SliceLayout(1, O))
        store_half(acc, factor, out, partial, work, next_unit, item, 0, CONFIG)
        next_unit += item.end_unit - item.start_unit
        turn += 1


@gluon.jit
def attend_high(high, weights, out, partial, requests, work, sizes, CONFIG: gl.constexpr):
    """Sum the high columns of the values with the weights that the other group hands over."""
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])  # noqa: E741
    step = 0
    message = 0
    seq = work.seq
    next_unit = work.start
    while next_unit < work.end:
        item = split_item(work, seq, next_unit, requests, sizes, CONFIG)
        seq = item.seq
        acc = gl.full([64, 256], 0.0, gl.float32, O)
        for i in range(0, item.num_blocks):
            start = (item.first_block + item.num_blocks - 1 - i) * 64
            stage = high.stage(step)
            high.wait_full(step)
            weights.wait_full(message)
            acc = acc * weights.tile.factor.load(gl.SliceLayout(1, O))[:, None]
            zero_tail(high.tile.high, stage, start, 0, item.seq_len, 64, 256)
            acc = hopper.warpgroup_mma(weights.tile.p, high.tile.high.index(stage), acc)
            weights.release(message)
            high.release(step)
            message += 1
            step += 1
        weights.wait_full(message)
        factor = weights.tile.factor.load(gl.SliceLayout(1, O))
        weights.release(message)
        message += 1
        store_half(acc, factor, out, partial, work, next_unit, item, 1, CONFIG)
        next_unit += item.end_unit - item.start_unit


@gluon.jit(do_not_specialize=["batch", "table_stride"])
def decode_mla_hopper(
    q_rows,
    out,
    partial,
    requests,
    work_indptr,
    batch,
    table_stride,
    k_rows,
    scales,
    CONFIG: gl.constexpr,
):
    """Do what decode_splits does for one latent KV head, 512 + 64, in blocks of 64 keys.

    q_rows: [T · GROUP, 576] by [64, 64]; k_rows: [tokens, 576] by [min(PAGE, 64), 64].
    """
    launch_dependents()
    sizes = Sizes(batch, 0, 0, table_stride, 1)
    work = program_work(work_indptr, sizes, CONFIG)
    if work.start < work.end:
        T: gl.constexpr = out.ptr.dtype.element_ty
        k_tile = alloc_latents(T, CONFIG.STAGES)
        queries = new_channel(alloc_latents(T, 1), 1)
        low = new_channel(k_tile, CONFIG.STAGES)  # and the rotary columns
        high = new_channel(k_tile, CONFIG.STAGES)
        weights = new_channel(alloc_weights(T), 1)
        init_barriers((queries, weights), 1, 1)
        init_barriers((low, high), 1, 1)
        gl.warp_specialize(
            [
                (
                    attend_low,
                    (
                        queries, low, high, weights, out, partial, requests, work, scales, sizes,
                        CONFIG,
                    ),
                ),
                (attend_high, (high, weights, out, partial, requests, work, sizes, CONFIG)),
                (load_latents, (queries, low, high, q_rows, k_rows, requests, work, sizes, CONFIG)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
