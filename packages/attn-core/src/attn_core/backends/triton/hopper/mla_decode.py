"""Absorbed MLA decode for Hopper: TMA brings each latent once, two groups of warps share it.

One group scores the 64 rows of a tile and sums the high 128 columns of the values. It hands the
weights over to the other one, which sums the low 384. Its accumulator is that small so that its
registers hold most of the queries, which leaves shared memory for a third block of latents. The
queue of work is portable/decode.py's.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.
# No `from __future__ import annotations`: an aggregate checks its fields by these annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from attn_core.backends.triton.hopper.channel import init_barriers, new_channel
from attn_core.backends.triton.hopper.common import Sizes, zero_tail
from attn_core.backends.triton.hopper.mla_latents import (
    GATHER_WARPS,
    HIGH,
    MIDDLE,
    LatentTile,
    QueryTile,
    alloc_columns,
    alloc_factors,
    gather_latents,
    load_latents,
)
from attn_core.backends.triton.hopper.mla_outputs import store_columns
from attn_core.backends.triton.hopper.mla_scores import add_scores, begin_scores
from attn_core.backends.triton.hopper.online_softmax import (
    exp_and_sum,
    no_sums,
    rescale,
    row_sums,
    update_max,
)
from attn_core.backends.triton.hopper.partials import is_final, partial_rows, state_place
from attn_core.backends.triton.hopper.program_work import (
    Plan,
    launch_dependents,
    prefetch_first_span,
    prefetch_request,
    program_work,
)
from attn_core.backends.triton.hopper.softmax import KeyMask, store_lse
from attn_core.backends.triton.hopper.split_kv import next_block, split_item
from attn_core.backends.triton.masks import MASK_CAUSAL


@gluon.jit
def attend_high(
    queries, latents, high, alphas, factors, out, partial, requests, plan, scales, sizes,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Score the blocks of this program's items, and sum the high columns of their values."""
    work = program_work(plan, sizes, CONFIG)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    Q: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    first_row = work.row_block * 64  # of a request; those of a group see all of its keys
    q_idx = (first_row + gl.arange(0, 64, gl.SliceLayout(1, S))) // CONFIG.GROUP
    tile = latents.tile
    step = 0
    block = 0
    iteration = 0
    seq = work.seq
    next_unit = work.start
    while next_unit < work.last:
        item = split_item(work, seq, next_unit, requests, sizes, CONFIG)
        seq = item.seq
        unmasked_high = item.seq_len
        if CONFIG.MASK == MASK_CAUSAL:
            first_end = item.context_len + first_row // CONFIG.GROUP + 1
            unmasked_high = gl.minimum(item.seq_len, first_end)
        mask = KeyMask(item.seq_len, item.context_len, 0, unmasked_high, 0, 0, 0)
        m_i = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        l_i = no_sums(S, CONFIG)
        acc = gl.full([64, 128], 0.0, gl.float32, O)
        s = gl.full([64, 64], 0.0, gl.float32, S)
        latents.wait_full(step)
        stage = latents.stage(step)
        q_low = tile.low.index(stage).load(Q)
        q_middle = tile.middle.index(stage).load(Q)
        hopper.fence_async_shared()  # TMA writes there next
        latents.release(step)
        alphas.fill(step)  # the other group counts this step, too
        step += 1
        queries.wait_full(iteration)
        if item.num_blocks > 0:
            started = begin_scores(queries, q_middle, latents, step, CONFIG)
            started = add_scores(queries, q_low, latents, high, step, block, started, CONFIG)
            s = hopper.warpgroup_mma_wait(0, deps=[started])
        key_block = item.begin_block
        for i in range(0, item.num_blocks):
            start = key_block * 64
            if i + 1 == item.num_blocks:
                queries.release(iteration)
            s, log2_scale, m_new = update_max(s, start, q_idx, m_i, mask, scales, CONFIG)
            p, l_i, alpha = exp_and_sum(s, log2_scale, m_i, m_new, l_i, CONFIG)
            m_i = m_new
            acc = rescale(acc, gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None], CONFIG)
            p = p.to(tile.low.dtype)
            tile.rope.index(latents.stage(step)).store(p)
            alphas.tile.index(latents.stage(step)).store(alpha)
            hopper.fence_async_shared()
            if not CONFIG.GATHERS:
                zero_tail(high.tile, high.stage(block), start, 0, item.seq_len, 64, 128)
            p = gl.convert_layout(p, P)
            summed = hopper.warpgroup_mma(p, high.tile.index(high.stage(block)), acc, is_async=True)
            if i + 1 < item.num_blocks:
                started = begin_scores(queries, q_middle, latents, step + 1, CONFIG)
                acc, p = hopper.warpgroup_mma_wait(2, deps=[summed, p])
                high.release(block)
                started = add_scores(
                    queries, q_low, latents, high, step + 1, block + 1, started, CONFIG
                )
                # the other group's product is to run beside the softmax, not beside these
                started = hopper.warpgroup_mma_wait(2, deps=[started])
                alphas.fill(step)
                s = hopper.warpgroup_mma_wait(0, deps=[started])
            else:
                alphas.fill(step)
                acc, p = hopper.warpgroup_mma_wait(0, deps=[summed, p])
            key_block = next_block(item, key_block, CONFIG)
            step += 1
            block += 1
        if item.num_blocks <= 0:  # no keys: nobody has given the queries back
            queries.release(iteration)
        l_i = row_sums(l_i, m_i, CONFIG)
        empty = l_i == 0.0
        l_i = gl.where(empty, 1.0, l_i)
        final = is_final(item, CONFIG)
        factor = gl.where(final, scales.v, 1.0) / l_i
        factors.wait_free(iteration)
        factors.tile.index(0).store(factor)
        factors.fill(iteration)
        if final:
            store_lse(m_i, l_i, empty, out, item.q_start, item.q_len, 0, first_row, CONFIG)
        else:
            rows = gl.arange(0, 64, gl.SliceLayout(1, S))
            place = state_place(work, next_unit, item, CONFIG)
            lse_at = partial_rows(place, item, rows, CONFIG)
            lse = gl.where(empty, -float("inf"), m_i + gl.log2(l_i))
            if CONFIG.SHARED:  # a row that is not live has no place of its own
                row_mask = item.row_block * 64 + rows < item.q_len * CONFIG.GROUP
                gl.store(partial.lse + lse_at, lse, mask=row_mask)
            else:
                gl.store(partial.lse + lse_at, lse)
        # the values of the last block have been summed: their place is free for outputs
        if (item.num_blocks > 0) & (not final):
            high.release(block - 1)
        place = high.tile.index(high.stage(gl.maximum(block - 1, 0)))
        store_columns(
            acc, factor, place, out, partial, work, next_unit, item, HIGH, CONFIG
        )  # fmt: skip
        if (item.num_blocks > 0) & final:
            high.release(block - 1)
        next_unit = item.next_unit
        iteration += 1


