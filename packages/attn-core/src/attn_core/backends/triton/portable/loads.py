"""Device functions that find a request and load its rows, keys and values."""


# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.portable.arguments import KVCache, Store, Tile


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
    live = qi < queries
    token = (query + qi).to(tl.int64)
    q_head = (head * C.GROUP + row % C.GROUP).to(tl.int64)
    at = token * q.token_stride + q_head * q.head_stride
    d1 = tl.arange(0, C.D1)
    in_q1 = live[:, None] & (d1 < C.D)[None, :]
    q1 = tl.load(q.ptr + at[:, None] + d1[None, :], mask=in_q1, other=0.0)
    q2 = q1
    if C.D2 > 0:
        d2 = C.D1 + tl.arange(0, C.D2)
        in_q2 = live[:, None] & (d2 < C.D)[None, :]
        q2 = tl.load(q.ptr + at[:, None] + d2[None, :], mask=in_q2, other=0.0)
    unit = tl.full(row.shape, 1.0, tl.float32)
    if C.SCALE_QUERIES:
        q1, q2, unit = scaled_queries(q1, q2, C)
    if C.COLUMN_PARTS == 4:
        parts1 = fourth_columns(q1)
        parts2 = parts1
        if C.D2 > 0:
            parts2 = fourth_columns(q2)
        return Tile(parts1, parts2, qi, live, token, q_head, unit)
    else:
        return Tile(q1, q2, qi, live, token, q_head, unit)


@triton.jit
def fourth_columns(x):
    """Return four tiles, each of every fourth column."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def scaled_queries(q1, q2, C: tl.constexpr):
    """Return queries in bf16 as fp16, and the unit float32 [BM] of each row.

    They meet keys in FP8 or FP4: fp16 holds every one of these numbers, and few instructions
    convert to it, but bf16 has larger numbers and smaller ones. Times a power of two, which is exact, the
    largest of a row is between 2**14 and 2**15, or below where that power were above 2**24: times
    the scale of a layer its inverse has to stay above 0.
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
    at,
    block_at,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    like: tl.constexpr,
    C: tl.constexpr,
):
    """Load the columns FIRST to FIRST + WIDTH of keys or values as [N, WIDTH] in the dtype `like`.

    at, block_at: int [N], where each key and its FP4 scales begin. Columns from D on are 0. Numbers
    in FP4 are those of load_fp4.
    """
    if C.FP4:
        a, b, c, d = load_fp4(pool, blocks, at, block_at, FIRST, WIDTH, D, like, C)
        return interleaved(a, b, c, d, at.shape[0], WIDTH)
    else:
        d = FIRST + tl.arange(0, WIDTH)
        here = (at >= 0)[:, None] & (d[None, :] < D)  # every `at` is; D may fill d
        if FIRST + WIDTH > D:
            return tl.load(pool + at[:, None] + d[None, :], mask=here, other=0.0).to(like)
        else:
            return tl.load(pool + at[:, None] + d[None, :]).to(like)


@triton.jit
def interleaved(a, b, c, d, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return tiles of each fourth column as one, [ROWS, WIDTH]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, WIDTH])


