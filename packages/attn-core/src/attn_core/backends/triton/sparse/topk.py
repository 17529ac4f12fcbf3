"""The greatest scores of each query, of equal ones the earliest keys: a radix select."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

BITS = tl.constexpr(8)  # of a score that one pass over a row decides
BINS = tl.constexpr(256)


@triton.jit
def rank_bits(score):
    """Return float32 scores as uint32 in the same order; -0 is 0."""
    bits = (score + 0.0).to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _border(scores, visible, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bits of the TOPK-th greatest score of a row, and how many equal ones are taken."""
    border = tl.full((), 0, tl.uint32)
    remaining = tl.full((), TOPK, tl.int32)
    bins = tl.arange(0, BINS)
    for step in tl.static_range(32 // BITS):
        shift = 32 - BITS * (step + 1)
        counts = tl.zeros((BINS,), tl.int32)
        for start in range(0, visible, BLOCK):
            position = start + tl.arange(0, BLOCK)
            here = position < visible
            bits = rank_bits(tl.load(scores + position, mask=here, other=0.0))
            if step > 0:  # the digits above are those of the border
                here = here & (bits >> (shift + BITS) == border >> (shift + BITS))
            digit = ((bits >> shift) & (BINS - 1)).to(tl.int32)
            counts += tl.histogram(digit, BINS, mask=here)
        above = tl.sum(counts) - tl.cumsum(counts, 0)
        chosen = (above < remaining) & (above + counts >= remaining)
        border |= tl.sum(tl.where(chosen, bins, 0)).to(tl.uint32) << shift
        remaining -= tl.sum(tl.where(chosen, above, 0))
    return border, remaining


@triton.jit(do_not_specialize=["first", "table_stride", "row_stride"])
def select_topk(
    scores, row_stride, page_table, table_stride, seq_lens, cu_seqlens_q, requests, first, chosen,
    TOPK: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, OUT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the slots of a query's greatest scores int32 [TOPK], by position, and -1 behind them.

    It counts and never races, so the result is a function of the scores alone.
    """
    row = tl.program_id(0)
    token = (first + row).to(tl.int64)
    request = tl.load(requests + token)
    end = tl.load(cu_seqlens_q + request + 1)
    visible = tl.load(seq_lens + request) - (end - token).to(tl.int32) + 1
    visible = tl.maximum(visible, 0)  # of a padded row it may be anything
    table = page_table + request.to(tl.int64) * table_stride
    chosen += token * TOPK
    if visible <= TOPK:
        for start in range(0, TOPK, OUT_BLOCK):
            position = start + tl.arange(0, OUT_BLOCK)
            seen = position < visible
            page = tl.load(table + position // PAGE, mask=seen, other=0)
            slot = tl.where(seen, page * PAGE + position % PAGE, -1)
            tl.store(chosen + position, slot, mask=position < TOPK)
    else:
        scores += row.to(tl.int64) * row_stride
        border, remaining = _border(scores, visible, TOPK, BLOCK)
        taken = tl.full((), 0, tl.int32)
        equals = tl.full((), 0, tl.int32)
        for start in range(0, visible, BLOCK):
            position = start + tl.arange(0, BLOCK)
            seen = position < visible
            bits = rank_bits(tl.load(scores + position, mask=seen, other=0.0))
            equal = (seen & (bits == border)).to(tl.int32)
            earlier = equals + tl.cumsum(equal, 0)
            take = (seen & (bits > border)) | ((equal > 0) & (earlier <= remaining))
            place = taken + tl.cumsum(take.to(tl.int32), 0) - 1
            page = tl.load(table + position // PAGE, mask=take, other=0)
            tl.store(chosen + place, page * PAGE + position % PAGE, mask=take)
            taken += tl.sum(take.to(tl.int32))
            equals += tl.sum(equal)