@gluon.jit
def attend_low(latents, alphas, factors, out, partial, requests, plan, sizes, CONFIG: gl.constexpr):
    """Sum the low and the middle columns of the values, with the other group's weights."""
    work = program_work(plan, sizes, CONFIG)
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])  # noqa: E741
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    tile = latents.tile
    step = 0
    iteration = 0
    seq = work.seq
    next_unit = work.start
    while next_unit < work.last:
        item = split_item(work, seq, next_unit, requests, sizes, CONFIG)
        seq = item.seq
        acc = gl.full([64, 256], 0.0, gl.float32, O)
        middle = gl.full([64, 128], 0.0, gl.float32, M)
        step += 1  # of the queries
        key_block = item.begin_block
        for i in range(0, item.num_blocks):
            start = key_block * 64
            stage = latents.stage(step)
            latents.wait_full(step)
            alphas.wait_full(step)
            alpha = alphas.tile.index(stage).load(gl.SliceLayout(1, O))
            acc = rescale(acc, alpha[:, None], CONFIG)
            alpha = gl.convert_layout(alpha, gl.SliceLayout(1, M))
            middle = rescale(middle, alpha[:, None], CONFIG)
            if CONFIG.GATHERS:
                hopper.fence_async_shared()
            else:
                zero_tail(tile.low, stage, start, 0, item.seq_len, 64, 256)
                zero_tail(tile.middle, stage, start, 0, item.seq_len, 64, 128)
            p = tile.rope.index(stage)
            low_sum = hopper.warpgroup_mma(p, tile.low.index(stage), acc, is_async=True)
            middle_sum = hopper.warpgroup_mma(p, tile.middle.index(stage), middle, is_async=True)
            acc, middle = hopper.warpgroup_mma_wait(0, deps=[low_sum, middle_sum])
            if i + 1 < item.num_blocks:
                latents.release(step)
            key_block = next_block(item, key_block, CONFIG)
            step += 1
        factors.wait_full(iteration)
        factor = factors.tile.index(0).load(gl.SliceLayout(1, O))
        factors.release(iteration)
        final = is_final(item, CONFIG)
        if (item.num_blocks > 0) & (not final):
            latents.release(step - 1)
        stage = latents.stage(step - 1)
        store_columns(
            acc, factor, tile.low.index(stage), out, partial, work, next_unit, item, 0, CONFIG
        )  # fmt: skip
        store_columns(
            middle, factor, tile.middle.index(stage), out, partial, work, next_unit, item, MIDDLE,
            CONFIG,
        )  # fmt: skip
        if (item.num_blocks > 0) & final:
            latents.release(step - 1)
        next_unit = item.next_unit
        iteration += 1


