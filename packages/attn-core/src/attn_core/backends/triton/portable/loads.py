"""Device functions that find a request and load its rows, keys and values."""


# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.portable.arguments import KVCache, Store, Tile
from attn_core.backends.triton.portable.fp4 import interleaved, load_fp4, quarters


@triton.jit
def find_seq_idx(cu, batch, item, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the last b < batch with cu[b] · SCALE // BLOCK + b <= item, by binary search.

    BLOCK 0: with cu[b] · SCALE <= item. cu never falls, so that of equal entries the last one is
    found: requests without work are passed over.
    """
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(cu + middle) * SCALE
        if BLOCK > 0:
            start = start // BLOCK + middle
        if start <= item:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def at_head(cache, head, begin, PAGE: tl.constexpr):
    """Return the stores at one KV head. PAGE 0: and at the request whose first key is `begin`."""
    k, v, k_scales, v_scales = cache
    k_off = head.to(tl.int64) * k.head_stride
    v_off = head.to(tl.int64) * v.head_stride
    if PAGE == 0:
        k_off += begin.to(tl.int64) * k.token_stride
        v_off += begin.to(tl.int64) * v.token_stride
    k_scales_ptr = k_scales.ptr + head.to(tl.int64) * k_scales.head_stride
    v_scales_ptr = v_scales.ptr + head.to(tl.int64) * v_scales.head_stride
    return KVCache(
        Store(k.ptr + k_off, k.page_stride, k.token_stride, k.head_stride),
        Store(v.ptr + v_off, v.page_stride, v.token_stride, v.head_stride),
        Store(k_scales_ptr, k_scales.page_stride, k_scales.token_stride, k_scales.head_stride),
        Store(v_scales_ptr, v_scales.page_stride, v_scales.token_stride, v_scales.head_stride),
    )


@triton.jit
def load_tile(q, row, query, queries, head, C: tl.constexpr):
    """Load the rows `row` int32 [BM] of a KV head of a request as a Tile.

    query, queries: its first query in the batch, and how many it has.
    """
    qi = row // C.GROUP
    row_mask = qi < queries
    token = (query + qi).to(tl.int64)
    q_head = (head * C.GROUP + row % C.GROUP).to(tl.int64)
    offsets = token * q.token_stride + q_head * q.head_stride
    d1 = tl.arange(0, C.D1)
    in_q1 = row_mask[:, None] & (d1 < C.D)[None, :]
    q1 = tl.load(q.ptr + offsets[:, None] + d1[None, :], mask=in_q1, other=0.0)
    q2 = q1
    if C.D2 > 0:
        d2 = C.D1 + tl.arange(0, C.D2)
        in_q2 = row_mask[:, None] & (d2 < C.D)[None, :]
        q2 = tl.load(q.ptr + offsets[:, None] + d2[None, :], mask=in_q2, other=0.0)
    unit = tl.full(row.shape, 1.0, tl.float32)
    if C.SCALE_QUERIES:
        q1, q2, unit = scaled_queries(q1, q2, C)
    if C.KEY_PARTS == 4:
        parts1 = quarters(q1)
        parts2 = parts1
        if C.D2 > 0:
            parts2 = quarters(q2)
        return Tile(parts1, parts2, qi, row_mask, token, q_head, unit)
    else:
        return Tile(q1, q2, qi, row_mask, token, q_head, unit)


@triton.jit
def scaled_queries(q1, q2, C: tl.constexpr):
    """Return queries in bf16 as fp16, and the unit float32 [BM] of each row.

    They meet keys in FP8 or FP4: fp16 holds every one of these numbers, and few instructions
    convert to it, but bf16 has larger numbers and smaller ones. Times a power of two, which is
    exact, the largest of a row is between 2**14 and 2**15, or below where that power were above
    2**24: times the scale of a layer its inverse has to stay above 0.
    """
    top = tl.max(tl.abs(q1.to(tl.float32)), 1)
    if C.D2 > 0:
        top = tl.maximum(top, tl.max(tl.abs(q2.to(tl.float32)), 1))
    exponent = top.to(tl.int32, bitcast=True) >> 23
    up = 127 + tl.minimum(127 + 14 - exponent, 24)
    factor = (up << 23).to(tl.float32, bitcast=True)[:, None]
    unit = ((254 - up) << 23).to(tl.float32, bitcast=True)
    q1 = (q1.to(tl.float32) * factor).to(tl.float16)
    if C.D2 > 0:
        q2 = (q2.to(tl.float32) * factor).to(tl.float16)
    else:
        q2 = q1
    return q1, q2, unit


@triton.jit
def load_values(
    pool,
    blocks,
    offsets,
    block_at,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    like: tl.constexpr,
    C: tl.constexpr,
):
    """Load the columns FIRST to FIRST + WIDTH of keys or values as [N, WIDTH] in the dtype `like`.

    offsets, block_at: int [N], where each key and its FP4 scales begin. Columns from D on are 0.
    load_fp4 gives the numbers of FP4.
    """
    if C.FP4:
        a, b, c, d = load_fp4(pool, blocks, offsets, block_at, FIRST, WIDTH, D, like, C)
        return interleaved(a, b, c, d, offsets.shape[0], WIDTH)
    else:
        d = FIRST + tl.arange(0, WIDTH)
        mask = (offsets >= 0)[:, None] & (d[None, :] < D)  # every `offsets` is; D may fill d
        if FIRST + WIDTH > D:
            return tl.load(pool + offsets[:, None] + d[None, :], mask=mask, other=0.0).to(like)
        else:
            return tl.load(pool + offsets[:, None] + d[None, :]).to(like)


@triton.jit
def load_split_columns(pool, offsets, D: tl.constexpr, like: tl.constexpr, PTX: tl.constexpr):
    """Load FP8 values as their even and their odd columns, [N, D / 2] each in the dtype `like`.

    Two neighbours are loaded as one 16-bit number. The transposed operand of a product is read
    byte by byte where it has 8 bits, and by one instruction where it has 16. PTX: separate the
    neighbours by NVIDIA's instructions.
    """
    pair = tl.arange(0, D // 2)
    word_ptrs = pool.to(tl.pointer_type(tl.uint16)) + (offsets // 2)[:, None] + pair[None, :]
    word = tl.load(word_ptrs)
    if PTX:  # two words at a time: bytes 0, 2 and 1, 3
        if pool.dtype.element_ty == tl.float8e5:  # the upper byte of an fp16
            low, high = tl.inline_asm_elementwise(
                "prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;",
                "=r,=r,r",
                [word],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            low, high = tl.inline_asm_elementwise(
                """{
                .reg .b32 t;
                .reg .b16 even, odd;
                prmt.b32 t, $2, 0, 0x3120;
                mov.b32 {even, odd}, t;
                cvt.rn.f16x2.e4m3x2 $0, even;
                cvt.rn.f16x2.e4m3x2 $1, odd;
                }""",
                "=r,=r,r",
                [word],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
    else:
        low = (word & 255).to(tl.uint8).to(pool.dtype.element_ty, bitcast=True)
        high = (word >> 8).to(tl.uint8).to(pool.dtype.element_ty, bitcast=True)
    return low.to(like), high.to(like)
