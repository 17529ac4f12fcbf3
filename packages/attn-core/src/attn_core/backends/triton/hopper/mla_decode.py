"""Absorbed MLA decode for Hopper: TMA brings each latent once, two groups of warps share it.

Both groups score the same 64 rows, and each adds up half of the values: an accumulator of 64 by
512 is more than the registers of one group hold, and scoring twice costs less than handing the
probabilities over. The line of work is portable/decode.py's.
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
from attn_core.backends.triton.hopper.split_kv import partial_slot, program_work, split_item
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
def load_latent_rows(
    tma_rows, row, tile, stage, full, copy, COPIES: gl.constexpr, STAGES: gl.constexpr
):
    """Copy rows from `row` on, 576 columns of them, into one of the COPIES parts of a stage."""
    ROWS: gl.constexpr = 64 // COPIES
    HALF: gl.constexpr = [STAGES * 4 * COPIES, ROWS, 64]
    low = tile.low._reinterpret(tile.low.dtype, HALF, tma_rows.layout)
    high = tile.high._reinterpret(tile.high.dtype, HALF, tma_rows.layout)
    rope = tile.rope._reinterpret(tile.rope.dtype, [STAGES * COPIES, ROWS, 64], tma_rows.layout)
    for panel in gl.static_range(4):
        index = (stage * 4 + panel) * COPIES + copy
        tma.async_copy_global_to_shared(tma_rows, [row, panel * 64], full, low.index(index))
        tma.async_copy_global_to_shared(tma_rows, [row, 256 + panel * 64], full, high.index(index))
    tma.async_copy_global_to_shared(tma_rows, [row, 512], full, rope.index(stage * COPIES + copy))


@gluon.jit
def load_latents(
    queries, latents, q_rows, k_rows, requests, work, sizes, CONFIG: gl.constexpr
):  # fmt: skip
    """Bring the queries and then the latents of each item, the last block first."""
    ROWS: gl.constexpr = min(CONFIG.PAGE, 64)
    COPIES: gl.constexpr = 64 // ROWS
    step = 0
    turn = 0
    next_unit = work.start
    while next_unit < work.end:
        item = split_item(work, next_unit, requests, sizes, CONFIG)
        pages = requests.page_table + item.seq.to(gl.int64) * sizes.table_stride
        q_row = item.q_start * CONFIG.GROUP + item.tile * 64
        queries.wait_free(turn)
        q_full = queries.full.index(0)
        mbarrier.expect(q_full, 64 * 576 * 2)
        load_latent_rows(q_rows, q_row, queries.tile, 0, q_full, 0, 1, 1)
        for i in range(0, item.num_blocks):
            start = (item.first_block + item.num_blocks - 1 - i) * 64
            stage = latents.stage(step)
            latents.wait_free(step)
            full = latents.full.index(stage)
            mbarrier.expect(full, 64 * 576 * 2)
            for copy in gl.static_range(COPIES):
                token = start + copy * ROWS
                page = gl.load(pages + gl.minimum(token, item.seq_len - 1) // CONFIG.PAGE)
                row = page * CONFIG.PAGE + token % CONFIG.PAGE
                load_latent_rows(
                    k_rows, row, latents.tile, stage, full, copy, COPIES, CONFIG.STAGES
                )  # fmt: skip
            step += 1
        next_unit += item.end_unit - item.start_unit
        turn += 1


@gluon.jit
def attend_half(
    queries,
    latents,
    v_tile,
    out,
    partial,
    requests,
    work,
    scales,
    sizes,
    HALF: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """Attend over this program's items, with columns 256 · HALF … of the values."""
    GROUP: gl.constexpr = CONFIG.GROUP
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    zeros = gl.full([64, 64], 0.0, gl.float32, S)
    q_low = queries.tile.low.index(0)
    q_high = queries.tile.high.index(0)
    q_rope = queries.tile.rope.index(0)
    step = 0
    turn = 0
    next_unit = work.start
    while next_unit < work.end:
        item = split_item(work, next_unit, requests, sizes, CONFIG)
        seq_len = item.seq_len
        context_len = seq_len - item.q_len
        first_row = item.tile * 64
        q_idx = (first_row + gl.arange(0, 64, gl.SliceLayout(1, S))) // GROUP
        unmasked_high = seq_len
        if CONFIG.MASK == MASK_CAUSAL:
            unmasked_high = gl.minimum(seq_len, context_len + first_row // GROUP + 1)
        mask = KeyMask(seq_len, context_len, 0, unmasked_high, 0, 0, 0)
        m_i = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        l_i = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S))
        acc = gl.full([64, 256], 0.0, gl.float32, O)
        queries.wait_full(turn)
        for i in range(0, item.num_blocks):
            start = (item.first_block + item.num_blocks - 1 - i) * 64
            stage = latents.stage(step)
            latents.wait_full(step)
            k_low = latents.tile.low.index(stage).permute((1, 0))
            k_high = latents.tile.high.index(stage).permute((1, 0))
            k_rope = latents.tile.rope.index(stage).permute((1, 0))
            s = hopper.warpgroup_mma(q_low, k_low, zeros, use_acc=False, is_async=True)
            s = hopper.warpgroup_mma(q_high, k_high, s, is_async=True)
            s = hopper.warpgroup_mma(q_rope, k_rope, s, is_async=True)
            s = hopper.warpgroup_mma_wait(0, deps=[s])
            if i == item.num_blocks - 1:
                queries.release(turn)
            p, m_i, l_i, alpha = softmax_step(
                s, start, q_idx, m_i, l_i, mask, scales, CONFIG, SCALE_AFTER_MAX=False
            )
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
            zero_tail(v_tile, stage, start, 0, seq_len, 64, 256)
            weights = gl.convert_layout(p.to(v_tile.dtype), P)
            acc = hopper.warpgroup_mma(weights, v_tile.index(stage), acc)
            latents.release(step)
            step += 1
        if item.num_blocks == 0:  # no keys: nobody has given the queries back
            queries.release(turn)
        empty = l_i == 0.0
        l_i = gl.where(empty, 1.0, l_i)
        rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, O))
        columns = 256 * HALF + gl.arange(0, 256, gl.SliceLayout(0, O))
        if item.end_unit - item.start_unit == item.num_units:
            normalized = acc * gl.convert_layout(scales.v / l_i, gl.SliceLayout(1, O))[:, None]
            offsets = row_offsets(out, item.q_start, 0, rows, GROUP)
            valid = (rows // GROUP < item.q_len)[:, None] & (columns >= 0)[None, :]
            gl.store(
                out.ptr + offsets[:, None] + columns[None, :],
                normalized.to(out.ptr.dtype.element_ty),
                mask=valid,
            )
            if HALF == 0:
                store_lse(m_i, l_i, empty, out, item.q_start, item.q_len, 0, first_row, CONFIG)
        else:
            slot = partial_slot(next_unit, item, CONFIG)
            state_rows = slot.to(gl.int64) * 64 + rows - first_row
            normalized = acc * gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, O))[:, None]
            gl.store(partial.out + state_rows[:, None] * 512 + columns[None, :], normalized)
            if HALF == 0:
                lse_rows = slot.to(gl.int64) * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
                lse = gl.where(empty, -float("inf"), m_i + gl.log2(l_i))
                gl.store(partial.lse + lse_rows, lse)
        next_unit += item.end_unit - item.start_unit
        turn += 1


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
    sizes = Sizes(batch, 0, 0, table_stride, 1)
    work = program_work(work_indptr, sizes, CONFIG)
    if work.start < work.end:
        T: gl.constexpr = out.ptr.dtype.element_ty
        q_tile = alloc_latents(T, 1)
        k_tile = alloc_latents(T, CONFIG.STAGES)
        queries = new_channel(q_tile, 1)
        latents = new_channel(k_tile, CONFIG.STAGES)
        init_barriers((queries,), 1, 2)
        init_barriers((latents,), 1, 2)
        gl.warp_specialize(
            [
                (
                    attend_half,
                    (
                        queries, latents, k_tile.low, out, partial, requests, work, scales,
                        sizes, 0, CONFIG,
                    ),
                ),
                (
                    attend_half,
                    (
                        queries, latents, k_tile.high, out, partial, requests, work, scales,
                        sizes, 1, CONFIG,
                    ),
                ),
                (load_latents, (queries, latents, q_rows, k_rows, requests, work, sizes, CONFIG)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
