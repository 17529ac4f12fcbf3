"""What the Hopper kernels share: their constants, and how keys and values reach shared memory."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name in Triton 3.6


class Sizes(NamedTuple):
    """Numbers that change from pass to pass; a kernel takes each as an argument of its own.

    (Triton specialises the numbers of a tuple, whatever do_not_specialize says.) batch: requests.
    window: tokens that a query sees. drafts: n of the tree's mask [n, n]. table_stride: of a row of
    the page table. heads_at_once: KV heads whose tiles take turns, a divisor of HEADS.
    """

    batch: Any
    window: Any
    drafts: Any
    table_stride: Any
    heads_at_once: Any


class AttentionConfig(NamedTuple):
    """Constants of a kernel.

    HEADS: KV heads. GROUP: query heads of one KV head. PAGE: tokens of a page, 0 without pages.
    HND: whether a page holds one head after the other. GATHERS: whether threads copy the keys,
    since TMA cannot. BN: keys of a block. D: the head dim. MASK: 0, MASK_CAUSAL or MASK_TREE.
    WINDOW: whether there is one. STAGES: blocks in shared memory. INT64_OFFSETS: whether
    offsets into a store need 64 bits. Of kernels with cut keys: ROW_BLOCKS, blocks of TILE_ROWS
    that a sequence has at most; BLOCKS_PER_UNIT, blocks of keys that no two programs share;
    BATCH_INVARIANT, whether each unit has a state of its own; MIN_UNITS of a program; SHARED,
    whether requests read keys together; TILE_UNITS, PLANNED_QUOTA and HEADS_AT_ONCE, see Split;
    TILE_ROWS, 128 where two groups of warps share a tile. COPY_ROWS: keys that TMA copies at a time
    at most. CUT_TILES: whether keys of tiles of prompts may be cut. SELDOM: whether old sums seldom
    shrink, in prompts and in tiles of 128 rows.
    """

    HEADS: int
    GROUP: int
    PAGE: int
    HND: bool
    GATHERS: bool
    BN: int
    D: int
    USE_SOFTCAP: bool
    USE_SINKS: bool
    MASK: int
    WINDOW: bool
    STAGES: int
    INT64_OFFSETS: bool
    ROW_BLOCKS: int = 1
    BLOCKS_PER_UNIT: int = 1
    BATCH_INVARIANT: bool = False
    MIN_UNITS: int = 1
    SHARED: bool = False
    TILE_UNITS: int = 0
    PLANNED_QUOTA: bool = False
    HEADS_AT_ONCE: int = 1
    TILE_ROWS: int = 64
    COPY_ROWS: int = 128
    CUT_TILES: bool = False
    SELDOM: bool = True


@gluon.jit
def find_seq_idx(indptr, batch, index, SCALE: gl.constexpr):
    """Return the last sequence with indptr[sequence] · SCALE <= index."""
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(indptr + middle) * SCALE <= index:
            low = middle
        else:
            high = middle
    return low


@gluon.jit
def row_offsets(x, q_start, head, rows, GROUP: gl.constexpr):
    """Return where rows of a KV head, (query, head of its group) pairs, lie in x [T, Hq, D]."""
    offsets = (q_start + rows // GROUP).to(gl.int64) * x.token_stride
    offsets += (head * GROUP + rows % GROUP).to(gl.int64) * x.head_stride
    return offsets


@gluon.jit
def lookup_slots(page_table, first_key, seq_len, start, CONFIG: gl.constexpr):
    """Return the slots, page · PAGE + token, of keys start … start + BN: one key a thread.

    Only for pages that gather_kv_tile gathers. Keys that are nobody's are then copies of others.
    """
    if CONFIG.GATHERS:
        BN: gl.constexpr = CONFIG.BN
        K: gl.constexpr = gl.DistributedLinearLayout(
            [],
            [[1], [2], [4], [8], [16 if BN == 128 else 0]],
            [[BN // 4], [BN // 2]],
            [],
            [BN],
        )
        token = start + gl.arange(0, BN, K)
        token = gl.maximum(gl.minimum(gl.maximum(token, first_key), seq_len - 1), 0)
        return gl.load(page_table + token // CONFIG.PAGE) * CONFIG.PAGE + token % CONFIG.PAGE
    else:
        return start


@gluon.jit
def gather_kv_tile(channel, step, store, slots, head, CONFIG: gl.constexpr):
    """Copy a block of keys of one head into the channel's tile of a step, by all four warps.

    slots: see lookup_slots.
    """
    BN: gl.constexpr = CONFIG.BN
    # a warp's rows are those whose slots its threads looked up
    L: gl.constexpr = gl.BlockedLayout([BN // 16, 8], [4, 8], [4, 1], [1, 0])
    page = slots // CONFIG.PAGE
    token = slots % CONFIG.PAGE
    if CONFIG.INT64_OFFSETS:
        page = page.to(gl.int64)
    offsets = page * store.page_stride + token * store.token_stride
    offsets = gl.convert_layout(offsets, gl.SliceLayout(1, L))
    columns = gl.arange(0, CONFIG.D, gl.SliceLayout(0, L))
    head_ptr = store.ptr + head.to(gl.int64) * store.head_stride
    stage = channel.stage(step)
    async_copy.async_copy_global_to_shared(
        channel.tile.index(stage), head_ptr + offsets[:, None] + columns[None, :]
    )
    async_copy.mbarrier_arrive(channel.full.index(stage), increment_count=False)


@gluon.jit
def load_kv_tile(
    channel,
    step,
    kv_rows,
    store,
    page_table,
    slots,
    kv_start,
    head,
    seq_len,
    start,
    CONFIG: gl.constexpr,
):
    """Copy keys start … start + BN of one head into the channel's tile of a step.

    TMA copies from kv_rows, a page or a part of one at a time. Pages that are too small for it are
    gathered from the store by all four warps, from the slots that lookup_slots found. kv_start:
    the first row of the sequence where there are no pages.
    """
    if CONFIG.GATHERS:
        gather_kv_tile(channel, step, store, slots, head, CONFIG)
    else:
        BN: gl.constexpr = CONFIG.BN
        D: gl.constexpr = CONFIG.D
        PAGE: gl.constexpr = CONFIG.PAGE
        stage = channel.stage(step)
        full = channel.full.index(stage)
        PANELS: gl.constexpr = D // 64
        ROWS: gl.constexpr = min(PAGE, BN) if PAGE > 0 else BN
        COPIES: gl.constexpr = BN // ROWS
        panels = channel.tile._reinterpret(
            channel.tile.dtype, [channel.STAGES * PANELS * COPIES, ROWS, 64], kv_rows.layout
        )
        mbarrier.expect(full, BN * D * 2)
        first_column = 0 if CONFIG.HND else head * D
        for copy in gl.static_range(COPIES):
            token = start + copy * ROWS
            if PAGE > 0:
                last = gl.maximum(seq_len - 1, 0)
                if copy * ROWS % PAGE == 0:
                    page = gl.load(page_table + gl.minimum(token, last) // PAGE)
                row = ((page * CONFIG.HEADS + head) if CONFIG.HND else page) * PAGE + token % PAGE
            else:
                row = kv_start + token
            for panel in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    kv_rows,
                    [row, first_column + panel * 64],
                    full,
                    panels.index((stage * PANELS + panel) * COPIES + copy),
                )


@gluon.jit
def zero_tail(tile, stage, start, first_key, seq_len, BN: gl.constexpr, D: gl.constexpr):
    """Zero the values of keys that are nobody's: they may hold NaN, and 0 times NaN is NaN."""
    if (start < first_key) | (start + BN > seq_len):
        L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        N: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, 64], tile.dtype)
        panels = tile._reinterpret(tile.dtype, [tile.shape[0] * (D // 64), BN, 64], N)
        for i in gl.static_range(D // 64):
            for row in gl.static_range(0, BN, 32):  # few registers are left for more at a time
                j = start + row + gl.arange(0, 32, gl.SliceLayout(1, L))
                valid = ((j >= first_key) & (j < seq_len))[:, None]
                part = panels.index(stage * (D // 64) + i).slice(row, 32)
                part.store(gl.where(valid, part.load(L), 0.0).to(tile.dtype))
        hopper.fence_async_shared()
        barrier()  # here, so that where nothing is zeroed no thread waits for the others
