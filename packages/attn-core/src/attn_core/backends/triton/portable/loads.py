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
    if C.KEY_PARTS == 4:
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
    WORDS: tl.constexpr = WIDTH // 4
    PAIRS: tl.constexpr = max(1, WIDTH // 32)
    w = FIRST // 4 + tl.arange(0, WORDS)
    p = FIRST // 32 + tl.arange(0, PAIRS)
    has_word = (at >= 0)[:, None] & (w < D // 4)[None, :]
    has_pair = (at >= 0)[:, None] & (2 * p < D // 16)[None, :]
    if C.FP4_ALIGNED:
        ALIGNED: tl.constexpr = C.FP4_ALIGNED
        EIGHT_TIMES: tl.constexpr = 8 * C.FP4_ALIGNED
        words = pool.to(tl.pointer_type(tl.uint16)) + (at // 2)[:, None] + w[None, :]
        words = tl.multiple_of(words, (1, EIGHT_TIMES))
        pairs = blocks.to(tl.pointer_type(tl.uint16)) + (block_at // 2)[:, None] + p[None, :]
        pairs = tl.multiple_of(pairs, (1, ALIGNED))
        if FIRST + WIDTH > D:
            word = tl.load(words, mask=has_word, other=0)
            pair = tl.load(pairs, mask=has_pair, other=0)
        else:
            word = tl.load(words)
            pair = tl.load(pairs)
    else:
        word = bytes_as_words(pool + at[:, None] + 2 * w[None, :], has_word, has_word)
        scale_bytes = blocks.to(tl.pointer_type(tl.uint8)) + block_at[:, None] + 2 * p[None, :]
        has_second = (at >= 0)[:, None] & (2 * p + 1 < D // 16)[None, :]
        pair = bytes_as_words(scale_bytes, has_pair, has_second)
    pair = tl.broadcast_to(pair[:, :, None], (at.shape[0], PAIRS, WORDS // PAIRS))
    pair = tl.reshape(pair, (at.shape[0], WORDS))
    # Which of the two, as prmt takes it. Nothing is loaded: the compiler moves the layout of a
    # product's operand up to loads alone, and leaves it below the code where it meets a range.
    select = tl.where(w // 4 % 2 == 0, 0x20, 0x31).to(tl.uint16)
    nothing = pool.to(tl.pointer_type(tl.uint16)) + w
    select = tl.load(nothing, mask=w < 0, other=select)[None, :]
    if C.PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 sign, size, scale;
            .reg .b16 low, high;
            prmt.b32 scale, $5, 0, $6;
            mov.b32 {low, high}, scale;
            cvt.rn.f16x2.e4m3x2 scale, low;
            shl.b32 sign, $4, 12;
            shl.b32 size, $4, 9;
            and.b32 sign, sign, 0x80008000;
            and.b32 size, size, 0x0E000E00;
            or.b32 sign, sign, size;
            mul.f16x2 $0, sign, scale;
            shl.b32 sign, $4, 8;
            shl.b32 size, $4, 5;
            and.b32 sign, sign, 0x80008000;
            and.b32 size, size, 0x0E000E00;
            or.b32 sign, sign, size;
            mul.f16x2 $1, sign, scale;
            shl.b32 sign, $4, 4;
            shl.b32 size, $4, 1;
            and.b32 sign, sign, 0x80008000;
            and.b32 size, size, 0x0E000E00;
            or.b32 sign, sign, size;
            mul.f16x2 $2, sign, scale;
            shr.u32 size, $4, 3;
            and.b32 sign, $4, 0x80008000;
            and.b32 size, size, 0x0E000E00;
            or.b32 sign, sign, size;
            mul.f16x2 $3, sign, scale;
            }""",
            "=r,=r,=r,=r,r,r,r",
            [word, pair, select],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        scale = (pair >> ((select & 1) << 3)) & 255
        scale = scale.to(tl.uint8).to(blocks.dtype.element_ty, bitcast=True).to(tl.float16)
        a = e2m1(word, scale)
        b = e2m1(word >> 4, scale)
        c = e2m1(word >> 8, scale)
        d = e2m1(word >> 12, scale)
    return a.to(like), b.to(like), c.to(like), d.to(like)


@triton.jit
def bytes_as_words(first, has_first, has_second):
    """Load two bytes each as one number, the first one low; what a mask lacks is 0."""
    low = tl.load(first, mask=has_first, other=0).to(tl.uint16)
    return low | (tl.load(first + 1, mask=has_second, other=0).to(tl.uint16) << 8)


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
