"""The plan of the tiles of prompts: one launch orders requests and may cut keys of long ones."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

UNIT = 128  # keys in which the work of a tile is counted
LEAST_UNITS = 8  # of a part
SHARES = 2  # that a program takes of parts as long as may be
LONG_TILE = 5 / 8  # of all that a program takes; others fill what a shorter tile leaves
PART_UNITS = 2  # what a part takes beside its keys

_UNIT = tl.constexpr(UNIT)
_LEAST_UNITS = tl.constexpr(LEAST_UNITS)
_SHARES = tl.constexpr(SHARES)
_LONG_TILE = tl.constexpr(LONG_TILE)
_PART_UNITS = tl.constexpr(PART_UNITS)


def most_slots(programs: int) -> int:
    """Return how many parts of cut tiles there are at most.

    A tile of n parts, n > 1, has more than n / 2 times the keys of the longest part, and that has
    at least work / (SHARES · programs).
    """
    return 2 * SHARES * programs


@triton.jit
def _counts(
    cu,
    lengths,
    b,
    batch,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    MIN_QUERIES: tl.constexpr,
    PAGED: tl.constexpr,
):
    """Return the keys and the tiles of requests; those beyond the batch have neither."""
    valid = b < batch
    queries = tl.load(cu + b + 1, mask=valid, other=0) - tl.load(cu + b, mask=valid, other=0)
    if MIN_QUERIES:
        queries = tl.where(queries < MIN_QUERIES, 0, queries)
    keys = tl.load(lengths + b, mask=valid, other=0)
    if not PAGED:
        keys = tl.load(lengths + b + 1, mask=valid, other=0) - keys
    return keys, (queries * GROUP + ROWS - 1) // ROWS


@triton.jit(do_not_specialize=["batch"])
def order_requests(
    cu,
    lengths,
    tile_offsets,
    request_order,
    counts,
    slots,
    batch,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    MIN_QUERIES: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Rank BLOCK requests by counting: as many come before one as have more keys.

    PROGRAMS: where it is not 0, keys of tiles may be cut for so many programs of equal speed, see
    KeyParts. A tile then counts as one for each of its parts.
    """
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys, tiles = _counts(cu, lengths, request, batch, GROUP, ROWS, MIN_QUERIES, PAGED)
    share = 0
    if PROGRAMS:
        share = longest_part(
            cu, lengths, batch, GROUP, ROWS, MIN_QUERIES, PAGED, BLOCK, HEADS, PROGRAMS
        )
        parts = _parts(keys, share)
        tiles *= parts
    rank = tl.zeros([BLOCK], tl.int32)
    offset = tl.zeros([BLOCK], tl.int32)
    for start in range(0, batch, BLOCK):
        b = start + tl.arange(0, BLOCK)
        b_keys, b_tiles = _counts(cu, lengths, b, batch, GROUP, ROWS, MIN_QUERIES, PAGED)
        if PROGRAMS:
            b_tiles *= _parts(b_keys, share)
        equal = b_keys[None, :] == keys[:, None]
        earlier = (b_keys[None, :] > keys[:, None]) | (equal & (b[None, :] < request[:, None]))
        earlier = earlier & (b < batch)[None, :]
        rank += tl.sum(earlier.to(tl.int32), 1)
        offset += tl.sum(tl.where(earlier, b_tiles[None, :], 0), 1)
    valid = request < batch
    tl.store(request_order + rank, request, mask=valid)
    tl.store(tile_offsets + rank, offset, mask=valid)
    tl.store(tile_offsets + rank + 1, offset + tiles, mask=valid & (rank == batch - 1))
    if PROGRAMS:
        tl.store(counts + request, parts, mask=valid)
        tl.store(slots + request, offset * HEADS, mask=valid)


@triton.jit
def _parts(keys, share):
    """Return into how many parts of at most `share` units the keys of tiles are cut."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, _UNIT), share), 1)


@triton.jit
def longest_part(
    cu,
    lengths,
    batch,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    MIN_QUERIES: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Return the units of keys of the longest part, those of the longest request to cut none.

    Each tile counts as if its rows saw all keys. Tiles that are all as long are cut so that the
    last round of programs has work for most; else the short ones fill what the long ones leave.
    """
    work = tl.zeros([], tl.int64)
    tiles = tl.zeros([], tl.int32)
    longest = tl.zeros([], tl.int32)
    for start in range(0, batch, BLOCK):
        b = start + tl.arange(0, BLOCK)
        b_keys, b_tiles = _counts(cu, lengths, b, batch, GROUP, ROWS, MIN_QUERIES, PAGED)
        units = tl.where(b_tiles > 0, tl.cdiv(b_keys, _UNIT), 0)
        work += tl.sum(units.to(tl.int64) * b_tiles, 0)
        tiles += tl.sum(b_tiles, 0)
        longest = tl.maximum(longest, tl.max(units, 0))
    work *= HEADS
    tiles *= HEADS
    share = tl.maximum(longest, 1)
    if longest > work * _LONG_TILE / PROGRAMS:
        share = tl.cdiv(work, _SHARES * PROGRAMS).to(tl.int32)
        if work == longest.to(tl.int64) * tiles:
            best = tl.cdiv(tiles, PROGRAMS) * (longest + _PART_UNITS)
            share = longest
            max_parts = tl.full([], 2 * _SHARES * PROGRAMS, tl.int32) // tl.maximum(tiles, 1)
            for n in range(2, max_parts + 1):
                part = tl.cdiv(longest, n)
                rounds = tl.cdiv(tiles * n, PROGRAMS) * (part + _PART_UNITS)
                if rounds < best:
                    best = rounds
                    share = part
        share = tl.maximum(share, _LEAST_UNITS)
    return share
