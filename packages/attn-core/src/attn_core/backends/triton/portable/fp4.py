"""Device functions that read FP4: keys and values as four tiles, each of every fourth column.

A 16-bit word has four codes, of the columns 4w to 4w + 3. Each code is one shift and two masks away
from an fp16 number, so the words of a tile become four tiles without a number leaving its thread. A
product sums over columns in any order: queries are cut alike, and outputs are put together at the
end.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_fp4(
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
    """Load FP4 columns FIRST to FIRST + WIDTH times 2**-14, each fourth one in one tile.

    Returns four tiles [N, WIDTH / 4] in the dtype `like`: no number has to move to another thread.
    offsets, block_at: int [N], where each key and its scales begin. Columns from D on are 0, but
    for those up to the next multiple of 4. FP4 is e2m1, low nibble first, with one e4m3 scale per
    16 columns. Both numbers and the product are exact in fp16: times 2**-14 it is a multiple of its
    smallest number.
    """
    WORDS: tl.constexpr = WIDTH // 4
    PAIRS: tl.constexpr = max(1, WIDTH // 32)
    w = FIRST // 4 + tl.arange(0, WORDS)
    p = FIRST // 32 + tl.arange(0, PAIRS)
    has_word = (offsets >= 0)[:, None] & (w < (D + 3) // 4)[None, :]
    has_pair = (offsets >= 0)[:, None] & (2 * p < (D + 15) // 16)[None, :]
    if C.FP4_ALIGNED:
        ALIGNED: tl.constexpr = C.FP4_ALIGNED
        EIGHT_TIMES: tl.constexpr = 8 * C.FP4_ALIGNED
        word_ptrs = pool.to(tl.pointer_type(tl.uint16)) + (offsets // 2)[:, None] + w[None, :]
        word_ptrs = tl.multiple_of(word_ptrs, (1, EIGHT_TIMES))
        pairs = blocks.to(tl.pointer_type(tl.uint16)) + (block_at // 2)[:, None] + p[None, :]
        pairs = tl.multiple_of(pairs, (1, ALIGNED))
        if FIRST + WIDTH > D:
            word = tl.load(word_ptrs, mask=has_word, other=0)
            pair = tl.load(pairs, mask=has_pair, other=0)
        else:
            word = tl.load(word_ptrs)
            pair = tl.load(pairs)
    else:
        word = bytes_as_words(pool + offsets[:, None] + 2 * w[None, :], has_word, has_word)
        scale_bytes = blocks.to(tl.pointer_type(tl.uint8)) + block_at[:, None] + 2 * p[None, :]
        has_second = (offsets >= 0)[:, None] & (2 * p + 1 < (D + 15) // 16)[None, :]
        pair = bytes_as_words(scale_bytes, has_pair, has_second)
    pair = tl.broadcast_to(pair[:, :, None], (offsets.shape[0], PAIRS, WORDS // PAIRS))
    pair = tl.reshape(pair, (offsets.shape[0], WORDS))
    # Which of the two, as prmt takes it. Nothing is loaded: the compiler moves the layout of a
    # product's operand up to loads alone, and leaves it below the code where it meets a range.
    select = tl.where(w // 4 % 2 == 0, 0x20, 0x31).to(tl.uint16)
    dummy_ptrs = pool.to(tl.pointer_type(tl.uint16)) + w
    select = tl.load(dummy_ptrs, mask=w < 0, other=select)[None, :]
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
def quarters(x):
    """Return the columns of a tile as four tiles, as load_fp4 returns keys."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def interleaved(a, b, c, d, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return what `quarters` would cut into these four: [ROWS, WIDTH]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, WIDTH])


@triton.jit
def add_scores(q, k, s):
    """Add to s [M, N] the products of queries and keys in quarters."""
    s = tl.dot(q[0], tl.trans(k[0]), s, input_precision="ieee")
    s = tl.dot(q[1], tl.trans(k[1]), s, input_precision="ieee")
    s = tl.dot(q[2], tl.trans(k[2]), s, input_precision="ieee")
    return tl.dot(q[3], tl.trans(k[3]), s, input_precision="ieee")
