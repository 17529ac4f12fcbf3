"""The plan of a split-KV pass: one launch counts the units of work, and may choose the quota."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

# What an item of latents takes beside its keys, in blocks of 64, as in FlashMLA's scheduler.
ITEM_UNITS = tl.constexpr(5)


@triton.jit
def choose_quota(units, PARTS: tl.constexpr, MIN_UNITS: tl.constexpr):
    """Return the units of requests [BLOCK] on the queue, the quota of each part, and tile units.

    An even quota ends anywhere in a request, so that most programs end one and begin another. Each
    such item takes ITEM_UNITS more. The tile units before the keys of each request stand for them,
    or else parts with many short requests would take longest. If it costs no more, a program has
    one item instead: requests are filled up to a multiple of the least quota of which there are
    PARTS at most. Nobody attends to what they are filled with. Or it has a number of whole
    requests, if all are as long. All parts then have as many items, and there are no tile units.
    """
    total = tl.sum(units, 0)
    longest = tl.max(units, 0)
    requests = tl.sum((units > 0).to(tl.int32), 0)
    even = tl.maximum(tl.cdiv(total, PARTS), MIN_UNITS)
    cost = even * PARTS + ITEM_UNITS * (requests + 2 * PARTS)
    quota = tl.maximum(tl.cdiv(total + ITEM_UNITS * requests, PARTS), MIN_UNITS + ITEM_UNITS)
    filled = tl.where(units > 0, units + ITEM_UNITS, 0)
    tile_units = tl.zeros([], tl.int32) + ITEM_UNITS
    if requests <= PARTS:
        low = even
        high = tl.maximum(longest, even)
        while low < high:
            middle = (low + high) // 2
            if tl.sum(tl.cdiv(units, middle), 0) <= PARTS:
                high = middle
            else:
                low = middle + 1
        if (low + ITEM_UNITS) * PARTS <= cost:
            quota = low
            filled = tl.cdiv(units, low) * low
            tile_units = tl.zeros([], tl.int32)
    elif total == longest * requests:
        requests_per_part = tl.cdiv(requests, PARTS)
        if requests_per_part * (longest + ITEM_UNITS) * PARTS <= cost:
            quota = requests_per_part * longest
            filled = units
            tile_units = tl.zeros([], tl.int32)
    return filled, quota, tile_units


@triton.jit(do_not_specialize=["batch", "window"])
def plan_splits(
    cu,
    lengths,
    work_indptr,
    batch,
    window,
    BN: tl.constexpr,
    BLOCKS_PER_UNIT: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    MIN_UNITS: tl.constexpr,
):
    """Write work_indptr int32 [batch + 1]: the units of work that come before each request.

    A unit is BLOCKS_PER_UNIT blocks of BN keys of one tile. The units counted are those of one tile
    of each request; its other tiles have as many. A request without keys has one unit, which writes
    zeros; one with more than MAX_QUERIES has none. cu: int32 [batch + 1], cumulated queries.
    lengths: int32 [batch], keys. PARTS: where it is not 0, for one KV head and no more than BLOCK
    requests, the quota of each of so many parts and the tile units come behind, see choose_quota.
    """
    num_units = tl.zeros([], tl.int32)
    tl.store(work_indptr, num_units)
    for low in range(0, batch, BLOCK):
        b = low + tl.arange(0, BLOCK)
        ok = b < batch
        queries = tl.load(cu + b + 1, mask=ok, other=0) - tl.load(cu + b, mask=ok, other=0)
        length = tl.load(lengths + b, mask=ok, other=0)
        first = tl.zeros([BLOCK], tl.int32)
        if WINDOW and CAUSAL:
            first = tl.maximum(length - queries - window + 1, 0)
        blocks = tl.cdiv(length, BN) - first // BN
        has_work = ok & (queries > 0)
        if MAX_QUERIES:
            has_work = has_work & (queries <= MAX_QUERIES)
        units = tl.where(has_work, tl.maximum(tl.cdiv(blocks, BLOCKS_PER_UNIT), 1), 0)
        if PARTS:
            units, quota, tile_units = choose_quota(units, PARTS, MIN_UNITS)
            tl.store(work_indptr + batch + 1, quota)
            tl.store(work_indptr + batch + 2, tile_units)
        tl.store(work_indptr + b + 1, num_units + tl.cumsum(units, 0), mask=ok)
        num_units += tl.sum(units, 0)
