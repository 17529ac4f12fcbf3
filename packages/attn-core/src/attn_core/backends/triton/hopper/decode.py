"""Split-KV attention of few queries for Hopper: one group of warps multiplies, others bring keys.

The line of work, its cuts and what is kept of them are decode.py's; two programs share a
multiprocessor.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn_core.backends.triton.hopper.common import (
    GATHER_BELOW,
    LN2,
    LOG2E,
    SEE_CAUSAL,
    SEE_TREE,
    bring,
    clean,
    find_request,
    look_up,
    scores,
)


@gluon.jit
def _stretch(
    lines,
    cu,
    lengths,
    batch,
    at,
    end,
    window,
    HEADS: gl.constexpr,
    ROW_BLOCKS: gl.constexpr,
    BN: gl.constexpr,
    UNIT: gl.constexpr,
    FIXED: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Return what lies at `at` in the line of work, as far as `end` or the end of its row."""
    b = find_request(lines, batch, at, HEADS * ROW_BLOCKS, 0)
    before = gl.load(lines + b)
    units = gl.load(lines + b + 1) - before
    row = (at - before * HEADS * ROW_BLOCKS) // units
    unit = (at - before * HEADS * ROW_BLOCKS) % units
    stop = unit + 1 if FIXED else gl.minimum(unit + end - at, units)
    query = gl.load(cu + b)
    queries = gl.load(cu + b + 1) - query
    length = gl.load(lengths + b)
    first = 0
    if WINDOW:
        first = gl.maximum(length - queries - window + 1, 0)
    low = first // BN + unit * UNIT
    count = gl.minimum(first // BN + stop * UNIT, (length + BN - 1) // BN) - low
    return b, row, unit, stop, units, query, queries, length, first, low, count


@gluon.jit
def _copy_keys(
    k_rows,
    v_rows,
    k_store,
    v_store,
    k_tile,
    v_tile,
    k_full,
    k_free,
    v_full,
    v_free,
    cu,
    lengths,
    table,
    lines,
    batch,
    at,
    end,
    window,
    table_row,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    HEADS: gl.constexpr,
    ROW_BLOCKS: gl.constexpr,
    PAGE: gl.constexpr,
    HND: gl.constexpr,
    BN: gl.constexpr,
    UNIT: gl.constexpr,
    FIXED: gl.constexpr,
    D: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Bring the blocks of each stretch, the last one first."""
    step = 0
    while at < end:
        b, row, unit, stop, units, query, queries, length, first, low, count = _stretch(
            lines, cu, lengths, batch, at, end, window, HEADS, ROW_BLOCKS, BN, UNIT, FIXED, WINDOW
        )
        pages = table + b.to(gl.int64) * table_row
        head = row // ROW_BLOCKS
        start = (low + count - 1) * BN
        places = look_up(pages, first, length, start, PAGE, BN)
        for _ in range(0, count):
            stage = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            ahead = look_up(pages, first, length, start - BN, PAGE, BN)
            mbarrier.wait(k_free.index(stage), phase)
            bring(
                k_rows, k_store, k_tile, stage, k_full.index(stage), pages, places, 0, head, HEADS,
                length, start, k_page, k_token, k_head, PAGE, HND, BN, D, STAGES, WIDE,
            )  # fmt: skip
            mbarrier.wait(v_free.index(stage), phase)
            bring(
                v_rows, v_store, v_tile, stage, v_full.index(stage), pages, places, 0, head, HEADS,
                length, start, v_page, v_token, v_head, PAGE, HND, BN, D, STAGES, WIDE,
            )  # fmt: skip
            places = ahead
            start -= BN
            step += 1
        at += stop - unit


@gluon.jit
def _attend(
    q_tile,
    k_tile,
    v_tile,
    k_full,
    k_free,
    v_full,
    v_free,
    q,
    out,
    lse,
    parts,
    part_lse,
    sinks,
    tree,
    cu,
    lengths,
    lines,
    batch,
    at,
    end,
    scale,
    cap,
    v_scale,
    window,
    drafts,
    q_token,
    q_head,
    out_token,
    out_head,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROW_BLOCKS: gl.constexpr,
    PAGE: gl.constexpr,
    BN: gl.constexpr,
    UNIT: gl.constexpr,
    FIXED: gl.constexpr,
    D: gl.constexpr,
    SEES: gl.constexpr,
    WINDOW: gl.constexpr,
    CAP: gl.constexpr,
    SINKS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attend over this program's stretches with 64 lines each."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    B: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    GATHERS: gl.constexpr = PAGE < GATHER_BELOW
    nothing = gl.full([64, BN], 0.0, gl.float32, S)
    step = 0
    while at < end:
        b, row, unit, stop, units, query, queries, length, first, low, count = _stretch(
            lines, cu, lengths, batch, at, end, window, HEADS, ROW_BLOCKS, BN, UNIT, FIXED, WINDOW
        )
        head = row // ROW_BLOCKS
        prefix = length - queries
        line = (row % ROW_BLOCKS) * 64 + gl.arange(0, 64, gl.SliceLayout(1, B))
        column = gl.arange(0, D, gl.SliceLayout(0, B))
        q_at = (query + line // GROUP).to(gl.int64) * q_token
        q_at += (head * GROUP + line % GROUP) * q_head
        inside = (line // GROUP < queries)[:, None] & (column >= 0)[None, :]
        q_tile.store(gl.load(q + q_at[:, None] + column[None, :], mask=inside, other=0.0))
        hopper.fence_async_shared()

        flat = (row % ROW_BLOCKS) * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
        qi = flat // GROUP
        whole_low = 0
        whole_high = length
        if SEES == SEE_CAUSAL:
            whole_high = gl.minimum(length, prefix + (row % ROW_BLOCKS) * 64 // GROUP + 1)
        if SEES == SEE_TREE:
            whole_high = prefix
        if WINDOW:
            whole_low = gl.maximum(length - window, 0)
        mask = tree + b.to(gl.int64) * drafts * drafts
        m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S))
        acc = gl.full([64, D], 0.0, gl.float32, O)
        for i in range(0, count):
            start = (low + count - 1 - i) * BN
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            if GATHERS:
                hopper.fence_async_shared()
            s = hopper.warpgroup_mma(
                q_tile, k_tile.index(stage).permute((1, 0)), nothing, use_acc=False
            )
            mbarrier.arrive(k_free.index(stage), count=1)
            p, m, total, shrink = scores(
                s, start, qi, m, total, length, prefix, whole_low, whole_high, scale, cap, window,
                mask, drafts, BN, CAP, SEES, WINDOW,
            )  # fmt: skip
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
            weights = gl.convert_layout(p.to(v_tile.dtype), P)
            mbarrier.wait(v_full.index(stage), phase)
            if GATHERS:
                hopper.fence_async_shared()
            else:
                clean(v_tile, stage, start, first, length, BN, D)
            acc = hopper.warpgroup_mma(weights, v_tile.index(stage), acc)
            mbarrier.arrive(v_free.index(stage), count=1)
            step += 1

        whole = stop - unit == units
        if SINKS:
            if whole:
                sink = gl.load(sinks + head * GROUP + flat % GROUP).to(gl.float32) * LOG2E
                new = gl.maximum(m, sink)
                shrink = gl.exp2(m - new)
                total = total * shrink + gl.exp2(sink - new)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                m = new
        none = total == 0.0
        safe = gl.where(none, 1.0, total)
        if whole:
            done = acc * gl.convert_layout(v_scale / safe, gl.SliceLayout(1, O))[:, None]
            done = gl.convert_layout(done.to(out.dtype.element_ty), B)
            o_at = (query + line // GROUP).to(gl.int64) * out_token
            o_at += (head * GROUP + line % GROUP) * out_head
            gl.store(out + o_at[:, None] + column[None, :], done, mask=inside)
            natural = gl.where(none, -float("inf"), (m + gl.log2(safe)) * LN2)
            lse_at = (query + qi) * (HEADS * GROUP) + head * GROUP + flat % GROUP
            gl.store(lse + lse_at, natural, mask=qi < queries)
        else:
            slot = at
            if not FIXED:
                slot = 2 * gl.program_id(0) + (unit == 0).to(gl.int32)
            part = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, O))[:, None]
            o_line = gl.arange(0, 64, gl.SliceLayout(1, O))
            o_column = gl.arange(0, D, gl.SliceLayout(0, O))
            p_at = slot.to(gl.int64) * 64 + o_line
            live = ((row % ROW_BLOCKS) * 64 + o_line < queries * GROUP)[:, None]
            live = live & (o_column >= 0)[None, :]
            gl.store(parts + p_at[:, None] * D + o_column[None, :], part, mask=live)
            l_at = slot.to(gl.int64) * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
            gl.store(part_lse + l_at, gl.where(none, -float("inf"), m + gl.log2(safe)))
        at += stop - unit


@gluon.jit(do_not_specialize=["batch", "window", "drafts", "table_row"])
def decode_hopper(
    q,
    k_rows,
    v_rows,
    k_store,
    v_store,
    out,
    lse,
    parts,
    part_lse,
    cu,
    lengths,
    table,
    lines,
    tree,
    sinks,
    batch,
    scale,
    cap,
    v_scale,
    window,
    drafts,
    q_token,
    q_head,
    out_token,
    out_head,
    table_row,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    ROW_BLOCKS: gl.constexpr,
    PAGE: gl.constexpr,
    HND: gl.constexpr,
    BN: gl.constexpr,
    UNIT: gl.constexpr,
    FIXED: gl.constexpr,
    LEAST: gl.constexpr,
    D: gl.constexpr,
    CAP: gl.constexpr,
    SINKS: gl.constexpr,
    SEES: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Do what decode_splits does, with 64 lines a row and no positions for a tree's windows."""
    work = gl.load(lines + batch) * HEADS * ROW_BLOCKS
    programs = gl.num_programs(0)
    share = gl.maximum((work + programs - 1) // programs, LEAST)
    at = gl.program_id(0) * share
    end = gl.minimum(at + share, work)
    if at < end:
        T: gl.constexpr = q.dtype.element_ty
        KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], T)
        QS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], T)
        GATHERS: gl.constexpr = PAGE < GATHER_BELOW
        q_tile = gl.allocate_shared_memory(T, [64, D], QS)
        k_tile = gl.allocate_shared_memory(T, [STAGES, BN, D], KV)
        v_tile = gl.allocate_shared_memory(T, [STAGES, BN, D], KV)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=128 if GATHERS else 1)
            mbarrier.init(v_full.index(i), count=128 if GATHERS else 1)
            mbarrier.init(k_free.index(i), count=1)
            mbarrier.init(v_free.index(i), count=1)
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        q_tile, k_tile, v_tile, k_full, k_free, v_full, v_free, q, out, lse, parts,
                        part_lse, sinks, tree, cu, lengths, lines, batch, at, end, scale, cap,
                        v_scale, window, drafts, q_token, q_head, out_token, out_head, HEADS, GROUP,
                        ROW_BLOCKS, PAGE, BN, UNIT, FIXED, D, SEES, WINDOW, CAP, SINKS, STAGES,
                    ),
                ),
                (
                    _copy_keys,
                    (
                        k_rows, v_rows, k_store, v_store, k_tile, v_tile, k_full, k_free, v_full,
                        v_free, cu, lengths, table, lines, batch, at, end, window, table_row,
                        k_page, k_token, k_head, v_page, v_token, v_head, HEADS, ROW_BLOCKS, PAGE,
                        HND, BN, UNIT, FIXED, D, WINDOW, STAGES, WIDE,
                    ),
                ),
            ],
            [4 if GATHERS else 1],
            [56 if GATHERS else 24],
        )  # fmt: skip
