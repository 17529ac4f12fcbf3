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
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn_core.backends.triton.hopper.common import (
    GATHER_BELOW,
    LN2,
    LOG2E,
    SEE_CAUSAL,
    barrier,
    bring,
    clean,
    find_request,
    look_up,
    scores,
)
from attn_core.backends.triton.tile_order import TILE_ROWS

LINES = gl.constexpr(TILE_ROWS)


@gluon.jit
def _draw(counter, begins, who, batch, at_once, HEADS: gl.constexpr, FIRST: gl.constexpr):
    """Draw an item; return tile · HEADS + head and the request, -1 and any at the end.

    FIRST: the one that is the program's own. `at_once` heads take turns: their keys fit the cache.
    A request's last tile comes first, since it sees most keys, as the longest request does.
    """
    item = gl.program_id(0)
    if not FIRST:
        item = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
    tiles = gl.load(begins + batch)
    heads = item // (tiles * at_once) * at_once
    rest = item % (tiles * at_once)
    at = rest // at_once
    place = find_request(begins, batch, at, 1, 0)
    tile = gl.load(begins + place + 1) - 1 - at
    found = tile * HEADS + heads + rest % at_once
    return gl.where(item < tiles * HEADS, found, -1), gl.load(who + place)


@gluon.jit
def _tile(
    cu,
    lengths,
    item,
    b,
    window,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PAGE: gl.constexpr,
    BN: gl.constexpr,
    SEES: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Return where the lines of an item of request b lie and which blocks of keys they see."""
    head = item % HEADS
    tile = item // HEADS
    query = gl.load(cu + b)
    queries = gl.load(cu + b + 1) - query
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
        first_query = tile * LINES // GROUP
        last_query = gl.minimum((tile * LINES + LINES - 1) // GROUP, queries - 1)
        last = gl.minimum(length, prefix + last_query + 1)
        whole_high = gl.minimum(length, prefix + first_query + 1)
        if WINDOW:
            first = gl.maximum(prefix + first_query - window + 1, 0)
            whole_low = gl.maximum(prefix + last_query - window + 1, 0)
    low = first // BN
    count = gl.maximum((last + BN - 1) // BN - low, 1)  # one that nobody sees, where none is seen
    return head, query, queries, tile, begin, length, first, low, count, whole_low, whole_high


@gluon.jit
def _give(ring, ring_full, ring_free, turn, item, b, WARPS: gl.constexpr):
    """Hand an item and its request on to those that attend."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(ring_free.index(turn % 2), ((turn // 2) & 1) ^ 1)
    both = (b.to(gl.int64) << 32) | (item.to(gl.int64) & 0xFFFFFFFF)
    ring.index(turn % 2).store(gl.full([1], both, gl.int64, one))
    mbarrier.arrive(ring_full.index(turn % 2), count=1)


@gluon.jit
def _take(ring, ring_full, ring_free, turn):
    """Return the item of a turn, -1 at the end, and its request."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(ring_full.index(turn % 2), (turn // 2) & 1)
    both = gl.sum(ring.index(turn % 2).load(one), 0)
    mbarrier.arrive(ring_free.index(turn % 2), count=1)
    return both.to(gl.int32), (both >> 32).to(gl.int32)


@gluon.jit
def _copy_keys(
    given,
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
    """Draw items and bring the blocks of keys and values of each, the last one first."""
    (
        counter, begins, who, ring, ring_full, ring_free, k_rows, v_rows, k_store, v_store, k_tile,
        v_tile, k_full, k_free, v_full, v_free, cu, lengths, table, batch, at_once, window,
        table_row, k_page, k_token, k_head, v_page, v_token, v_head,
    ) = given  # fmt: skip
    GATHERS: gl.constexpr = PAGE > 0 and PAGE < GATHER_BELOW
    WARPS: gl.constexpr = 4 if GATHERS else 1
    LAG: gl.constexpr = 1 if GATHERS else 0  # values come as late as they are needed
    step = 0
    v_step = 0
    turn = 0
    item, b = _draw(counter, begins, who, batch, at_once, HEADS, True)
    _give(ring, ring_full, ring_free, turn, item, b, WARPS)
    while item >= 0:
        head, query, queries, tile, begin, length, first, low, count, _l, _h = _tile(
            cu, lengths, item, b, window, HEADS, GROUP, PAGE, BN, SEES, WINDOW
        )
        pages = table + b.to(gl.int64) * table_row
        next_item = -1
        next_b = 0
        start = (low + count - 1) * BN
        places = look_up(pages, first, length, start, PAGE, BN)
        behind = places + 0  # Triton 3.6 carries no name through a loop that is another's at first
        for i in range(0, count + LAG):
            ahead = look_up(pages, first, length, start - BN, PAGE, BN)
            if i < count:
                stage = step % STAGES
                mbarrier.wait(k_free.index(stage), ((step // STAGES) & 1) ^ 1)
                bring(
                    k_rows, k_store, k_tile, stage, k_full.index(stage), pages, places, begin, head,
                    HEADS, length, start, k_page, k_token, k_head, PAGE, HND, BN, D, STAGES, WIDE,
                )  # fmt: skip
                step += 1
            if i >= LAG:
                stage = v_step % STAGES
                mbarrier.wait(v_free.index(stage), ((v_step // STAGES) & 1) ^ 1)
                bring(
                    v_rows, v_store, v_tile, stage, v_full.index(stage), pages, behind, begin, head,
                    HEADS, length, start + LAG * BN, v_page, v_token, v_head, PAGE, HND, BN, D,
                    STAGES, WIDE,
                )  # fmt: skip
                v_step += 1
            behind = places
            places = ahead
            start -= BN
            if i == gl.minimum(count, STAGES) - 1 + LAG:  # known before it is needed
                turn += 1
                next_item, next_b = _draw(counter, begins, who, batch, at_once, HEADS, False)
                _give(ring, ring_full, ring_free, turn, next_item, next_b, WARPS)
        item = next_item
        b = next_b
    # the last program leaves the counter as the next launch wants to find it
    if gl.atomic_add(counter + 1, 1, sem="relaxed") == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def _bring_queries(
    q, mine, cu, item, b, q_token, q_head, HALF: gl.constexpr, HEADS: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Begin to copy lines 64 · HALF … of an item's queries; none of item -1.

    No branch: a matrix product may be under way, and its registers must stay where they are.
    """
    B: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    query = gl.load(cu + b)
    queries = gl.load(cu + b + 1) - query
    line = item // HEADS * LINES + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, B))
    column = gl.arange(0, D, gl.SliceLayout(0, B))
    at = (query + line // GROUP).to(gl.int64) * q_token
    at += (item % HEADS * GROUP + line % GROUP) * q_head
    inside = (line // GROUP < queries)[:, None] & (column >= 0)[None, :] & (item >= 0)
    async_copy.async_copy_global_to_shared(mine, q + at[:, None] + column[None, :], mask=inside)
    async_copy.commit_group()


@gluon.jit
def _attend(
    given,
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
    (
        ring, ring_full, ring_free, q_tile, k_tile, v_tile, k_full, k_free, v_full, v_free, q, out,
        lse, sinks, cu, lengths, scale, cap, v_scale, window, q_token, q_head, out_token, out_head,
    ) = given  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    B: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    GATHERS: gl.constexpr = PAGE > 0 and PAGE < GATHER_BELOW
    mine = q_tile.index(HALF)
    nothing = gl.full([64, BN], 0.0, gl.float32, S)
    step = 0
    turn = 0
    item, b = _take(ring, ring_full, ring_free, turn)
    _bring_queries(q, mine, cu, item, b, q_token, q_head, HALF, HEADS, GROUP, D)
    while item >= 0:
        head, query, queries, tile, begin, length, first, low, count, whole_low, whole_high = _tile(
            cu, lengths, item, b, window, HEADS, GROUP, PAGE, BN, SEES, WINDOW
        )
        async_copy.wait_group(0)
        barrier()
        hopper.fence_async_shared()
        prefix = length - queries
        flat = tile * LINES + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
        qi = flat // GROUP
        m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S))
        acc = gl.full([64, D], 0.0, gl.float32, O)
        start = (low + count - 1) * BN
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        if GATHERS:
            hopper.fence_async_shared()
        s = hopper.warpgroup_mma(mine, k_tile.index(stage).permute((1, 0)), nothing, use_acc=False)
        mbarrier.arrive(k_free.index(stage), count=1)
        p, m, total, shrink = scores(
            s, start, qi, m, total, length, prefix, whole_low, whole_high, scale, cap, window, q, 0,
            BN, CAP, SEES, WINDOW,
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
                mine, k_tile.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
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
            acc, _ = hopper.warpgroup_mma_wait(0, deps=[next_acc, weights])
            mbarrier.arrive(v_free.index(last), count=1)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
            weights = gl.convert_layout(p.to(v_tile.dtype), P)

        last = step % STAGES
        mbarrier.wait(v_full.index(last), (step // STAGES) & 1)
        if GATHERS:
            hopper.fence_async_shared()
        else:
            clean(v_tile, last, start, first, length, BN, D)
        next_acc = hopper.warpgroup_mma(weights, v_tile.index(last), acc, is_async=True)
        # this tile has met all its keys: the queries of the next one come while it is finished
        turn += 1
        next_item, next_b = _take(ring, ring_full, ring_free, turn)
        _bring_queries(q, mine, cu, next_item, next_b, q_token, q_head, HALF, HEADS, GROUP, D)
        acc, _ = hopper.warpgroup_mma_wait(0, deps=[next_acc, weights])  # both are in use till then
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
        line = tile * LINES + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, B))
        column = gl.arange(0, D, gl.SliceLayout(0, B))
        inside = (line // GROUP < queries)[:, None] & (column >= 0)[None, :]
        o_at = (query + line // GROUP).to(gl.int64) * out_token
        o_at += (head * GROUP + line % GROUP) * out_head
        gl.store(out + o_at[:, None] + column[None, :], done, mask=inside)
        natural = gl.where(none, -float("inf"), (m + gl.log2(safe)) * LN2)
        lse_at = (query + qi) * (HEADS * GROUP) + head * GROUP + flat % GROUP
        gl.store(lse + lse_at, natural, mask=qi < queries)
        item = next_item
        b = next_b


@gluon.jit(do_not_specialize=["batch", "at_once", "window", "table_row"])
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
    begins,
    who,
    table,
    sinks,
    batch,
    at_once,
    counter,
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
    """Do what extend_tiles does, with 128 lines a tile; a program draws one tile after another.

    begins, who: see order_requests. at_once: heads that take turns, a divisor of HEADS. counter:
    int32 [2], zeros before and after: the items that were drawn and the programs that are done.
    k_rows, v_rows: the stores as rows of tokens for TMA, [min(PAGE, BN) or BN, 64] at a time.
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
    ring = gl.allocate_shared_memory(gl.int64, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ring_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ring_full.index(i), count=1)
        mbarrier.init(ring_free.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=128 if GATHERS else 1)
        mbarrier.init(v_full.index(i), count=128 if GATHERS else 1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    attends = (
        ring, ring_full, ring_free, q_tile, k_tile, v_tile, k_full, k_free, v_full, v_free, q, out,
        lse, sinks, cu, lengths, scale, cap, v_scale, window, q_token, q_head, out_token, out_head,
    )  # fmt: skip
    copies = (
        counter, begins, who, ring, ring_full, ring_free, k_rows, v_rows, k_store, v_store, k_tile,
        v_tile, k_full, k_free, v_full, v_free, cu, lengths, table, batch, at_once, window,
        table_row, k_page, k_token, k_head, v_page, v_token, v_head,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _attend,
                (attends, 0, HEADS, GROUP, PAGE, BN, D, SEES, WINDOW, CAP, SINKS, STAGES),
            ),
            (
                _attend,
                (attends, 1, HEADS, GROUP, PAGE, BN, D, SEES, WINDOW, CAP, SINKS, STAGES),
            ),
            (
                _copy_keys,
                (copies, HEADS, GROUP, PAGE, HND, BN, D, SEES, WINDOW, STAGES, WIDE),
            ),
        ],
        [4, 4 if GATHERS else 1],
        [224 if GATHERS else 240, 56 if GATHERS else 24],
    )
