"""Device functions that the Hopper kernels share: keys into shared memory, scores, clean tails."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
SEE_CAUSAL = gl.constexpr(1)  # as in portable/common.py
SEE_TREE = gl.constexpr(2)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name in Triton 3.6
GATHER_BELOW = gl.constexpr(8)  # smaller pages than the swizzle goes over are gathered by rows


@gluon.jit
def find_request(cu, batch, item, SCALE: gl.constexpr, BLOCK: gl.constexpr):
    """Do what tiles.find_request does."""
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        start = gl.load(cu + middle) * SCALE
        if BLOCK > 0:
            start = start // BLOCK + middle
        if start <= item:
            low = middle
        else:
            high = middle
    return low


@gluon.jit
def look_up(table, first, length, start, PAGE: gl.constexpr, BN: gl.constexpr):
    """Return where keys start … start + BN lie, page · PAGE + place, a key a thread; else nothing.

    Only for pages that `bring` gathers. Keys that are nobody's are then copies of others.
    """
    if PAGE > 0 and PAGE < GATHER_BELOW:
        K: gl.constexpr = gl.DistributedLinearLayout(
            [],
            [[1], [2], [4], [8], [16 if BN == 128 else 0]],
            [[BN // 4], [BN // 2]],
            [],
            [BN],
        )
        token = start + gl.arange(0, BN, K)
        token = gl.maximum(gl.minimum(gl.maximum(token, first), length - 1), 0)
        return gl.load(table + token // PAGE) * PAGE + token % PAGE
    else:
        return start


@gluon.jit
def bring(
    rows,
    store,
    tile,
    stage,
    full,
    table,
    places,
    begin,
    head,
    heads,
    length,
    start,
    page_stride,
    token_stride,
    head_stride,
    PAGE: gl.constexpr,
    HND: gl.constexpr,
    BN: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Copy keys start … start + BN of one head into stage `stage` of `tile`, and signal `full`.

    By TMA from `rows`, a page or a part of one at a time; pages that are too small for it are
    gathered from `store` by all four warps, from the `places` that look_up found.
    """
    if PAGE > 0 and PAGE < GATHER_BELOW:
        # a warp's rows are those whose places its threads looked up
        L: gl.constexpr = gl.BlockedLayout([BN // 16, 8], [4, 8], [4, 1], [1, 0])
        page = places // PAGE
        inner = places % PAGE
        if WIDE:
            page = page.to(gl.int64)
        at = gl.convert_layout(page * page_stride + inner * token_stride, gl.SliceLayout(1, L))
        column = gl.arange(0, D, gl.SliceLayout(0, L))
        mine = store + head.to(gl.int64) * head_stride
        async_copy.async_copy_global_to_shared(
            tile.index(stage), mine + at[:, None] + column[None, :]
        )
        async_copy.mbarrier_arrive(full, increment_count=False)
    else:
        PANELS: gl.constexpr = D // 64
        ROWS: gl.constexpr = min(PAGE, BN) if PAGE > 0 else BN
        PARTS: gl.constexpr = BN // ROWS
        parts = tile._reinterpret(tile.dtype, [STAGES * PANELS * PARTS, ROWS, 64], rows.layout)
        mbarrier.expect(full, BN * D * 2)
        left = 0 if HND else head * D
        for part in gl.static_range(PARTS):
            token = start + part * ROWS
            if PAGE > 0:
                page = gl.load(table + gl.minimum(token, gl.maximum(length - 1, 0)) // PAGE)
                row = ((page * heads + head) if HND else page) * PAGE + token % PAGE
            else:
                row = begin + token
            for panel in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    rows,
                    [row, left + panel * 64],
                    full,
                    parts.index((stage * PANELS + panel) * PARTS + part),
                )


@gluon.jit
def scores(
    s,
    start,
    qi,
    m,
    total,
    length,
    prefix,
    whole_low,
    whole_high,
    scale,
    cap,
    window,
    tree,
    drafts,
    BN: gl.constexpr,
    CAP: gl.constexpr,
    SEES: gl.constexpr,
    WINDOW: gl.constexpr,
    LATE: gl.constexpr = True,
):
    """Return p of a block of scores, the new m and total, and by what the old ones shrink.

    Keys whole_low … whole_high are seen by every line, so that their blocks need no mask. LATE: the
    scale, which is positive, comes after the maximum: an operation a score less, a register more.
    """
    factor = scale * LOG2E
    if CAP:
        y = s * (scale / cap)
        square = y * y
        small = y * (1 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
        e = gl.exp2(gl.abs(y) * (-2 * 1.4426950408889634))
        large = (1 - e) / (1 + e)
        s = gl.where(gl.abs(y) < 0.1, small, gl.where(y < 0, -large, large))
        factor = cap * LOG2E
    if not LATE:
        s = s * factor
    if (start < whole_low) | (start + BN > whole_high):
        j = start + gl.arange(0, BN, gl.SliceLayout(0, s.type.layout))
        seen = (j < length)[None, :] & (qi >= 0)[:, None]
        if SEES == SEE_CAUSAL:
            seen = seen & (j[None, :] <= prefix + qi[:, None])
            if WINDOW:
                seen = seen & (j[None, :] > prefix + qi[:, None] - window)
        if SEES == SEE_TREE:
            draft = j - prefix
            inside = (qi < drafts)[:, None] & ((draft >= 0) & (draft < drafts))[None, :]
            bit = gl.load(tree + qi[:, None] * drafts + draft[None, :], mask=inside, other=0)
            seen = seen & ((draft < 0)[None, :] | (bit != 0))
        s = gl.where(seen, s, -float("inf"))
    if LATE:
        new = gl.maximum(m, gl.max(s, 1) * factor)
        base = gl.where(new == -float("inf"), 0.0, new)
        p = gl.exp2(s * factor - base[:, None])
    else:
        new = gl.maximum(m, gl.max(s, 1))
        base = gl.where(new == -float("inf"), 0.0, new)
        p = gl.exp2(s - base[:, None])
    shrink = gl.exp2(m - base)
    return p, new, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def clean(tile, stage, start, first, length, BN: gl.constexpr, D: gl.constexpr):
    """Zero the values of keys that are nobody's: they may hold NaN, and 0 times NaN is NaN."""
    if (start < first) | (start + BN > length):
        L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        N: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, 64], tile.dtype)
        panels = tile._reinterpret(tile.dtype, [tile.shape[0] * (D // 64), BN, 64], N)
        j = start + gl.arange(0, BN, gl.SliceLayout(1, L))
        kept = ((j >= first) & (j < length))[:, None]
        for i in gl.static_range(D // 64):
            panel = panels.index(stage * (D // 64) + i)
            panel.store(gl.where(kept, panel.load(L), 0.0).to(tile.dtype))
        hopper.fence_async_shared()
