"""Read pages of a quantised cache as numbers of 16 or 32 bits, K and V in one launch each."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache, Scale
from attn_core.ops.triton.kv import E2M1, E4M3, FORMATS, dense_bytes

_TILE = 2048  # numbers that a program reads


@triton.jit
def saturated(x, dtype: tl.constexpr):
    """Return float32 numbers in a dtype; in fp16, those beyond its range as ±65,504.

    FP8 may round a value of fp16 up to 65,536, beyond fp16.
    """
    if dtype == tl.float16:
        x = tl.where(x > 65504.0, 65504.0, x)
        x = tl.where(x < -65504.0, -65504.0, x)
    return x.to(dtype)


@triton.jit
def e4m3(bits):
    """Return the float32 numbers of e4m3 codes in int32; chips without float8 agree."""
    size = bits & 0x7F
    normal = ((size + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    x = tl.where(size < 8, size.to(tl.float32) * 2.0**-9, normal)
    x = tl.where(size == 0x7F, float("nan"), x)
    sign = (bits & 0x80) << 24  # as a bit: a minus makes 0 of -0
    return (x.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(code):
    """Return the float32 numbers of e2m1 codes, 0 to 15, in int32."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)  # of float16, whose exponents are 14 above
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 2.0**14


@triton.jit(do_not_specialize=["rows"])
def dequantize_pages(
    out, pages, pool, blocks, scale, rows, page_stride, token_stride, head_stride,
    blocks_page, blocks_token, blocks_head,
    DIM: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
    SCALE_IS_TENSOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write some columns of some rows, each a head of a token, to `out` [rows, DIM]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    head = row % HEADS
    token = row // HEADS
    page = tl.load(pages + token // PAGE, mask=row_mask, other=0).to(tl.int64)
    inner = token % PAGE
    offsets = page * page_stride + inner * token_stride + head * head_stride
    if SCALE_IS_TENSOR:
        scale = tl.load(scale)
    first = tl.program_id(1) * COLUMNS
    d = first + tl.arange(0, COLUMNS)
    tile = row_mask[:, None] & (d < DIM)[None, :]
    if FORMAT == E2M1:
        c = first // 2 + tl.arange(0, COLUMNS // 2)
        packed = row_mask[:, None] & (c < DIM // 2)[None, :]
        codes = tl.load(pool + offsets[:, None] + c[None, :], mask=packed, other=0).to(tl.int32)
        b = first // 16 + tl.arange(0, COLUMNS // 16)
        block_at = page * blocks_page + inner * blocks_token + head * blocks_head
        scaled = row_mask[:, None] & (b < DIM // 16)[None, :]
        block = tl.load(blocks + block_at[:, None] + b[None, :], mask=scaled, other=0)
        unit = e4m3(block.to(tl.int32)) * scale
        x = tl.join(_e2m1(codes & 15), _e2m1(codes >> 4))
        x = tl.reshape(x, (ROWS, COLUMNS // 16, 16)) * unit[:, :, None]
        x = tl.reshape(x, (ROWS, COLUMNS))
    else:
        bits = tl.load(pool + offsets[:, None] + d[None, :], mask=tile, other=0)
        if FORMAT == E4M3:
            x = e4m3(bits.to(tl.int32)) * scale
        else:  # e5m2 is the upper byte of a float16
            x = (bits.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32) * scale
    tl.store(out + row[:, None] * DIM + d[None, :], x.to(out.dtype.element_ty), mask=tile)


def read_pages(
    cache: LayerCache, pages: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Gather whole pages of an FP8 or FP4 cache, bit for bit what attn_core.ops.kv.read_pages does.

    pages: int of any shape S. Returns k [*S, page_size, Hkv, D] and v likewise, None for MLA, dense
    in `dtype`; only the payload of a NaN may differ. Never syncs. Raises UsageError for a pool
    whose last dimension has a stride other than 1.
    """
    k_blocks, v_blocks = cache.block_scales or (None, None)
    k = _read_side(cache, cache.k, k_blocks, cache.k_scale, pages, dtype)
    v = cache.v
    return k, None if v is None else _read_side(cache, v, v_blocks, cache.v_scale, pages, dtype)


def _read_side(
    cache: LayerCache,
    pool: Tensor,
    block_pool: Tensor | None,
    scale: Scale,
    pages: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    stores = [dense_bytes(x) for x in (pool, pool if block_pool is None else block_pool)]
    axes = (0, 2, 1) if cache.layout == "HND" else (0, 1, 2)  # page, token, head
    heads, dim = pool.shape[axes[2]], pool.shape[-1] * (1 if block_pool is None else 2)
    out = pool.new_empty((*pages.shape, cache.page_size, heads, dim), dtype=dtype)
    flat = pages.reshape(-1).contiguous()  # a part of one dimension stays strided
    rows = flat.shape[0] * cache.page_size * heads
    if not rows:
        return out
    columns = 128 if dim % 128 == 0 else min(64, triton.next_power_of_2(max(dim, 16)))
    tile = _TILE // columns
    dequantize_pages[(-(-rows // tile), -(-dim // columns))](
        out, flat, *stores, scale, rows,
        *(x.stride(axis) for x in stores for axis in axes),
        dim, heads, cache.page_size, FORMATS[pool.dtype],
        isinstance(scale, Tensor), tile, columns,
    )  # fmt: skip
    return out