@triton.jit
def load_fp4(
    pool,
    blocks,
    at,
    block_at,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    like: tl.constexpr,
    C: tl.constexpr,
):
    """Load FP4 columns FIRST to FIRST + WIDTH times 2**-14, each fourth one in one tile.

    Returns four tiles [N, WIDTH / 4] in the dtype `like`: no number has to move to another thread.
    at, block_at: int [N], where each key and its scales begin. Columns from D on are 0. FP4 is
    e2m1, low nibble first, with one e4m3 scale per 16 columns. Both numbers and the product are
    exact in fp16: times 2**-14 it is a multiple of its smallest number.
    """
    w = FIRST // 4 + tl.arange(0, WIDTH // 4)
    block = FIRST // 16 + tl.arange(0, WIDTH // 16)
    if C.FP4_ALIGNED:
        SCALES: tl.constexpr = C.FP4_ALIGNED
        CODES: tl.constexpr = 8 * C.FP4_ALIGNED
        at = tl.multiple_of(at, CODES)
        pool = tl.multiple_of(pool, CODES)
        block_at = tl.multiple_of(block_at, SCALES)
        blocks = tl.multiple_of(blocks, SCALES)
        words = pool.to(tl.pointer_type(tl.uint16)) + (at // 2)[:, None] + w[None, :]
        if FIRST + WIDTH > D:
            word = tl.load(words, mask=(at >= 0)[:, None] & (w < D // 4)[None, :], other=0)
        else:
            word = tl.load(words)
    else:
        here = (at >= 0)[:, None] & (w < D // 4)[None, :]
        low = pool + at[:, None] + (2 * w)[None, :]
        word = tl.load(low, mask=here, other=0).to(tl.uint16)
        word |= tl.load(low + 1, mask=here, other=0).to(tl.uint16) << 8
    scales = blocks + block_at[:, None] + block[None, :]
    if FIRST + WIDTH > D:
        scaled = (at >= 0)[:, None] & (block < D // 16)[None, :]
        scale = tl.load(scales, mask=scaled, other=0.0).to(tl.float16)
    else:
        scale = tl.load(scales).to(tl.float16)
    ROWS: tl.constexpr = at.shape[0]
    scale = tl.broadcast_to(scale[:, :, None], (ROWS, WIDTH // 16, 4))
    scale = tl.reshape(scale, (ROWS, WIDTH // 4))
    if C.PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 sign, size;
            shl.b32 sign, $4, 12;
            shl.b32 size, $4, 9;
            and.b32 sign, sign, 0x80008000;
            and.b32 size, size, 0x0E000E00;
            or.b32 sign, sign, size;
            mul.f16x2 $0, sign, $5;
            shl.b32 sign, $4, 8;
            shl.b32 size, $4, 5;
            and.b32 sign, sign, 0x80008000;
            and.b32 size, size, 0x0E000E00;
            or.b32 sign, sign, size;
            mul.f16x2 $1, sign, $5;
            shl.b32 sign, $4, 4;
            shl.b32 size, $4, 1;
            and.b32 sign, sign, 0x80008000;
            and.b32 size, size, 0x0E000E00;
            or.b32 sign, sign, size;
            mul.f16x2 $2, sign, $5;
            shr.u32 size, $4, 3;
            and.b32 sign, $4, 0x80008000;
            and.b32 size, size, 0x0E000E00;
            or.b32 sign, sign, size;
            mul.f16x2 $3, sign, $5;
            }""",
            "=r,=r,=r,=r,r,r",
            [word, scale],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        a = e2m1(word, scale)
        b = e2m1(word >> 4, scale)
        c = e2m1(word >> 8, scale)
        d = e2m1(word >> 12, scale)
    return a.to(like), b.to(like), c.to(like), d.to(like)


@triton.jit
def e2m1(word, scale):
    """Return the numbers of the lowest four bits times 2**-14 and a scale, in fp16."""
    bits = ((word & 8) << 12) | ((word & 7) << 9)  # the exponents of fp16 are 14 above
    return bits.to(tl.float16, bitcast=True) * scale


@triton.jit
def load_split_columns(pool, at, D: tl.constexpr, like: tl.constexpr, PTX: tl.constexpr):
    """Load FP8 values as their even and their odd columns, [N, D / 2] each in the dtype `like`.

    Two neighbours are loaded as one 16-bit number. The transposed operand of a product is read
    byte by byte where it has 8 bits, and by one instruction where it has 16. PTX: separate the
    neighbours by NVIDIA's instructions.
    """
    pair = tl.arange(0, D // 2)
    words = pool.to(tl.pointer_type(tl.uint16)) + (at // 2)[:, None] + pair[None, :]
    word = tl.load(words)
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
