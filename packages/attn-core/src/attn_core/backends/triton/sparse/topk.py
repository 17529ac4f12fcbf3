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
def normal_guess(scores, n, count):
    """Return the score that `count` of n normal numbers reach, and how far ranks are apart there.

    scores: 0 where there is none.
    Source: formula 26.2.22 of Abramowitz and Stegun, and the normal density.
    """
    mean = tl.sum(scores) / n
    deviation = tl.sqrt(tl.maximum(tl.sum(scores * scores) / n - mean * mean, 0.0))
    part = count / n
    t = tl.sqrt(-2.0 * tl.log(tl.minimum(part, 1.0 - part)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
    density = 0.3989 * tl.exp(-0.5 * z * z)
    z = tl.where(part > 0.5, -z, z)
    return mean + z * deviation, deviation / (n * density)


@triton.jit
def find_border(ranks, guess, step, min_count, max_count, BLOCK: tl.constexpr):
    """Return a rank that `min_count` to `max_count` of BLOCK ranks reach.

    Where there is none, it is the rank that more of them reach and fewer exceed; 0 where fewer are
    above 0. guess: a score near it, and `step` how far scores are apart there; any will do. It
    tries scores between those that too many and too few reach, at last by halves.
    """
    low = tl.full((), 0, tl.uint32)  # so many reach it; high too few
    high = tl.full((), 0xFFFFFFFF, tl.uint32)
    reach_low = tl.full((), BLOCK + 1, tl.int32)
    reach_high = tl.full((), 0, tl.int32)
    middle = (min_count + max_count) * 0.5
    trial = rank_bits(guess)
    tries = tl.full((), 0, tl.int32)
    while (reach_low > max_count) & (high - low > 1):
        in_range = (trial > low) & (trial < high) & (tries < GUESSES)
        trial = tl.where(in_range, trial, low + (high - low) // 2)
        count = tl.sum((ranks >= trial).to(tl.int32))
        reached = count >= min_count
        low = tl.where(reached, trial, low)
        high = tl.where(reached, high, trial)
        reach_low = tl.where(reached, count, reach_low)
        reach_high = tl.where(reached, reach_high, count)
        # first a step beyond, as the normal numbers lie; then where the line between the two says
        normal_trial = to_score(trial) + step * 1.25 * (count.to(tl.float32) - middle)
        share = reach_low.to(tl.float32) - middle + 0.5
        share = share / (reach_low - reach_high).to(tl.float32)
        linear_trial = to_score(low) + (to_score(high) - to_score(low)) * share
        bracketed = (low > 0) & (high < 0xFFFFFFFF)
        trial = rank_bits(tl.where(bracketed, linear_trial, normal_trial))
        tries += 1
    return low


@triton.jit
def guess_limit(scores, length, TOPK: tl.constexpr, SAMPLE: tl.constexpr):
    """Return a rank that, as a sample says, more than TOPK of a row exceed, but not many more.

    The margin is four deviations of what such a sample counts of independent scores.
    """
    group, inner = tl.arange(0, SAMPLE // GROUP), tl.arange(0, GROUP)
    distance = tl.maximum(length // (SAMPLE // GROUP) // GROUP, 1) * GROUP
    mask = (group * distance + GROUP <= length)[:, None] & (inner < GROUP)[None, :]
    column = (group * distance)[:, None] + inner[None, :]
    score = tl.load(scores + column, mask=mask, other=0.0)
    size = tl.minimum(SAMPLE, length).to(tl.float32)
    expected = TOPK * (size / length.to(tl.float32))
    min_count = (expected + 4.0 * tl.sqrt(expected)).to(tl.int32) + 1
    max_count = min_count + min_count // 4
    guess, step = normal_guess(score, size, min_count * 1.1)
    ranks = tl.where(mask, rank_bits(score), 0)
    limit = find_border(ranks, guess, step, min_count, max_count, SAMPLE)
    return tl.maximum(limit, 1) - 1


@triton.jit
def mark_above(
    scores, start, stop, limit, marks,
    SEGMENT: tl.constexpr, AT_ONCE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write a bit for each score of a segment: whether it exceeds a limit; of others any bit.

    Rows are read up to a multiple of VECTOR, else a thread would load their scores one by one.
    """
    word, inner = tl.arange(0, AT_ONCE // 32), tl.arange(0, 32)
    bit = tl.full((32,), 1, tl.uint32) << inner.to(tl.uint32)
    bound = (stop + VECTOR - 1) // VECTOR * VECTOR
    for offset in range(0, tl.minimum(SEGMENT, stop - start), AT_ONCE):
        column = start // 32 * 32 + offset + word[:, None] * 32 + inner[None, :]
        score = tl.load(scores + column, mask=column < bound, other=0.0)
        # not at most: all where the limit is NaN, and NaN always
        marked = tl.where((score <= limit) == 0, bit[None, :], 0)
        tl.store(marks + offset // 32 + word, tl.sum(marked, 1).to(tl.int32, bitcast=True))


@triton.jit
def ones(x):
    """Return how many bits of uint32 are set."""
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24).to(tl.int32)


@triton.jit
def counted_before(x):
    """Return the sum of what precedes each of [n, 4] integers, row after row."""
    of_row = tl.sum(x, 1)
    return (tl.cumsum(of_row, 0) - of_row)[:, None] + tl.cumsum(x, 1) - x


@triton.jit
def append_marked(
    marks, start, stop, candidates, kept, SEGMENT: tl.constexpr, CAPACITY: tl.constexpr
):  # fmt: skip
    """Write the marked columns of a segment behind the `kept` ones, by 32 until one lacks room.

    Return how many there are then, and the first column of those 32.
    """
    word = tl.arange(0, SEGMENT // 32)
    num_columns = tl.minimum(tl.maximum(stop - start - word * 32, 0), 32)
    bits = tl.load(marks + word).to(tl.uint32, bitcast=True)
    bits &= tl.where(num_columns == 32, -1, (1 << num_columns) - 1).to(tl.uint32, bitcast=True)
    count = ones(bits)
    place = kept + tl.cumsum(count) - count
    fits = place + count <= CAPACITY
    bits = tl.where(fits, bits, 0)
    count = tl.where(fits, count, 0)
    out_ptrs = candidates + place
    for _ in range(tl.max(count)):
        column = start + word * 32 + ones((bits & (0 - bits)) - 1)
        tl.store(out_ptrs, column, mask=bits != 0)
        bits &= bits - 1
        out_ptrs += 1
    return kept + tl.sum(count), start + 32 * tl.sum(fits.to(tl.int32))


@triton.jit
def keep_greatest(scores, candidates, kept, TOPK: tl.constexpr, CAPACITY: tl.constexpr):
    """Let the TOPK greatest of `kept` candidates stay, in their order; return the least's rank."""
    entry = tl.arange(0, CAPACITY // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    valid = entry < kept
    column = tl.load(candidates + entry, mask=valid, other=0)
    score = tl.load(scores + column, mask=valid, other=0.0)
    ranks = tl.where(valid, rank_bits(score), 0)
    guess, step = normal_guess(score, kept.to(tl.float32), TOPK * 1.0)
    threshold = find_border(ranks, guess, step, TOPK, TOPK, CAPACITY)
    above = (ranks > threshold).to(tl.int32)
    equal = (ranks == tl.maximum(threshold, 1)).to(tl.int32)  # 0 is no score
    counts = counted_before((above << 16) + equal)  # two counts in one scan
    remaining = TOPK - tl.sum(above)
    earlier = counts & 0xFFFF
    take = (above > 0) | ((equal > 0) & (earlier < remaining))
    place = (counts >> 16) + tl.minimum(earlier, remaining)
    column = tl.load(candidates + entry, mask=valid, other=0)  # again, it spares registers
    tl.debug_barrier()  # what other threads read is overwritten
    tl.store(candidates + place, column, mask=take)
    return threshold


@triton.jit(
    do_not_specialize=[
        "row_stride", "table_stride", "first", "rows", "pieces", "span", "narrowed", "kept_stride"
    ]
)  # fmt: skip
def select_topk(
    chosen, scores, positions, row_stride, page_table, table_stride, seq_lens, cu_seqlens_q,
    requests, first, rows, pieces, span, narrowed, scratch, kept_scores, kept_stride,
    TOPK: tl.constexpr, PAGE: tl.constexpr, C: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Select the greatest scores of queries; what it writes is in the order of the keys.

    A row is read once. What exceeds a limit becomes a candidate: first one that a sample of the row
    gives. Where candidates fill their C.CAPACITY places, the TOPK greatest stay and the least of
    these is the limit, since of equal scores the earlier ones win. The TOPK greatest candidates are
    the row's; where they are fewer the row is read anew without a limit. So all that is written is
    a function of the scores alone.

    pieces: of `span` columns each that rows are cut into. Where there are more than one, TOPK
    scores and positions of each, -1 behind them, go to kept_scores and chosen, for another launch.
    Else slots int32 [TOPK], -1 behind them, go to chosen. narrowed: the span of such pieces, of
    which scores and positions hold what was kept; else 0, and the key at t is in column t. scratch:
    int32 [programs, C.CAPACITY + C.SEGMENT // 32 + 1]: not a multiple of 4, so that a thread loads
    single words. Stores of single columns then have the loads' layout; else each exchanges its
    columns through shared memory. VECTOR: what strides and addresses of rows are multiples of.
    """
    candidates = scratch + tl.program_id(0).to(tl.int64) * (C.CAPACITY + C.SEGMENT // 32 + 1)
    marks = candidates + C.CAPACITY
    output = tl.arange(0, C.CAPACITY // 4)
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
        piece_start = piece * (span // 32 * 32)
        stop = tl.minimum(piece_start + span, filled)
        out_offset = row.to(tl.int64) * kept_stride + piece * TOPK
        if last:
            out_offset = token * TOPK
        num_taken = tl.full((), 0, tl.int32)
        if visible > TOPK:
            row_scores = scores + at_row
            limit = tl.full((), 0, tl.uint32)
            if stop - piece_start > C.CAPACITY:
                limit = guess_limit(row_scores + piece_start, stop - piece_start, TOPK, C.SAMPLE)
            start, kept, more = piece_start, num_taken, piece_start < stop
            while more:
                has_capacity = kept <= C.CAPACITY
                while (start < stop) & has_capacity:
                    mark_above(
                        row_scores,
                        start,
                        stop,
                        to_score(limit),
                        marks,
                        C.SEGMENT,
                        C.AT_ONCE,
                        VECTOR,
                    )
                    tl.debug_barrier()  # what other threads marked is read
                    previous = start
                    kept, start = append_marked(
                        marks, start, stop, candidates, kept, C.SEGMENT, C.CAPACITY
                    )
                    has_capacity = start - previous == C.SEGMENT
                more = start < stop
                if (more == 0) & (kept < TOPK) & (limit > 0):
                    start, kept, limit = piece_start, kept * 0, limit * 0
                    more = piece_start < stop
                else:
                    tl.debug_barrier()  # what other threads appended is read
                    limit = keep_greatest(row_scores, candidates, kept, TOPK, C.CAPACITY)
                    kept = tl.minimum(kept, TOPK)
            num_taken = kept
            tl.debug_barrier()  # what other threads kept is read
        elif last:
            num_taken = visible
        for offset in range(0, TOPK, C.CAPACITY // 4):
            n = offset + output
            valid = n < num_taken
            position = n
            if visible > TOPK:
                position = tl.load(candidates + n, mask=valid, other=0)
                if narrowed > 0:
                    position = tl.load(positions + at_row + position, mask=valid, other=0)
            if last:
                page = tl.load(table + position // PAGE, mask=valid, other=0)
                position = page * PAGE + position % PAGE
            else:
                score = tl.load(scores + at_row + position, mask=valid, other=0.0)
                tl.store(kept_scores + out_offset + n, score, mask=valid)
            tl.store(chosen + out_offset + n, tl.where(valid, position, -1), mask=n < TOPK)
        tl.debug_barrier()  # the next row's candidates overwrite these
