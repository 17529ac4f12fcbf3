"""extend for Hopper: warps that copy pages (TMA) beside warps that multiply (wgmma), in Gluon.

Two groups of four warps hold 64 lines each; further warps bring the blocks of keys they share. A
group multiplies the next block by its queries while it still adds up the last one, so that the
exponentials hide behind matrix products (FlashAttention-3, arXiv:2407.08608, section 3.2).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn_core.backends.triton.hopper_tiles import (
    GATHER_BELOW,
    LN2,
    LOG2E,
    SEE_CAUSAL,
    bring,
    clean,
    find_request,
    scores,
)


@gluon.jit
def _tile(
    cu,
    lengths,
    batch,
    tiles,
    item,
    window,
    GROUP: gl.constexpr,
    PAGE: gl.constexpr,
    BN: gl.constexpr,
    SEES: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Return where the 128 lines of an item lie and which blocks of keys they see.

    A request's last tile comes first, since it sees most keys; count 0 is nothing to do.
    """
    head = item // tiles
    at = tiles - 1 - item % tiles
    b = find_request(cu, batch, at, GROUP, 128)
    query = gl.load(cu + b)
    queries = gl.load(cu + b + 1) - query
    tile = at - (query * GROUP // 128 + b)
    begin = 0
    if PAGE == 0:
        begin = gl.load(lengths + b)
        length = gl.load(lengths + b + 1) - begin
    else:
        length = gl.load(lengths + b)
    prefix = length - queries
    first = 0
    last = length
    whole_low = 0
    whole_high = length
    if SEES == SEE_CAUSAL:
        first_query = tile * 128 // GROUP
        last_query = gl.minimum((tile * 128 + 127) // GROUP, queries - 1)
        last = gl.minimum(length, prefix + last_query + 1)
        whole_high = gl.minimum(length, prefix + first_query + 1)
        if WINDOW:
            first = gl.maximum(prefix + first_query - window + 1, 0)
            whole_low = gl.maximum(prefix + last_query - window + 1, 0)
    low = first // BN
    count = gl.maximum((last + BN - 1) // BN - low, 0)
    live = tile * 128 < queries * GROUP
    return (
        live, b, head, query, queries, tile, begin, length, first, low,
        gl.where(live, count, 0), whole_low, whole_high,
    )  # fmt: skip


@gluon.jit
def _item(turn, items):
    """Return this program's item of a turn; every other turn goes backwards, to even the load."""
    programs = gl.num_programs(0)
    mine = gl.program_id(0)
    item = turn * programs + gl.where(turn % 2 == 0, mine, programs - 1 - mine)
    return gl.minimum(item, items - 1), item < items


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
    batch,
    tiles,
    items,
    turns,
    window,
    table_row,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PAGE: gl.constexpr,
    HND: gl.constexpr,
    BN: gl.constexpr,
    D: gl.constexpr,
    SEES: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Bring the blocks of keys and values of each tile, the last one first."""
    step = 0
    for turn in range(0, turns):
        item, mine = _item(turn, items)
        live, b, head, query, queries, tile, begin, length, first, low, count, _l, _h = _tile(
            cu, lengths, batch, tiles, item, window, GROUP, PAGE, BN, SEES, WINDOW
        )
        pages = table + b.to(gl.int64) * table_row
        for i in range(0, gl.where(mine, count, 0)):
            start = (low + count - 1 - i) * BN
            stage = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(k_free.index(stage), phase)
            bring(
                k_rows, k_store, k_tile, stage, k_full.index(stage), pages, begin, head, HEADS,
                first, length, start, k_page, k_token, k_head, PAGE, HND, BN, D, STAGES, WIDE,
            )  # fmt: skip
            mbarrier.wait(v_free.index(stage), phase)
            bring(
                v_rows, v_store, v_tile, stage, v_full.index(stage), pages, begin, head, HEADS,
                first, length, start, v_page, v_token, v_head, PAGE, HND, BN, D, STAGES, WIDE,
            )  # fmt: skip
            step += 1


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
    sinks,
    cu,
    lengths,
    batch,
    tiles,
    items,
    turns,
    scale,
    cap,
    v_scale,
    window,
    q_token,
    q_head,
    out_token,
    out_head,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PAGE: gl.constexpr,
    BN: gl.constexpr,
    D: gl.constexpr,
    SEES: gl.constexpr,
    WINDOW: gl.constexpr,
    CAP: gl.constexpr,
    SINKS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attend with lines 64 · HALF … of each tile."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    B: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    GATHERS: gl.constexpr = PAGE > 0 and PAGE < GATHER_BELOW
    mine = q_tile.index(HALF)
    column = gl.arange(0, D, gl.SliceLayout(0, B))
    nothing = gl.full([64, BN], 0.0, gl.float32, S)
    step = 0
    for turn in range(0, turns):
        item, mine_too = _item(turn, items)
        (
            live,
            b,
            head,
            query,
            queries,
            tile,
            begin,
            length,
            first,
            low,
            count,
            whole_low,
            whole_high,
        ) = _tile(cu, lengths, batch, tiles, item, window, GROUP, PAGE, BN, SEES, WINDOW)
        if live & mine_too:
            prefix = length - queries
            line = tile * 128 + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, B))
            q_at = (query + line // GROUP).to(gl.int64) * q_token
            q_at += (head * GROUP + line % GROUP) * q_head
            inside = (line // GROUP < queries)[:, None] & (column >= 0)[None, :]
            mine.store(gl.load(q + q_at[:, None] + column[None, :], mask=inside, other=0.0))
            hopper.fence_async_shared()

            flat = tile * 128 + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
            qi = flat // GROUP
            m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S))
            total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S))
            acc = gl.full([64, D], 0.0, gl.float32, O)
            if count > 0:
                start = (low + count - 1) * BN
                stage = step % STAGES
                mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
                if GATHERS:
                    hopper.fence_async_shared()
                s = hopper.warpgroup_mma(
                    mine, k_tile.index(stage).permute((1, 0)), nothing, use_acc=False
                )
                mbarrier.arrive(k_free.index(stage), count=1)
                p, m, total, shrink = scores(
                    s, start, qi, m, total, length, prefix, whole_low, whole_high, scale, cap,
                    window, q, 0, BN, CAP, SEES, WINDOW,
                )  # fmt: skip
                weights = gl.convert_layout(p.to(v_tile.dtype), P)
                for i in range(1, count):
                    last = step % STAGES
                    last_phase = (step // STAGES) & 1
                    step += 1
                    stage = step % STAGES
                    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
                    if GATHERS:
                        hopper.fence_async_shared()
                    next_s = hopper.warpgroup_mma(
                        mine, k_tile.index(stage).permute((1, 0)), nothing, use_acc=False,
                        is_async=True,
                    )  # fmt: skip
                    mbarrier.wait(v_full.index(last), last_phase)
                    if GATHERS:
                        hopper.fence_async_shared()
                    else:
                        clean(v_tile, last, start, first, length, BN, D)
                    next_acc = hopper.warpgroup_mma(weights, v_tile.index(last), acc, is_async=True)
                    s = hopper.warpgroup_mma_wait(1, deps=[next_s])
                    mbarrier.arrive(k_free.index(stage), count=1)
                    start = (low + count - 1 - i) * BN
                    p, m, total, shrink = scores(
                        s, start, qi, m, total, length, prefix, whole_low, whole_high, scale, cap,
                        window, q, 0, BN, CAP, SEES, WINDOW,
                    )  # fmt: skip
                    acc = hopper.warpgroup_mma_wait(0, deps=[next_acc])
                    mbarrier.arrive(v_free.index(last), count=1)
                    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                    weights = gl.convert_layout(p.to(v_tile.dtype), P)
                last = step % STAGES
                mbarrier.wait(v_full.index(last), (step // STAGES) & 1)
                if GATHERS:
                    hopper.fence_async_shared()
                else:
                    clean(v_tile, last, start, first, length, BN, D)
                acc = hopper.warpgroup_mma(weights, v_tile.index(last), acc)
                mbarrier.arrive(v_free.index(last), count=1)
                step += 1

            if SINKS:
                sink = gl.load(sinks + head * GROUP + flat % GROUP).to(gl.float32) * LOG2E
                new = gl.maximum(m, sink)
                shrink = gl.exp2(m - new)
                total = total * shrink + gl.exp2(sink - new)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                m = new
            none = total == 0.0
            safe = gl.where(none, 1.0, total)
            done = acc * gl.convert_layout(v_scale / safe, gl.SliceLayout(1, O))[:, None]
            done = gl.convert_layout(done.to(out.dtype.element_ty), B)
            o_at = (query + line // GROUP).to(gl.int64) * out_token
            o_at += (head * GROUP + line % GROUP) * out_head
            gl.store(out + o_at[:, None] + column[None, :], done, mask=inside)
            natural = gl.where(none, -float("inf"), (m + gl.log2(safe)) * LN2)
            lse_at = (query + qi) * (HEADS * GROUP) + head * GROUP + flat % GROUP
            gl.store(lse + lse_at, natural, mask=qi < queries)


@gluon.jit(do_not_specialize=["batch", "tiles", "items", "turns", "window", "table_row"])
def extend_hopper(
    q,
    k_rows,
    v_rows,
    k_store,
    v_store,
    out,
    lse,
    cu,
    lengths,
    table,
    sinks,
    batch,
    tiles,
    items,
    turns,
    scale,
    cap,
    v_scale,
    window,
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
    PAGE: gl.constexpr,
    HND: gl.constexpr,
    BN: gl.constexpr,
    D: gl.constexpr,
    CAP: gl.constexpr,
    SINKS: gl.constexpr,
    SEES: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Do what extend_tiles does, with 128 lines a tile and `turns` tiles a program.

    tiles: upper bound of the tiles of a head, items = tiles · HEADS. k_rows, v_rows: the stores as
    rows of tokens for TMA, [min(PAGE, BN) or BN, 64] at a time.
    """
    T: gl.constexpr = q.dtype.element_ty
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], T)
    QS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], T)
    GATHERS: gl.constexpr = PAGE > 0 and PAGE < GATHER_BELOW
    q_tile = gl.allocate_shared_memory(T, [2, 64, D], QS)
    k_tile = gl.allocate_shared_memory(T, [STAGES, BN, D], KV)
    v_tile = gl.allocate_shared_memory(T, [STAGES, BN, D], KV)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=128 if GATHERS else 1)
        mbarrier.init(v_full.index(i), count=128 if GATHERS else 1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q_tile, k_tile, v_tile, k_full, k_free, v_full, v_free, q, out, lse, sinks, cu,
                    lengths, batch, tiles, items, turns, scale, cap, v_scale, window, q_token,
                    q_head, out_token, out_head, 0, HEADS, GROUP, PAGE, BN, D, SEES, WINDOW, CAP,
                    SINKS, STAGES,
                ),
            ),
            (
                _attend,
                (
                    q_tile, k_tile, v_tile, k_full, k_free, v_full, v_free, q, out, lse, sinks, cu,
                    lengths, batch, tiles, items, turns, scale, cap, v_scale, window, q_token,
                    q_head, out_token, out_head, 1, HEADS, GROUP, PAGE, BN, D, SEES, WINDOW, CAP,
                    SINKS, STAGES,
                ),
            ),
            (
                _copy_keys,
                (
                    k_rows, v_rows, k_store, v_store, k_tile, v_tile, k_full, k_free, v_full,
                    v_free, cu, lengths, table, batch, tiles, items, turns, window, table_row,
                    k_page, k_token, k_head, v_page, v_token, v_head, HEADS, GROUP, PAGE, HND, BN,
                    D, SEES, WINDOW, STAGES, WIDE,
                ),
            ),
        ],
        [4, 4 if GATHERS else 1],
        [224 if GATHERS else 240, 56 if GATHERS else 24],
    )  # fmt: skip
