"""The greatest scores of each query, of equal ones the earliest keys."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rank_bits(score):
    """Return float32 scores as uint32 in the same order; -0 is 0."""
    bits = (score + 0.0).to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def find_border(bits, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """Return a rank that the TOPK greatest of BLOCK ranks reach, and how many equal ones they have.

    It decides bit after bit, until just so many reach it; 0 if there are fewer than TOPK above 0.
    """
    border = tl.full((), 0, tl.uint32)
    reach = tl.full((), BLOCK + 1, tl.int32)
    bit = tl.full((), 31, tl.int32)
    while (bit >= 0) & (reach != TOPK):
        trial = border | (tl.full((), 1, tl.uint32) << bit.to(tl.uint32))
        count = tl.sum((bits >= trial).to(tl.int32))
        border = tl.where(count >= TOPK, trial, border)
        reach = tl.where(count >= TOPK, count, reach)
        bit -= 1
    return border, TOPK - tl.sum((bits > border).to(tl.int32))


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
def select_topk(
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
        _, _, ranks, _ = load_ranks(scores, positions, all_columns, columns, visible, narrowed)
        border, remaining = find_border(ranks, TOPK, BLOCK)
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
