"""What absorbed MLA decode for Hopper holds in shared memory, and how TMA brings it there."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says, and
# a tuple may grow.
# No `from __future__ import annotations`: an aggregate checks its fields by these annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attn_core.backends.triton.hopper.channel import aggregate
from attn_core.backends.triton.hopper.program_work import prefetch_for_merge, program_work
from attn_core.backends.triton.hopper.split_kv import item_pages, next_block, split_item

# Columns of a latent: LOW and MIDDLE, 256 + 128, then 128 of the high ones, then the rotary ones.
MIDDLE = gl.constexpr(256)
HIGH = gl.constexpr(384)
ROPE = gl.constexpr(512)
GATHER_WARPS = gl.constexpr(4)  # that copy single tokens, which TMA cannot


@aggregate
class LatentTile:
    """Blocks of 64 rows: columns LOW and MIDDLE, 256 and 128 wide, and the 64 rotary ones.

    When a block has been scored, its weights replace the rotary columns.
    """

    low: gl.shared_memory_descriptor
    middle: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, low, middle, rope):
        self.low = low
        self.middle = middle
        self.rope = rope


@aggregate
class QueryTile:
    """The high and the rotary columns of 64 queries."""

    high: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, high, rope):
        self.high = high
        self.rope = rope


@gluon.jit
def alloc_columns(dtype: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr):
    """Allocate STAGES blocks of 64 rows."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [STAGES, 64, COLUMNS], LAYOUT)