@gluon.jit(do_not_specialize=["batch", "table_stride"])
def decode_mla_hopper(
    q_rows,
    out,
    partial,
    requests,
    work_indptr,
    spans,
    first_spans,
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
    prefetch_request(requests, sizes, CONFIG)
    plan = Plan(work_indptr, spans, first_spans)
    prefetch_first_span(plan, CONFIG)
    T: gl.constexpr = out.ptr.dtype.element_ty
    k_tile = LatentTile(alloc_columns(T, 3, 256), alloc_columns(T, 3, 128), alloc_columns(T, 3, 64))
    latents = new_channel(k_tile, 3)
    high = new_channel(alloc_columns(T, 2, 128), 2)
    queries = new_channel(QueryTile(alloc_columns(T, 1, 128), alloc_columns(T, 1, 64)), 1)
    alphas = new_channel(alloc_factors(3), 3)
    factors = new_channel(alloc_factors(1), 1)
    gathers: gl.constexpr = 32 * GATHER_WARPS
    init_barriers((latents,), 1 + gathers if CONFIG.GATHERS else 1, 1)
    init_barriers((alphas,), 1, 1)
    init_barriers((high,), gathers if CONFIG.GATHERS else 1, 1)
    init_barriers((queries, factors), 1, 1)
    gl.warp_specialize(
        [
            (
                attend_high,
                (
                    queries, latents, high, alphas, factors, out, partial, requests, plan,
                    scales, sizes, CONFIG,
                ),
            ),
            (attend_low, (latents, alphas, factors, out, partial, requests, plan, sizes, CONFIG)),
            (
                gather_latents if CONFIG.GATHERS else load_latents,
                (queries, latents, high, q_rows, k_rows, requests, plan, sizes, CONFIG),
            ),
        ],
        [4, GATHER_WARPS if CONFIG.GATHERS else 1],
        [224, 40] if CONFIG.GATHERS else [240, 24],
    )  # fmt: skip
