"""A program's share of the queue of work, and what it prefetches."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_core.backends.triton.portable.arguments import (
    ALL_UNITS,
    FIRST_SPAN,
    NUMBER,
    QUOTA,
    SPAN,
)


class Plan(NamedTuple):
    """Where the work of a pass is written: indptr of plan_splits, or all three of plan_shared."""

    indptr: Any
    spans: Any
    first_spans: Any


class Work(NamedTuple):
    """Units start … end of the queue of work, a program's share; indptr: see plan_splits.

    No item begins from unit `last` on. quota: the units of each program but the last ones. A
    sequence is a request, or a span if SHARED. seq: that of the first unit; first_span: what
    plan_shared says of it. lane: of a part's programs this one; row_block: which TILE_ROWS of each
    head that makes, see decode_splits.
    """

    indptr: Any
    spans: Any
    first_span: Any
    start: Any
    end: Any
    last: Any
    quota: Any
    seq: Any
    lane: Any
    row_block: Any


@gluon.jit
def launch_dependents():
    """Let the launch of merge_splits begin, which waits for the partial states by itself."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def prefetch(ptr):
    """Bring what lies at a pointer into the L2 cache; nobody waits for it."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch_request(requests, sizes, CONFIG: gl.constexpr):
    """Prefetch the lengths and pages of what is this program's request if all are as long.

    Between two layers the weights of others have passed the caches.
    """
    seq = gl.program_id(0) * sizes.batch // gl.num_programs(0)
    if not CONFIG.SHARED:
        prefetch(requests.cu_seqlens_q + seq)
        prefetch(requests.seq_lens + seq)
    prefetch(requests.page_table + seq.to(gl.int64) * sizes.table_stride)


@gluon.jit
def tile_units_of(indptr, sizes, CONFIG: gl.constexpr):
    """Return the units that come before the keys of each tile."""
    tile_units = CONFIG.TILE_UNITS
    if CONFIG.PLANNED_QUOTA:
        tile_units = gl.load(indptr + sizes.batch + 2)
    return tile_units


@gluon.jit
def find_first(indptr, sizes, CONFIG: gl.constexpr):
    """Return all units, those of a program, and the request in which this program's begin."""
    # all at once: a search would wait for one load after the other; each warp has all of them
    L: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    i = gl.arange(0, 128, L)
    ends = gl.load(indptr + 1 + i, mask=i < sizes.batch, other=0)
    TURNS: gl.constexpr = CONFIG.HEADS // CONFIG.HEADS_AT_ONCE
    LANES: gl.constexpr = CONFIG.HEADS_AT_ONCE * CONFIG.ROW_BLOCKS
    num_units = gl.load(indptr + sizes.batch) * TURNS
    if CONFIG.PLANNED_QUOTA:
        quota = gl.load(indptr + sizes.batch + 1)
    else:
        parts = gl.num_programs(0) // LANES
        quota = gl.maximum((num_units + parts - 1) // parts, CONFIG.MIN_UNITS)
    start = gl.program_id(0) // LANES * quota
    earlier = ((i < sizes.batch) & (ends * TURNS <= start)).to(gl.int32)
    for low in range(128, sizes.batch, 128):
        ends = gl.load(indptr + 1 + low + i, mask=low + i < sizes.batch, other=0)
        earlier += ((low + i < sizes.batch) & (ends * TURNS <= start)).to(gl.int32)
    return num_units, quota, gl.sum(earlier, 0)


@gluon.jit
def prefetch_first_span(plan, CONFIG: gl.constexpr):
    """Prefetch the two sectors that program_work reads, while the groups of warps are formed."""
    if CONFIG.SHARED:
        LANES: gl.constexpr = CONFIG.HEADS_AT_ONCE * CONFIG.ROW_BLOCKS
        first_span = plan.first_spans + gl.program_id(0) // LANES * FIRST_SPAN
        prefetch(first_span)
        prefetch(first_span + SPAN)


@gluon.jit
def prefetch_for_merge(work, sizes, CONFIG: gl.constexpr):
    """Prefetch what the merge reads; one program of a part does.

    If all programs asked for one place in the cache at once, they would wait for each other.
    """
    if CONFIG.SHARED:
        if work.lane == 0:
            prefetch(work.spans + work.seq * SPAN)
            prefetch(work.indptr + work.seq)
        if gl.program_id(0) == 0:
            prefetch(work.indptr + sizes.batch)
            prefetch(work.indptr + 2 * sizes.batch)


@gluon.jit
def program_work(plan, sizes, CONFIG: gl.constexpr):
    """Return the units of this program: as many for each part, the last ones may have none.

    Each group of warps looks it up for itself, so that none waits for another.
    """
    LANES: gl.constexpr = CONFIG.HEADS_AT_ONCE * CONFIG.ROW_BLOCKS
    part = gl.program_id(0) // LANES
    first_span = plan.first_spans + part * FIRST_SPAN
    if CONFIG.SHARED:
        num_units = gl.load(first_span + ALL_UNITS)
        quota = gl.load(first_span + QUOTA)
        seq = gl.load(first_span + NUMBER)
    else:
        num_units, quota, seq = find_first(plan.indptr, sizes, CONFIG)
    start = part * quota
    end = gl.minimum(start + quota, num_units)
    last = end
    if CONFIG.TILE_UNITS > 0 or CONFIG.PLANNED_QUOTA:
        last = end - tile_units_of(plan.indptr, sizes, CONFIG)
        last = gl.maximum(last, gl.minimum(start + 1, end))
    lane = gl.program_id(0) % LANES
    row_block = lane % CONFIG.ROW_BLOCKS
    return Work(plan.indptr, plan.spans, first_span, start, end, last, quota, seq, lane, row_block)
