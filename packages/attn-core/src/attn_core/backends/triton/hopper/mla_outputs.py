"""How absorbed MLA decode for Hopper stores outputs and partials, some columns at a time."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from attn_core.backends.triton.hopper.common import row_offsets
from attn_core.backends.triton.hopper.partials import is_final, partial_rows, state_place


@gluon.jit
def item_rows(L: gl.constexpr, CONFIG: gl.constexpr):
    """Return int32 0 … 63, the rows of a tile, so that nothing is known of them before an item.

    Else the addresses of all branches are computed before the loop over items, and spill.
    """
    rows = gl.arange(0, 64, gl.SliceLayout(1, L))
    if not (CONFIG.GATHERS or CONFIG.SHARED):
        rows = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [rows], dtype=gl.int32, is_pure=False, pack=1
        )
    return rows


@gluon.jit
def store_rows(acc, place, out, item, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Store dense outputs, columns FIRST …, by way of `place` in shared memory.

    A warp then stores whole rows. Half a sector of memory is written as slowly as a whole.
    """
    COLUMNS: gl.constexpr = acc.shape[1]
    LANES: gl.constexpr = COLUMNS // 8  # of a row
    R: gl.constexpr = gl.BlockedLayout([LANES // 2, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows = item_rows(R, CONFIG)
    columns = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, R))
    first_row = item.row_block * 64
    mask = (rows < item.q_len * CONFIG.GROUP - first_row)[:, None] & (columns >= 0)[None, :]
    start = out.ptr + (item.q_start * CONFIG.GROUP + first_row).to(gl.int64) * 512
    place.store(acc.to(place.dtype))
    gl.store(start + rows[:, None] * 512 + columns[None, :], place.load(R), mask=mask)
    hopper.fence_async_shared()  # TMA writes there next


@gluon.jit
def store_strided(acc, out, item, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Store outputs, columns FIRST …, as their threads have them."""
    L: gl.constexpr = acc.type.layout
    rows = item.row_block * 64 + item_rows(L, CONFIG)
    columns = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, L))
    mask = (rows < item.q_len * CONFIG.GROUP)[:, None] & (columns >= 0)[None, :]
    offsets = row_offsets(out, item.q_start, 0, rows, CONFIG.GROUP)
    result = acc.to(out.ptr.dtype.element_ty)
    gl.store(out.ptr + offsets[:, None] + columns[None, :], result, mask=mask)


@gluon.jit
def store_partial(acc, partial, work, unit, item, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Store an item's partial state, columns FIRST …."""
    L: gl.constexpr = acc.type.layout
    rows = item_rows(L, CONFIG)
    columns = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, L))
    row_mask = item.row_block * 64 + rows < item.q_len * CONFIG.GROUP
    place = state_place(work, unit, item, CONFIG)
    offsets = partial_rows(place, item, rows, CONFIG) * 512
    ptrs = partial.out + offsets[:, None] + columns[None, :]
    gl.store(ptrs, acc, mask=row_mask[:, None] & (columns >= 0)[None, :])


@gluon.jit
def store_columns(
    acc, factor, place, out, partial, work, unit, item, FIRST: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Store acc · factor, columns FIRST … of outputs or of an item's partial state.

    place: a tile of as many columns in shared memory that is free where the item has keys.
    """
    L: gl.constexpr = acc.type.layout
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, L))[:, None]
    if is_final(item, CONFIG):
        if CONFIG.GATHERS or CONFIG.SHARED:  # which need the registers
            store_strided(acc, out, item, FIRST, CONFIG)
        else:
            dense = (out.head_stride == 512) & (out.token_stride == CONFIG.GROUP * 512)
            if dense & (item.num_blocks > 0):
                store_rows(acc, place, out, item, FIRST, CONFIG)
            else:
                store_strided(acc, out, item, FIRST, CONFIG)
    else:
        store_partial(acc, partial, work, unit, item, FIRST, CONFIG)
