"""The selection as it was: 16,384 scores of a row in registers, longer rows in two launches."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attn_core.backends.triton.sparse.topk import rank_bits, to_score
from torch import Tensor

ROW, WARPS, WRITTEN = 16384, 16, 2048  # scores of a row, warps, scores written in turn
GUESSES = tl.constexpr(12)  # of a border by what scores are like, before it is halved


@triton.jit
def normal_guess(scores, valid, TOPK: tl.constexpr):
    """Return the score that TOPK of n normal numbers reach, and their deviation there by a rank.

    Source: formula 26.2.22 of Abramowitz and Stegun, and the normal density.
    """
    n = tl.sum(valid.to(tl.float32))
    x = tl.where(valid, scores, 0.0)
    mean = tl.sum(x) / n
    deviation = tl.sqrt(tl.maximum(tl.sum(x * x) / n - mean * mean, 0.0))
    part = TOPK / n
    t = tl.sqrt(-2.0 * tl.log(tl.minimum(part, 1.0 - part)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
    density = 0.3989 * tl.exp(-0.5 * z * z)
    z = tl.where(part > 0.5, -z, z)
    return mean + z * deviation, deviation / (n * density)


@triton.jit
def find_border(ranks, guess, step, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """Return a rank that the TOPK greatest of BLOCK ranks reach, and how many equal ones they have.

    guess: a score near it, and `step` how far scores are apart there; any will do. It tries scores
    between those that too many and too few reach, at last by halves, until just so many reach one.
    A border of 0 says that there are fewer than TOPK above 0.
    """
    low = tl.full((), 0, tl.uint32)  # so many reach it; high too few
    high = tl.full((), 0xFFFFFFFF, tl.uint32)
    reach_low = tl.full((), BLOCK + 1, tl.int32)
    reach_high = tl.full((), 0, tl.int32)
    trial = rank_bits(guess)
    tries = tl.full((), 0, tl.int32)
    while (reach_low != TOPK) & (high - low > 1):
        between = (trial > low) & (trial < high) & (tries < GUESSES)
        trial = tl.where(between, trial, low + (high - low) // 2)
        count = tl.sum((ranks >= trial).to(tl.int32))
        enough = count >= TOPK
        low = tl.where(enough, trial, low)
        high = tl.where(enough, high, trial)
        reach_low = tl.where(enough, count, reach_low)
        reach_high = tl.where(enough, reach_high, count)
        # first a step beyond, as the normal numbers lie; then where the line between the two says
        beyond = to_score(trial) + step * 1.25 * (count - TOPK).to(tl.float32)
        share = (reach_low - TOPK).to(tl.float32) + 0.5
        share = share / (reach_low - reach_high).to(tl.float32)
        line = to_score(low) + (to_score(high) - to_score(low)) * share
        both = (low > 0) & (high < 0xFFFFFFFF)
        trial = rank_bits(tl.where(both, line, beyond))
        tries += 1
    return low, TOPK - tl.sum((ranks > low).to(tl.int32))


@triton.jit
def load_ranks(scores, positions, column, columns, visible, narrowed):
    """Return positions, scores and ranks of some columns, and which are valid; others rank 0."""
    position = tl.load(positions + column, mask=(narrowed != 0) & (column < columns), other=-1)
    position = tl.where(narrowed != 0, position, column)
    valid = (position >= 0) & (position < visible)
    score = tl.load(scores + column, mask=valid, other=0.0)
    return position, score, tl.where(valid, rank_bits(score), 0), valid


@triton.jit(
    do_not_specialize=[
        "first", "columns", "table_stride", "row_stride", "kept_stride", "narrowed", "last"
    ]
)  # fmt: skip
def select_in_registers(
    scores, positions, row_stride, columns, page_table, table_stride, seq_lens, cu_seqlens_q,
    requests, first, kept, chosen, kept_stride, narrowed, last,
    TOPK: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """Select the greatest of BLOCK scores of a query; what it writes is in the order of the keys.

    narrowed: columns are what an earlier launch kept, at `positions` or -1; else the key at t is in
    column t. last: slots int32 [TOPK] go to chosen, -1 behind them. Else TOPK scores and positions,
    -1 behind them, go to kept and chosen, for the next launch. WRITTEN are looked at in turn to
    be written. All of it is a function of the scores alone.
    """
    row = tl.program_id(0)
    piece = tl.program_id(1)
    token = (first + row).to(tl.int64)
    request = tl.load(requests + token)
    end = tl.load(cu_seqlens_q + request + 1)
    length = tl.load(seq_lens + request)
    visible = tl.minimum(length - (end - token).to(tl.int32) + 1, length)
    visible = tl.maximum(visible, 0)  # of a padded row it may be anything
    table = page_table + request.to(tl.int64) * table_stride
    inner = tl.arange(0, WRITTEN)
    taken = tl.full((), 0, tl.int32)
    to = row.to(tl.int64) * kept_stride + piece * TOPK
    if last != 0:
        to = token * TOPK
    if visible > TOPK:
        scores += row.to(tl.int64) * row_stride
        positions += row.to(tl.int64) * row_stride
        all_columns = piece * BLOCK + tl.arange(0, BLOCK)
        _, values, ranks, some = load_ranks(
            scores, positions, all_columns, columns, visible, narrowed
        )
        guess, step = normal_guess(values, some, TOPK)
        border, remaining = find_border(ranks, guess, step, TOPK, BLOCK)
        equals = tl.full((), 0, tl.int32)
        filled = tl.where(narrowed != 0, columns, visible)
        for start in range(piece * BLOCK, tl.minimum(piece * BLOCK + BLOCK, filled), WRITTEN):
            column = start + inner
            position, score, bits, valid = load_ranks(
                scores, positions, column, columns, visible, narrowed
            )
            above = (bits > border).to(tl.int32)
            equal = (valid & (bits == border)).to(tl.int32)
            both = tl.cumsum((above << 16) + equal, 0)  # two counts in one scan
            earlier = equals + (both & 0xFFFF) - equal
            take = (above > 0) | ((equal > 0) & (earlier < remaining))
            spent = tl.minimum(equals, remaining)
            place = taken + (both >> 16) - above + tl.minimum(earlier, remaining) - spent
            if last != 0:
                page = tl.load(table + position // PAGE, mask=take, other=0)
                tl.store(chosen + to + place, page * PAGE + position % PAGE, mask=take)
            else:
                tl.store(kept + to + place, score, mask=take)
                tl.store(chosen + to + place, position, mask=take)
            taken += tl.sum(take.to(tl.int32))
            equals += tl.sum(equal)
    elif last != 0:
        for start in range(0, visible, WRITTEN):
            position = start + inner
            page = tl.load(table + position // PAGE, mask=position < visible, other=0)
            slot = page * PAGE + position % PAGE
            tl.store(chosen + to + position, slot, mask=position < visible)
        taken = visible
    if (last != 0) | (visible > TOPK):
        for start in range(taken, TOPK, WRITTEN):
            tl.store(chosen + to + start + inner, -1, mask=start + inner < TOPK)


def select(
    scores: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    requests: Tensor,
    chosen: Tensor,
    *,
    page_size: int,
) -> None:
    """Do what attn_core.backends.triton.sparse.launch.select does, for all queries of a pass."""
    count, topk = len(scores), chosen.shape[1]
    passes = (page_table, page_table.stride(0), seq_lens, cu_seqlens_q, requests, 0)
    columns, positions = scores.shape[1], None
    while True:
        last = columns <= ROW
        pieces = 1 if last else triton.cdiv(columns, ROW)
        kept, into = scores, chosen
        if not last:
            kept = scores.new_empty(count, pieces * topk)
            into = torch.empty(kept.shape, dtype=torch.int32, device=kept.device)
        select_in_registers[(count, pieces)](
            scores, into if positions is None else positions, scores.stride(0), columns, *passes,
            kept, into, kept.stride(0), int(positions is not None), int(last), topk, page_size,
            ROW, WRITTEN, num_warps=WARPS, maxnreg=64,
        )  # fmt: skip
        if last:
            return
        scores, positions, columns = kept, into, pieces * topk
