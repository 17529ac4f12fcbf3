"""The greatest scores of each query, of equal ones the earliest keys."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

GUESSES = tl.constexpr(12)  # of a border by what scores are like, before it is halved
GROUP = tl.constexpr(4)  # scores that lie together in a sample: what a thread loads at once


@triton.jit
def rank_bits(score):
    """Return float32 scores as uint32 in the same order; -0 is 0, NaN the greatest, none is 0."""
    bits = (score + 0.0).to(tl.uint32, bitcast=True)
    bits ^= tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)
    return tl.where(score == score, bits, 0xFFC00000).to(tl.uint32)


@triton.jit
def to_score(rank):
    """Return the float32 score of a rank; of 0 it is NaN."""
    bits = rank ^ tl.where(rank >> 31 != 0, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def normal_guess(scores, n, wanted):
    """Return the score that `wanted` of n normal numbers reach, and their deviation by a rank there.

    scores: 0 where there is none.
    Source: formula 26.2.22 of Abramowitz and Stegun, and the normal density.
    """
    mean = tl.sum(scores) / n
    deviation = tl.sqrt(tl.maximum(tl.sum(scores * scores) / n - mean * mean, 0.0))
    part = wanted / n
    t = tl.sqrt(-2.0 * tl.log(tl.minimum(part, 1.0 - part)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
    density = 0.3989 * tl.exp(-0.5 * z * z)
    z = tl.where(part > 0.5, -z, z)
    return mean + z * deviation, deviation / (n * density)


@triton.jit
def find_border(ranks, guess, step, least, most, BLOCK: tl.constexpr):
    """Return a rank that `least` to `most` of BLOCK ranks reach.

    Where there is none, it is the rank that more of them reach and fewer exceed; 0 where fewer are
    above 0. guess: a score near it, and `step` how far scores are apart there; any will do. It
    tries scores between those that too many and too few reach, at last by halves.
    """
    low = tl.full((), 0, tl.uint32)  # so many reach it; high too few
    high = tl.full((), 0xFFFFFFFF, tl.uint32)
    reach_low = tl.full((), BLOCK + 1, tl.int32)
    reach_high = tl.full((), 0, tl.int32)
    middle = (least + most) * 0.5
    trial = rank_bits(guess)
    tries = tl.full((), 0, tl.int32)
    while (reach_low > most) & (high - low > 1):
        between = (trial > low) & (trial < high) & (tries < GUESSES)
        trial = tl.where(between, trial, low + (high - low) // 2)
        count = tl.sum((ranks >= trial).to(tl.int32))
        enough = count >= least
        low = tl.where(enough, trial, low)
        high = tl.where(enough, high, trial)
        reach_low = tl.where(enough, count, reach_low)
        reach_high = tl.where(enough, reach_high, count)
        # first a step beyond, as the normal numbers lie; then where the line between the two says
        beyond = to_score(trial) + step * 1.25 * (count.to(tl.float32) - middle)
        share = reach_low.to(tl.float32) - middle + 0.5
        share = share / (reach_low - reach_high).to(tl.float32)
        line = to_score(low) + (to_score(high) - to_score(low)) * share
        both = (low > 0) & (high < 0xFFFFFFFF)
        trial = rank_bits(tl.where(both, line, beyond))
        tries += 1
    return low


@triton.jit
def places(take, ROWS: tl.constexpr):
    """Return how many of [ROWS, n] are taken before each, row after row, and in all."""
    of_row = tl.sum(take, 1)
    before = tl.cumsum(of_row, 0) - of_row
    return before[:, None] + tl.cumsum(take, 1) - take, tl.sum(of_row)


@triton.jit
def guess_limit(scores, length, TOPK: tl.constexpr, TILE: tl.constexpr):
    """Return a rank that, as a sample of TILE scores says, more than TOPK of a row exceed.

    Only some more: four deviations of what such a sample would count of independent scores.
    """
    group, inner = tl.arange(0, TILE // GROUP), tl.arange(0, GROUP)
    apart = length // (TILE // GROUP) // GROUP * GROUP
    score = tl.load(scores + (group * apart)[:, None] + inner[None, :])
    expected = TOPK * (TILE / length.to(tl.float32))
    least = (expected + 4.0 * tl.sqrt(expected)).to(tl.int32) + 1
    most = least + least // 4
    guess, step = normal_guess(score, TILE * 1.0, least * 1.1)
    return find_border(rank_bits(score), guess, step, least, most, TILE) - 1


@triton.jit
def append_tile(
    scores, start, stop, limit, candidates, kept,
    TILE: tl.constexpr, ROOM: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Append those of TILE scores from `start` on that exceed a limit, if there is room for them.

    Return how many there are. Rows are read up to a multiple of VECTOR, else a thread would load
    their scores one by one.
    """
    group, inner = tl.arange(0, TILE // GROUP), tl.arange(0, GROUP)
    column = start // VECTOR * VECTOR + group[:, None] * GROUP + inner[None, :]
    bound = (stop + VECTOR - 1) // VECTOR * VECTOR
    score = tl.load(scores + column, mask=column < bound, other=0.0)
    # not at most: all where the limit is NaN, and NaN always
    take = (column < stop) & ((score <= to_score(limit)) == 0)
    place, count = places(take.to(tl.int32), TILE // GROUP)
    entry = (score.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | column.to(tl.uint64)
    tl.store(candidates + kept + place, entry, mask=take & (kept + count <= ROOM))
    return count


@triton.jit(
    do_not_specialize=[
        "row_stride", "table_stride", "first", "rows", "pieces", "span", "narrowed", "kept_stride"
    ]
)  # fmt: skip
def select_topk(
    scores, positions, row_stride, page_table, table_stride, seq_lens, cu_seqlens_q, requests,
    first, rows, pieces, span, narrowed, candidates, kept_scores, chosen, kept_stride,
    TOPK: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Select the greatest scores of queries; what it writes is in the order of the keys.

    A row is read once, TILE scores after TILE scores. What exceeds a limit becomes a candidate:
    first one that a sample of the row gives. Where candidates fill their 2 · TILE places, the TOPK
    greatest stay and the least of these is the limit, since of equal scores the earlier ones win.
    The TOPK greatest candidates are the row's; where they are fewer the row is read anew without a
    limit. So all that is written is a function of the scores alone.

    pieces: of `span` columns each that rows are cut into. Where there are more than one, TOPK
    scores and positions of each, -1 behind them, go to kept_scores and chosen, for another launch.
    Else slots int32 [TOPK], -1 behind them, go to chosen. narrowed: the span of such pieces of which
    scores and positions hold what was kept; else 0, and the key at t is in column t. candidates:
    uint64 [programs, 2 · TILE]. VECTOR: what strides and addresses of rows are multiples of.
    """
    ROOM: tl.constexpr = 2 * TILE
    candidates += tl.program_id(0).to(tl.int64) * ROOM
    inner = tl.arange(0, TILE)
    entries = tl.arange(0, ROOM // 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
    last = pieces == 1
    for item in range(tl.program_id(0), rows * pieces, tl.num_programs(0)):
        row = item // pieces
        piece = item % pieces
        token = (first + row).to(tl.int64)
        request = tl.load(requests + token)
        end = tl.load(cu_seqlens_q + request + 1)
        length = tl.load(seq_lens + request)
        visible = tl.minimum(length - (end - token).to(tl.int32) + 1, length)
        visible = tl.maximum(visible, 0)  # of a padded row it may be anything
        table = page_table + request.to(tl.int64) * table_stride
        filled = visible
        if narrowed > 0:
            filled = visible // narrowed * TOPK + tl.minimum(visible % narrowed, TOPK)
        at_row = row.to(tl.int64) * (row_stride // VECTOR * VECTOR)
        begin = piece * (span // VECTOR * VECTOR)
        stop = tl.minimum(begin + span, filled)
        to = row.to(tl.int64) * kept_stride + piece * TOPK
        if last:
            to = token * TOPK
        taken = tl.full((), 0, tl.int32)
        if visible > TOPK:
            own, names = scores + at_row, positions + at_row
            limit = tl.full((), 0, tl.uint32)
            if stop - begin > ROOM:
                limit = guess_limit(own + begin, stop - begin, TOPK, TILE)
            start, kept, going = begin, taken, begin < stop
            while going:
                room = kept <= ROOM
                while (start < stop) & room:
                    count = append_tile(
                        own, start, stop, limit, candidates, kept, TILE, ROOM, VECTOR
                    )
                    room = kept + count <= ROOM
                    kept = tl.where(room, kept + count, kept)
                    start = tl.where(room, start + TILE, start)
                going = start < stop
                if (going == 0) & (kept < TOPK) & (limit > 0):
                    start, kept, limit = begin, kept * 0, limit * 0
                    going = begin < stop
                else:
                    tl.debug_barrier()  # what other threads stored is read
                    entry = tl.load(candidates + entries, mask=entries < kept, other=0)
                    score = (entry >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
                    ranks = tl.where(entries < kept, rank_bits(score), 0)
                    guess, step = normal_guess(score, kept.to(tl.float32), TOPK * 1.0)
                    border = find_border(ranks, guess, step, TOPK, TOPK, ROOM)
                    above = (ranks > border).to(tl.int32)
                    equal = ((ranks == border) & (entries < kept)).to(tl.int32)
                    before, both = places((above << 16) + equal, ROOM // 2)  # two in one scan
                    remaining = TOPK - (both >> 16)
                    tl.debug_barrier()
                    take = (above > 0) | ((equal > 0) & ((before & 0xFFFF) < remaining))
                    place = (before >> 16) + tl.minimum(before & 0xFFFF, remaining)
                    entry = tl.load(candidates + entries, mask=take, other=0)  # spares registers
                    tl.debug_barrier()  # what other threads read is overwritten
                    tl.store(candidates + place, entry, mask=take & going)
                    score = (entry >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
                    done = take & (going == 0)
                    position = (entry & 0xFFFFFFFF).to(tl.int32)
                    own_name = tl.load(names + position, mask=done & (narrowed > 0), other=0)
                    position = tl.where(narrowed > 0, own_name, position)
                    tl.store(kept_scores + to + place, score, mask=done & (pieces > 1))
                    page = tl.load(table + position // PAGE, mask=done & last, other=0)
                    slot = tl.where(last, page * PAGE + position % PAGE, position)
                    tl.store(chosen + to + place, slot, mask=done)
                    kept = tl.minimum(kept, TOPK)
                    taken, limit = kept, border
            tl.debug_barrier()  # the next row's candidates overwrite these
        elif last:
            for at in range(0, visible, TILE):
                position = at + inner
                page = tl.load(table + position // PAGE, mask=position < visible, other=0)
                slot = page * PAGE + position % PAGE
                tl.store(chosen + to + position, slot, mask=position < visible)
            taken = visible
        for at in range(taken, TOPK, TILE):
            tl.store(chosen + to + at + inner, -1, mask=at + inner < TOPK)
