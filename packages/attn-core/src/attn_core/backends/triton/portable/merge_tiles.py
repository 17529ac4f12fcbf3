"""Merges the states that tiles of prompts leave whose keys are cut, by their log-sum-exp."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.portable.merge import store_merged


@triton.jit(do_not_specialize=["batch"])
def merge_tiles(
    out,
    parts,
    cu,
    tile_offsets,
    request_order,
    batch,
    sinks,
    v_scale,
    BM: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
    C: tl.constexpr,
):
    """Merge the parts of each tile of BM rows whose keys were cut, see KeyParts.

    Grid: (most_slots, n). The programs of a slot take ROWS rows of its tile at a time: those of its
    other parts and their n programs take turns. OVERLAP: as in merge_splits.
    """
    BDV: tl.constexpr = C.BDV
    slot = tl.program_id(0)
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(tile_offsets + middle) * C.HEADS <= slot:
            low = middle
        else:
            high = middle
    b = tl.load(request_order + low)
    first_tile = tl.load(tile_offsets + low)
    items = tl.load(tile_offsets + low + 1) - first_tile
    count = tl.load(parts.counts + b)
    query = tl.load(cu + b)
    rows_of_all = (tl.load(cu + b + 1) - query) * C.GROUP
    item = slot // C.HEADS - first_tile
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if (count > 1) & (item < items):
        tiles = items // count
        kv_head = slot % C.HEADS
        tile = item % tiles
        d = tl.arange(0, BDV)
        program = item // tiles * tl.num_programs(1) + tl.program_id(1)
        for first in range(program * ROWS, BM, count * tl.num_programs(1) * ROWS):
            tile_row = first + tl.arange(0, ROWS)
            row = tile * BM + tile_row
            row_mask = row < rows_of_all
            m = tl.full([ROWS], -float("inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, BDV], tl.float32)
            for part in range(0, count):
                rows_in = (first_tile + part * tiles + tile) * C.HEADS + kv_head
                rows_in = rows_in.to(tl.int64) * BM + tile_row
                s = tl.load(parts.lse + rows_in, mask=row_mask, other=-float("inf"))
                x = tl.load(
                    parts.out + rows_in[:, None] * BDV + d[None, :],
                    mask=row_mask[:, None],
                    other=0.0,
                )
                new = tl.maximum(m, s)
                base = tl.where(new == -float("inf"), 0.0, new)
                weight = tl.exp2(s - base)
                shrink = tl.exp2(m - base)
                total = total * shrink + weight
                acc = acc * shrink[:, None] + x * weight[:, None]
                m = new
            token = (query + row // C.GROUP).to(tl.int64)
            head = kv_head * C.GROUP + row % C.GROUP
            store_merged(m, total, acc, out, sinks, v_scale, token, head, row_mask, d, C)
