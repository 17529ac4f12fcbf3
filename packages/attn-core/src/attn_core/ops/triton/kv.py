"""Write new K and V into the pages of a cache, quantised as it stores them, in one launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import UsageError
from attn_core.ops.triton.launcher import Grid, Launcher, alike, moved, pointers
from attn_core.ops.write_checks import check_write, head_dims

_TILE = 2048  # numbers that a program writes
_COLUMNS = 128  # of a head, at most: 576 are five times as many
PLAIN = tl.constexpr(0)
E4M3 = tl.constexpr(1)
E5M2 = tl.constexpr(2)
E2M1 = tl.constexpr(3)
FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.uint8: 3}


@triton.jit
def fp8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr):
    """Return float32 `x`, clamped to ±TOP and rounded to even, as the bits of a float8 in int32.

    MANTISSA: its bits. BIAS: of its exponent. In integers, so that chips without float8 agree.
    """
    size = tl.minimum(tl.abs(x), TOP)
    bits = size.to(tl.int32, bitcast=True)
    DROP: tl.constexpr = 23 - MANTISSA
    to_even = (1 << (DROP - 1)) - 1 + ((bits >> DROP) & 1)
    normal = ((bits + to_even) >> DROP) - ((127 - BIAS) << MANTISSA)
    # float32 numbers beside this one are as far apart as the smallest of float8
    EXPONENT: tl.constexpr = 24 - BIAS - MANTISSA
    small = (size + 2.0**EXPONENT).to(tl.int32, bitcast=True) - ((127 + EXPONENT) << 23)
    code = tl.where(bits < ((128 - BIAS) << 23), small, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(x == x, code, 0x7F) | sign


@triton.jit
def _fp4_codes(y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return codes [ROWS, COLUMNS / 2], low nibble first, and e4m3 bits [ROWS, COLUMNS / 16]."""
    y = tl.reshape(y, (ROWS, COLUMNS // 16, 16))
    size = tl.abs(y)
    broken = tl.max((size != size).to(tl.int32), 2) > 0
    top = tl.div_rn(tl.max(size, 2), 6.0)
    block = fp8_bits(tl.where(broken, float("nan"), top), 3, 7, 448.0)
    normal = ((block + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    unit = tl.where(block < 8, block.to(tl.float32) * 2.0**-9, normal)
    unit = tl.where(block == 0, 1.0, unit)[:, :, None]
    # Between two codes the even one is taken: the first of 0.25, the second of 0.75, … Rounded
    # quotients compare to these as numbers do to their products, since a unit has four bits.
    code = (size > 0.25 * unit).to(tl.int32) + (size >= 0.75 * unit).to(tl.int32)
    code += (size > 1.25 * unit).to(tl.int32) + (size >= 1.75 * unit).to(tl.int32)
    code += (size > 2.5 * unit).to(tl.int32) + (size >= 3.5 * unit).to(tl.int32)
    code += (size > 5.0 * unit).to(tl.int32)
    negative = y * 2.0**100 < unit * -(2.0**-50)  # and the quotient is not rounded to 0
    code = tl.where(broken[:, :, None], 0, code | (negative.to(tl.int32) << 3))
    low, high = tl.split(tl.reshape(code, (ROWS, COLUMNS // 2, 2)))
    return low | (high << 4), block


class Side(NamedTuple):
    """What the kernel is compiled for of K or V: the columns and where the pool has them.

    dim: columns, 0 without V. page, token, head: strides of the pool. blocks_page, blocks_token,
    blocks_head: those of the scales of FP4.
    """

    dim: int
    scale_is_tensor: bool
    page: int
    token: int
    head: int
    blocks_page: int
    blocks_token: int
    blocks_head: int


@triton.jit
def write_side(
    values, pool, blocks, slots, scale, rows, slots_token, values_token, values_head, values_dim,
    SIDE: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    token = row // HEADS
    head = row % HEADS
    slot = tl.load(slots + token * slots_token, mask=row_mask, other=-1)
    row_mask &= slot >= 0  # -1 is padding
    page = slot // PAGE
    inner = slot % PAGE
    pool += (page * SIDE.page + inner * SIDE.token + head * SIDE.head)[:, None]
    first = tl.program_id(1) * COLUMNS
    d = first + tl.arange(0, COLUMNS)
    tile = row_mask[:, None] & (d < SIDE.dim)[None, :]
    values += (token * values_token + head * values_head)[:, None] + d[None, :] * values_dim
    x = tl.load(values, mask=tile, other=0.0)
    if FORMAT == PLAIN:
        tl.store(pool + d[None, :], x.to(pool.dtype.element_ty), mask=tile)
    else:
        if SIDE.scale_is_tensor:
            scale = tl.load(scale)
        y = tl.div_rn(x.to(tl.float32), scale)
        if FORMAT == E4M3:
            tl.store(pool + d[None, :], fp8_bits(y, 3, 7, 448.0).to(tl.uint8), mask=tile)
        if FORMAT == E5M2:
            tl.store(pool + d[None, :], fp8_bits(y, 2, 15, 57344.0).to(tl.uint8), mask=tile)
        if FORMAT == E2M1:
            codes, block = _fp4_codes(y, ROWS, COLUMNS)
            d = first // 2 + tl.arange(0, COLUMNS // 2)
            tile = row_mask[:, None] & (d < SIDE.dim // 2)[None, :]
            tl.store(pool + d[None, :], codes.to(tl.uint8), mask=tile)
            d = first // 16 + tl.arange(0, COLUMNS // 16)
            tile = row_mask[:, None] & (d < SIDE.dim // 16)[None, :]
            block_offsets = (
                page * SIDE.blocks_page + inner * SIDE.blocks_token + head * SIDE.blocks_head
            )
            tl.store(blocks + block_offsets[:, None] + d[None, :], block.to(tl.uint8), mask=tile)


@triton.jit(do_not_specialize=["rows"])
def _write(
    k, v, slots, rows, k_pool, v_pool, k_blocks, v_blocks, k_scale, v_scale, slots_token,
    k_token, k_head, k_dim, v_token, v_head, v_dim,
    K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(2) == 0:
        write_side(
            k, k_pool, k_blocks, slots, k_scale, rows, slots_token, k_token, k_head, k_dim,
            K, HEADS, PAGE, FORMAT, ROWS, COLUMNS,
        )  # fmt: skip
    elif V.dim > 0:
        write_side(
            v, v_pool, v_blocks, slots, v_scale, rows, slots_token, v_token, v_head, v_dim,
            V, HEADS, PAGE, FORMAT, ROWS, COLUMNS,
        )  # fmt: skip


def write_kv(cache: LayerCache, k: Tensor, v: Tensor | None, slots: Tensor, form: int = -1) -> None:
    """Write new K and V into token slots, bit for bit what attn_core.ops.kv.write_kv writes.

    k [N, Hkv, D], v [N, Hkv, Dv] (None for MLA) of any strides, slots int64 [N], -1 for padding;
    pools of any strides but that of the last dimension, 1. One launch; allocates nothing and never
    syncs. Raises UsageError for shapes that do not fit.
    form: see attn_core.ops.kv.write_kv.
    """
    k_ptr, slots_ptr = k.data_ptr(), slots.data_ptr()
    v_ptr, v_or_k, v_key, v_shape = k_ptr, k, None, None
    if v is not None:
        v_ptr, v_or_k, v_shape = v.data_ptr(), v, v.shape
        v_key = (alike(v, v_ptr), v.stride())
    key = (alike(k, k_ptr), k.stride(), v_key, alike(slots, slots_ptr), slots.stride())
    writer = cache.launchers.get(key)
    if writer is None or moved(writer.pointers):
        writer = cache.launchers[key] = _Writer(cache, k, v, slots)
    last, grid, rows = writer.work
    if (slots.shape, k.shape, v_shape) != last:
        grid, rows = writer.plan(cache, k, v, slots)
    if form >= 0 and not (k_ptr | v_ptr | slots_ptr) % 16:
        cache.launchers[form] = writer.again
    writer.launcher.launch(grid, (k_ptr, v_ptr, slots_ptr, rows), (k, v_or_k, slots, rows))


class _Writer:
    """Writes new K and V of one dtype, with these strides, into one cache.

    pointers: where its tensors lie.
    work: the shapes of slots, K and V that were found to fit last, their grid and their rows.
    """

    def __init__(self, cache: LayerCache, k: Tensor, v: Tensor | None, slots: Tensor) -> None:
        check_write(cache, k, v, slots)  # before anything is compiled for them
        k_blocks, v_blocks = cache.block_scales or (None, None)
        tensors = [cache.k, cache.k if cache.v is None else cache.v]
        blocks = [x if y is None else y for x, y in zip(tensors, (k_blocks, v_blocks), strict=True)]
        scales = (cache.k_scale, cache.v_scale)
        tensors_read = (cache.k, cache.v, k_blocks, v_blocks, *scales)
        self.pointers = pointers(*(x for x in tensors_read if isinstance(x, Tensor)))
        self.work: tuple[tuple[Any, ...], Grid, int] = ((), (0, 0, 0), 0)
        pools = [dense_bytes(x) for x in (*tensors, *blocks)]
        axes = (0, 2, 1) if cache.layout == "HND" else (0, 1, 2)  # page, token, head
        strides = [[x.stride(axis) for axis in axes] for x in pools]
        heads, *dims = head_dims(cache)
        widest, v_or_k = max(dims), k if v is None else v
        columns = min(_COLUMNS, triton.next_power_of_2(max(widest, 16)))
        self._heads, self._rows = heads, _TILE // columns
        self._columns, self._sides = -(-widest // columns), 1 if v is None else 2
        self.launcher = Launcher(
            _write,
            *(*pools, *scales, slots.stride(0), *k.stride(), *v_or_k.stride()),
            *(
                Side(dim, isinstance(scale, Tensor), *strides[i], *strides[i + 2])
                for i, (dim, scale) in enumerate(zip(dims, scales, strict=True))
            ),
            *(heads, cache.page_size, FORMATS.get(cache.k.dtype, 0), self._rows, columns),
        )

    def again(self, k: Tensor, v: Tensor | None, slots: Tensor, tokens: int) -> bool:
        """Write tensors of one form, as many tokens; False: they or the cache lie elsewhere."""
        at_k, at_slots = k.data_ptr(), slots.data_ptr()
        at_v = at_k if v is None else v.data_ptr()
        if (at_k | at_v | at_slots) % 16 or moved(self.pointers):
            return False
        rows = tokens * self._heads
        grid = (-(-rows // self._rows), self._columns, self._sides)
        args = (at_k, at_v, at_slots, rows)
        self.launcher.launch(grid, args, lambda: (k, k if v is None else v, slots, rows))
        return True

    def plan(
        self, cache: LayerCache, k: Tensor, v: Tensor | None, slots: Tensor
    ) -> tuple[Grid, int]:
        """Return the grid and the rows of these; the kernel reads and writes by them alone.

        Raises UsageError for shapes that do not fit.
        """
        check_write(cache, k, v, slots)
        rows = slots.shape[0] * k.shape[1]
        grid = (-(-rows // self._rows), self._columns, self._sides)
        self.work = ((slots.shape, k.shape, None if v is None else v.shape), grid, rows)
        return grid, rows


def dense_bytes(pool: Tensor) -> Tensor:
    """View a store as bytes where a number of it is one. Raises UsageError for gaps."""
    if pool.stride(-1) != 1:
        raise UsageError(f"a pool with stride {pool.stride(-1)} in its last dimension (supports 1)")
    return pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
