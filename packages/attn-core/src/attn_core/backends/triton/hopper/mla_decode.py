"""Absorbed MLA decode for Hopper: TMA brings each latent once, two groups of warps share it.

Both groups score the same 64 lines, and each adds up half of the values: an accumulator of 64 by
512 is more than the registers of one group hold, and scoring twice costs less than handing the
probabilities over. The line of work is decode.py's.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attn_core.backends.triton.hopper.common import LN2, SEE_CAUSAL, clean, find_request, scores


@gluon.jit
def _part(
    lines, cu, lengths, batch, at, end, ROWS: gl.constexpr, UNIT: gl.constexpr, FIXED: gl.constexpr
):
    """Return the stretch of work at `at`: request, row, unit, stop, units, keys and blocks."""
    b = find_request(lines, batch, at, ROWS, 0)
    before = gl.load(lines + b)
    units = gl.load(lines + b + 1) - before
    row = (at - before * ROWS) // units
    unit = (at - before * ROWS) % units
    stop = unit + 1 if FIXED else gl.minimum(unit + end - at, units)
    length = gl.load(lengths + b)
    low = unit * UNIT
    count = gl.minimum(stop * UNIT, (length + 63) // 64) - low
    return b, row, unit, stop, units, length, low, count


@gluon.jit
def _copy_latents(
    q_rows,
    k_rows,
    q_a,
    q_b,
    q_r,
    k_a,
    k_b,
    k_r,
    q_full,
    q_free,
    k_full,
    k_free,
    cu,
    lengths,
    table,
    lines,
    batch,
    table_row,
    at,
    end,
    GROUP: gl.constexpr,
    ROW_BLOCKS: gl.constexpr,
    PAGE: gl.constexpr,
    UNIT: gl.constexpr,
    FIXED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Bring the queries and then the latents of each stretch, the last block first."""
    ROWS: gl.constexpr = min(PAGE, 64)
    PARTS: gl.constexpr = 64 // ROWS
    a_parts = k_a._reinterpret(k_a.dtype, [STAGES * 4 * PARTS, ROWS, 64], k_rows.layout)
    b_parts = k_b._reinterpret(k_b.dtype, [STAGES * 4 * PARTS, ROWS, 64], k_rows.layout)
    r_parts = k_r._reinterpret(k_r.dtype, [STAGES * PARTS, ROWS, 64], k_rows.layout)
    qa_parts = q_a._reinterpret(q_a.dtype, [4, 64, 64], q_rows.layout)
    qb_parts = q_b._reinterpret(q_b.dtype, [4, 64, 64], q_rows.layout)
    step = 0
    stretch = 0
    while at < end:
        b, row, unit, stop, units, length, low, count = _part(
            lines, cu, lengths, batch, at, end, ROW_BLOCKS, UNIT, FIXED
        )
        pages = table + b.to(gl.int64) * table_row
        q_row = gl.load(cu + b) * GROUP + row * 64
        mbarrier.wait(q_free, (stretch & 1) ^ 1)
        mbarrier.expect(q_full, 64 * 576 * 2)
        for panel in gl.static_range(4):
            tma.async_copy_global_to_shared(
                q_rows, [q_row, panel * 64], q_full, qa_parts.index(panel)
            )
            tma.async_copy_global_to_shared(
                q_rows, [q_row, 256 + panel * 64], q_full, qb_parts.index(panel)
            )
        tma.async_copy_global_to_shared(q_rows, [q_row, 512], q_full, q_r)
        for i in range(0, count):
            start = (low + count - 1 - i) * 64
            stage = step % STAGES
            mbarrier.wait(k_free.index(stage), ((step // STAGES) & 1) ^ 1)
            full = k_full.index(stage)
            mbarrier.expect(full, 64 * 576 * 2)
            for part in gl.static_range(PARTS):
                token = start + part * ROWS
                page = gl.load(pages + gl.minimum(token, length - 1) // PAGE)
                k_row = page * PAGE + token % PAGE
                for panel in gl.static_range(4):
                    to = (stage * 4 + panel) * PARTS + part
                    tma.async_copy_global_to_shared(
                        k_rows, [k_row, panel * 64], full, a_parts.index(to)
                    )
                    tma.async_copy_global_to_shared(
                        k_rows, [k_row, 256 + panel * 64], full, b_parts.index(to)
                    )
                tma.async_copy_global_to_shared(
                    k_rows, [k_row, 512], full, r_parts.index(stage * PARTS + part)
                )
            step += 1
        at += stop - unit
        stretch += 1


@gluon.jit
def _attend_half(
    q_a,
    q_b,
    q_r,
    k_a,
    k_b,
    k_r,
    values,
    q_full,
    q_free,
    k_full,
    k_free,
    out,
    lse,
    parts,
    part_lse,
    cu,
    lengths,
    lines,
    batch,
    scale,
    cap,
    v_scale,
    out_token,
    out_head,
    at,
    end,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    ROW_BLOCKS: gl.constexpr,
    UNIT: gl.constexpr,
    FIXED: gl.constexpr,
    STAGES: gl.constexpr,
    CAP: gl.constexpr,
    SEES: gl.constexpr,
):
    """Attend over this program's stretches, with columns 256 · HALF … of the values."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    nothing = gl.full([64, 64], 0.0, gl.float32, S)
    step = 0
    stretch = 0
    while at < end:
        b, row, unit, stop, units, length, low, count = _part(
            lines, cu, lengths, batch, at, end, ROW_BLOCKS, UNIT, FIXED
        )
        query = gl.load(cu + b)
        queries = gl.load(cu + b + 1) - query
        prefix = length - queries
        line = row * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
        qi = line // GROUP
        whole = length
        if SEES == SEE_CAUSAL:
            whole = gl.minimum(length, prefix + row * 64 // GROUP + 1)
        m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S))
        acc = gl.full([64, 256], 0.0, gl.float32, O)
        mbarrier.wait(q_full, stretch & 1)
        for i in range(0, count):
            start = (low + count - 1 - i) * 64
            stage = step % STAGES
            mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
            s = hopper.warpgroup_mma(
                q_a, k_a.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            s = hopper.warpgroup_mma(q_b, k_b.index(stage).permute((1, 0)), s, is_async=True)
            s = hopper.warpgroup_mma(q_r, k_r.index(stage).permute((1, 0)), s, is_async=True)
            s = hopper.warpgroup_mma_wait(0, deps=[s])
            if i == count - 1:
                mbarrier.arrive(q_free, count=1)
            p, m, total, shrink = scores(
                s, start, qi, m, total, length, prefix, 0, whole, scale, cap, 0, out, 0, 64, CAP,
                SEES, False, False,
            )  # fmt: skip
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
            clean(values, stage, start, 0, length, 64, 256)
            weights = gl.convert_layout(p.to(values.dtype), P)
            acc = hopper.warpgroup_mma(weights, values.index(stage), acc)
            mbarrier.arrive(k_free.index(stage), count=1)
            step += 1
        if count == 0:  # no keys: nobody has given the queries back
            mbarrier.arrive(q_free, count=1)
        none = total == 0.0
        safe = gl.where(none, 1.0, total)
        o_line = row * 64 + gl.arange(0, 64, gl.SliceLayout(1, O))
        column = 256 * HALF + gl.arange(0, 256, gl.SliceLayout(0, O))
        if stop - unit == units:
            done = acc * gl.convert_layout(v_scale / safe, gl.SliceLayout(1, O))[:, None]
            o_at = (query + o_line // GROUP).to(gl.int64) * out_token + o_line % GROUP * out_head
            live = (o_line // GROUP < queries)[:, None] & (column >= 0)[None, :]
            gl.store(
                out + o_at[:, None] + column[None, :], done.to(out.dtype.element_ty), mask=live
            )
            if HALF == 0:
                natural = gl.where(none, -float("inf"), (m + gl.log2(safe)) * LN2)
                lse_at = (query + qi) * GROUP + line % GROUP
                gl.store(lse + lse_at, natural, mask=qi < queries)
        else:
            slot = at
            if not FIXED:
                slot = 2 * gl.program_id(0) + (unit == 0).to(gl.int32)
            p_at = slot.to(gl.int64) * 64 + o_line - row * 64
            done = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, O))[:, None]
            gl.store(parts + p_at[:, None] * 512 + column[None, :], done)
            if HALF == 0:
                l_at = slot.to(gl.int64) * 64 + line - row * 64
                gl.store(part_lse + l_at, gl.where(none, -float("inf"), m + gl.log2(safe)))
        at += stop - unit
        stretch += 1


@gluon.jit(do_not_specialize=["batch", "table_row"])
def decode_mla_hopper(
    q_rows,
    k_rows,
    out,
    lse,
    parts,
    part_lse,
    cu,
    lengths,
    table,
    lines,
    batch,
    scale,
    cap,
    v_scale,
    out_token,
    out_head,
    table_row,
    GROUP: gl.constexpr,
    ROW_BLOCKS: gl.constexpr,
    PAGE: gl.constexpr,
    UNIT: gl.constexpr,
    FIXED: gl.constexpr,
    LEAST: gl.constexpr,
    CAP: gl.constexpr,
    SEES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Do what decode_splits does for one latent KV head, 512 + 64, in blocks of 64 keys.

    q_rows: [T · GROUP, 576] by [64, 64]; k_rows: [tokens, 576] by [min(PAGE, 64), 64].
    """
    work = gl.load(lines + batch) * ROW_BLOCKS
    programs = gl.num_programs(0)
    share = gl.maximum((work + programs - 1) // programs, LEAST)
    at = gl.program_id(0) * share
    end = gl.minimum(at + share, work)
    if at < end:
        T: gl.constexpr = out.dtype.element_ty
        WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], T)
        NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], T)
        q_a = gl.allocate_shared_memory(T, [64, 256], WIDE)
        q_b = gl.allocate_shared_memory(T, [64, 256], WIDE)
        q_r = gl.allocate_shared_memory(T, [64, 64], NARROW)
        k_a = gl.allocate_shared_memory(T, [STAGES, 64, 256], WIDE)
        k_b = gl.allocate_shared_memory(T, [STAGES, 64, 256], WIDE)
        k_r = gl.allocate_shared_memory(T, [STAGES, 64, 64], NARROW)
        q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_full, count=1)
        mbarrier.init(q_free, count=2)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(k_free.index(i), count=2)
        gl.warp_specialize(
            [
                (
                    _attend_half,
                    (
                        q_a, q_b, q_r, k_a, k_b, k_r, k_a, q_full, q_free, k_full, k_free, out, lse,
                        parts, part_lse, cu, lengths, lines, batch, scale, cap, v_scale, out_token,
                        out_head, at, end, 0, GROUP, ROW_BLOCKS, UNIT, FIXED, STAGES, CAP, SEES,
                    ),
                ),
                (
                    _attend_half,
                    (
                        q_a, q_b, q_r, k_a, k_b, k_r, k_b, q_full, q_free, k_full, k_free, out, lse,
                        parts, part_lse, cu, lengths, lines, batch, scale, cap, v_scale, out_token,
                        out_head, at, end, 1, GROUP, ROW_BLOCKS, UNIT, FIXED, STAGES, CAP, SEES,
                    ),
                ),
                (
                    _copy_latents,
                    (
                        q_rows, k_rows, q_a, q_b, q_r, k_a, k_b, k_r, q_full, q_free, k_full,
                        k_free, cu, lengths, table, lines, batch, table_row, at, end, GROUP,
                        ROW_BLOCKS, PAGE, UNIT, FIXED, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