@gluon.jit
def alloc_factors(STAGES: gl.constexpr):
    """Allocate STAGES times a float32 of each row."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.float32, [STAGES, 64], LAYOUT)


@gluon.jit
def load_columns(
    tma_rows, row, tile, stage, full, FIRST: gl.constexpr, copy: gl.constexpr, COPIES: gl.constexpr
):
    """Copy rows from `row` on, columns FIRST …, into one of COPIES parts of a block of a tile."""
    PANELS: gl.constexpr = tile.shape[2] // 64
    SHAPE: gl.constexpr = [tile.shape[0] * PANELS * COPIES, 64 // COPIES, 64]
    parts = tile._reinterpret(tile.dtype, SHAPE, tma_rows.layout)
    for panel in gl.static_range(PANELS):
        tma.async_copy_global_to_shared(
            tma_rows,
            [row, FIRST + panel * 64],
            full,
            parts.index((stage * PANELS + panel) * COPIES + copy),
        )


@gluon.jit
def load_first_queries(latents, q_rows, row, step):
    """Copy the low and the middle columns of queries as the latents of a step of their own."""
    latents.wait_free(step)
    stage = latents.stage(step)
    full = latents.full.index(stage)
    mbarrier.expect(full, 64 * (256 + 128) * 2)
    load_columns(q_rows, row, latents.tile.low, stage, full, 0, 0, 1)
    load_columns(q_rows, row, latents.tile.middle, stage, full, MIDDLE, 0, 1)


@gluon.jit
def load_other_queries(queries, q_rows, row, iteration):
    """Copy the other columns of queries, when those before them have been multiplied."""
    queries.wait_free(iteration)
    full = queries.full.index(0)
    mbarrier.expect(full, 64 * (128 + 64) * 2)
    load_columns(q_rows, row, queries.tile.high, 0, full, HIGH, 0, 1)
    load_columns(q_rows, row, queries.tile.rope, 0, full, ROPE, 0, 1)


@gluon.jit
def load_block(latents, high, k_rows, rows, step, block):
    """Copy a block of latents. rows: where each part of it begins."""
    COPIES: gl.constexpr = len(rows)
    latents.wait_free(step)
    stage = latents.stage(step)
    full = latents.full.index(stage)
    mbarrier.expect(full, 64 * (256 + 128 + 64) * 2)
    for copy in gl.static_range(COPIES):
        row = rows[copy]
        load_columns(k_rows, row, latents.tile.rope, stage, full, ROPE, copy, COPIES)
        load_columns(k_rows, row, latents.tile.middle, stage, full, MIDDLE, copy, COPIES)
        load_columns(k_rows, row, latents.tile.low, stage, full, 0, copy, COPIES)
    high.wait_free(block)
    stage = high.stage(block)
    full = high.full.index(stage)
    mbarrier.expect(full, 64 * 128 * 2)
    for copy in gl.static_range(COPIES):
        load_columns(k_rows, rows[copy], high.tile, stage, full, HIGH, copy, COPIES)


@gluon.jit
def gather_columns(rows, tile, stage, FIRST: gl.constexpr, L: gl.constexpr):
    """Copy the columns FIRST … of 64 rows that pointers [64] lead to."""
    columns = FIRST + gl.arange(0, tile.shape[2], gl.SliceLayout(0, L))
    async_copy.async_copy_global_to_shared(tile.index(stage), rows[:, None] + columns[None, :])


@gluon.jit
def gather_block(latents, high, rows, step, block, L: gl.constexpr):
    """Copy a block of latents whose rows pointers [64] lead to."""
    latents.wait_free(step)
    stage = latents.stage(step)
    full = latents.full.index(stage)
    gather_columns(rows, latents.tile.rope, stage, ROPE, L)
    gather_columns(rows, latents.tile.middle, stage, MIDDLE, L)
    gather_columns(rows, latents.tile.low, stage, 0, L)
    async_copy.mbarrier_arrive(full, increment_count=False)
    mbarrier.arrive(full, count=1)  # in place of that of the queries' copies
    high.wait_free(block)
    stage = high.stage(block)
    gather_columns(rows, high.tile, stage, HIGH, L)
    async_copy.mbarrier_arrive(high.full.index(stage), increment_count=False)


@gluon.jit
def lookup_rows(store, slots, block, count, L: gl.constexpr):
    """Return pointers to the rows of a block of slots; behind the last slot they lead to it."""
    offsets = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
    slot = gl.load(slots + gl.maximum(gl.minimum(offsets, count - 1), 0))
    return store.ptr + gl.maximum(slot, 0).to(gl.int64) * store.token_stride


@gluon.jit
def gather_latents(
    queries, latents, high, q_rows, store, requests, plan, sizes, CONFIG: gl.constexpr
):
    """Bring what load_latents brings, of pages of one token: page tables hold slots."""
    ROWS: gl.constexpr = 64 // (4 * GATHER_WARPS)
    L: gl.constexpr = gl.BlockedLayout([ROWS, 8], [4, 8], [GATHER_WARPS, 1], [1, 0])
    work = program_work(plan, sizes, CONFIG)
    prefetch_for_merge(work, sizes, CONFIG)
    step = 0
    block = 0
    iteration = 0
    seq = work.seq
    next_unit = work.start
    while next_unit < work.last:
        item = split_item(work, seq, next_unit, requests, sizes, CONFIG)
        seq = item.seq
        slots = requests.page_table + seq.to(gl.int64) * sizes.table_stride
        last = item.first_block + item.num_blocks - 1
        rows = lookup_rows(store, slots, last, item.seq_len, L)
        q_row = item.q_start * CONFIG.GROUP + work.row_block * 64
        load_first_queries(latents, q_rows, q_row, step)
        load_other_queries(queries, q_rows, q_row, iteration)
        async_copy.mbarrier_arrive(latents.full.index(latents.stage(step)), increment_count=False)
        step += 1
        for i in range(0, item.num_blocks):
            following = lookup_rows(store, slots, gl.maximum(last - i - 1, 0), item.seq_len, L)
            gather_block(latents, high, rows, step, block, L)
            rows = following
            step += 1
            block += 1
        next_unit = item.next_unit
        iteration += 1


@gluon.jit
def find_rows(pages, block, seq_len, CONFIG: gl.constexpr):
    """Return where the parts of a block of keys begin, in one page each."""
    ROWS: gl.constexpr = min(CONFIG.PAGE, 64)
    rows = ()
    for copy in gl.static_range(64 // ROWS):
        token = block * 64 + copy * ROWS
        page = gl.load(pages + gl.maximum(gl.minimum(token, seq_len - 1), 0) // CONFIG.PAGE)
        row = page * CONFIG.PAGE + token % CONFIG.PAGE
        rows = rows + (row,)  # noqa: RUF005  # Triton unpacks no tuple in a tuple
    return rows


@gluon.jit
def load_latents(
    queries, latents, high, q_rows, k_rows, requests, plan, sizes, CONFIG: gl.constexpr
):  # fmt: skip
    """Bring the queries and then the latents of each item, in the order of next_block.

    The page of a block is looked up while the block before it is brought. Queries that wait for the
    end of the item before come after its first block; the first item's do not wait, and come first,
    since scores begin with their rotary columns.
    """
    work = program_work(plan, sizes, CONFIG)
    prefetch_for_merge(work, sizes, CONFIG)
    step = 0
    block = 0
    iteration = 0
    seq = work.seq
    next_unit = work.start
    while next_unit < work.last:
        item = split_item(work, seq, next_unit, requests, sizes, CONFIG)
        seq = item.seq
        first_pages, pages = item_pages(work, next_unit, item, requests, sizes, CONFIG)
        q_row = item.q_start * CONFIG.GROUP + item.row_block * 64
        key_block = item.begin_block
        if iteration == 0:
            load_other_queries(queries, q_rows, q_row, iteration)
        load_first_queries(latents, q_rows, q_row, step)
        rows = find_rows(first_pages, key_block, item.seq_len, CONFIG)
        step += 1
        for i in range(0, gl.maximum(item.num_blocks, 1)):
            if i < item.num_blocks:
                key_block = next_block(item, key_block, CONFIG)
                following = find_rows(pages, gl.maximum(key_block, 0), item.seq_len, CONFIG)
                load_block(latents, high, k_rows, rows, step, block)
                rows = following
                step += 1
                block += 1
            if (i == 0) & (iteration > 0):
                load_other_queries(queries, q_rows, q_row, iteration)
        next_unit = item.next_unit
        iteration += 1
