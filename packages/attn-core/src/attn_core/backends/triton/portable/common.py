"""Device functions that the attention kernels share: loads from pages, masks, online softmax."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.masks import MASK_CAUSAL, MASK_NONE, MASK_TREE

LOG2E = tl.constexpr(1.4426950408889634)  # kernels work in base 2, whose exp is one instruction
LN2 = tl.constexpr(0.6931471805599453)
# When a block of keys is masked: never, since all rows see all its keys; always; at the edges of
# what rows see, which the loop looks for.
UNMASKED = tl.constexpr(0)
MASKED = tl.constexpr(1)
MASKED_AT_EDGES = tl.constexpr(2)


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
def load_values(
    pool,
    blocks,
    at,
    block_at,
    d,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    FP4: tl.constexpr,
    like: tl.constexpr,
):
    """Load keys or values as [N, len(d)] in the dtype `like`.

    at, block_at: int [N], where each key and its FP4 scales begin. d: the columns; those from D
    on are 0. FP4 is e2m1, low nibble first, with one e4m3 scale per 16 columns.
    """
    here = (at >= 0)[:, None] & (d[None, :] < D)  # every `at` is; where D fills d there is no mask
    if FP4:
        codes_at = pool + at[:, None] + d[None, :] // 2
        scale_at = blocks + block_at[:, None] + d[None, :] // 16
        if WIDTH > D:
            codes = tl.load(codes_at, mask=here, other=0).to(tl.int32)
            scale = tl.load(scale_at, mask=here, other=0.0)
        else:
            codes = tl.load(codes_at).to(tl.int32)
            scale = tl.load(scale_at)
        nibble = (codes >> ((d[None, :] % 2) * 4)) & 15
        exponent = (nibble >> 1) & 3
        odd = nibble & 1
        twice = tl.where(exponent == 0, odd, (2 + odd) << (tl.maximum(exponent, 1) - 1))
        value = tl.where(nibble > 7, -0.5, 0.5) * twice.to(tl.float32)
        return (value * scale.to(tl.float32)).to(like)
    if WIDTH > D:
        return tl.load(pool + at[:, None] + d[None, :], mask=here, other=0.0).to(like)
    return tl.load(pool + at[:, None] + d[None, :]).to(like)


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


@triton.jit
def soft_cap(x, cap):
    """Return cap · tanh(x / cap), with a relative error below 2**-19.

    Below 0.1, tanh y is its Taylor series y - y³/3 + 2y⁵/15 - 17y⁷/315 (DLMF 4.33.3), whose next
    term is 2e-10 of y; above, (1 - e) / (1 + e) with e = exp(-2|y|), which would cancel near 0.
    The bound allows for an exp2 of relative error 2**-22, that of NVIDIA's ex2.approx. Triton
    has tanh in libdevice alone, which its interpreter lacks.
    """
    y = x / cap
    square = y * y
    small = y * (1 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    e = tl.exp2(tl.abs(y) * (-2 * 1.4426950408889634))
    large = (1 - e) / (1 + e)
    return cap * tl.where(tl.abs(y) < 0.1, small, tl.where(y < 0, -large, large))


@triton.jit
def attention_mask(
    j, qi, prefix, length, drafts, tree, positions, window, MASK: tl.constexpr, WINDOW: tl.constexpr
):
    """Return bool [M, N]: which keys `j` the queries `qi` of a request see, both counted from 0.

    prefix: keys before the first query. drafts: n of the tree mask [n, n] at `tree`. positions: of
    the drafts; a window counts positions, and the branches of a tree share them.
    """
    seen = (j < length)[None, :] & (qi >= 0)[:, None]
    if MASK == MASK_CAUSAL:
        seen = seen & (j[None, :] <= prefix + qi[:, None])
        if WINDOW:
            seen = seen & (j[None, :] > prefix + qi[:, None] - window)
    if MASK == MASK_TREE:
        draft = j - prefix
        inside = (draft >= 0) & (draft < drafts)
        drafted = qi < drafts
        pair = drafted[:, None] & inside[None, :]
        bit = tl.load(tree + qi[:, None] * drafts + draft[None, :], mask=pair, other=0)
        seen = seen & ((draft < 0)[None, :] | (bit != 0))
        if WINDOW:
            q_pos = tl.load(positions + qi, mask=drafted, other=0)
            k_pos = tl.load(positions + draft, mask=inside, other=0)
            k_pos = tl.where(inside, k_pos, j.to(k_pos.dtype))
            seen = seen & (k_pos[None, :] > q_pos[:, None] - window)
    return seen


@triton.jit
def softmax_step(s, m, factor, MASK_POLICY: tl.constexpr):
    """Add scores s [M, N] to an online softmax; return p, the new m, and by what sums shrink.

    factor: a positive number by which s is multiplied last, so that only a small difference is
    rounded; it takes s to base 2.
    """
    new = tl.maximum(m, tl.max(s, 1) * factor)
    # -inf: the row has seen no key yet
    base = tl.where(new == -float("inf"), 0.0, new) if MASK_POLICY != UNMASKED else new
    p = tl.exp2(s * factor - base[:, None])
    shrink = tl.exp2(m - base)
    return p, new, shrink


@triton.jit
def attention_loop(
    q1,
    q2,
    m,
    total,
    acc,
    acc2,
    qi,
    lo,
    hi,
    first,
    length,
    prefix,
    k_pool,
    v_pool,
    k_blocks,
    v_blocks,
    table,
    k_page,
    k_token,
    v_page,
    v_token,
    kb_page,
    kb_token,
    vb_page,
    vb_token,
    scale,
    cap,
    drafts,
    tree,
    positions,
    window,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    LATENT: tl.constexpr,
    FP4: tl.constexpr,
    SPLIT_FP8_COLUMNS: tl.constexpr,
    PTX: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    USE_SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK_POLICY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Go over keys lo..hi (multiples of BN) of one KV head; return the new m, total, acc and acc2.

    q1, q2: the first D1 and the other D2 columns of the queries, [M, D1] and [M, D2].
    m, total: float32 [M], the running maximum (base 2) and the running sum.
    acc: float32 [M, BDV]. SPLIT_FP8_COLUMNS: acc holds the even columns and acc2 the odd ones.
    first, length: keys before `first` and from `length` on are never read.
    PAGE: 0 for keys that lie one after the other.
    SAME_STRIDES: K and V have equal strides. INT64_OFFSETS: their offsets need 64 bits.
    MASK_POLICY: UNMASKED, MASKED or MASKED_AT_EDGES.
    """
    n = tl.arange(0, BN)
    d1 = tl.arange(0, D1)
    dv = tl.arange(0, BDV)
    for start in tl.range(lo, hi, BN, num_stages=STAGES):
        j = start + n
        at = j
        if MASK_POLICY != UNMASKED:  # out-of-range keys are clamped to a key of the request
            at = tl.minimum(tl.maximum(j, first), length - 1)
        if PAGE == 0:
            page = at * 0
            inner = at
        elif PAGE % BN == 0:  # the whole block lies in one page
            page = tl.load(table + start // PAGE)
            inner = at - start // PAGE * PAGE
        else:
            page = tl.load(table + at // PAGE)
            inner = at % PAGE
        if INT64_OFFSETS:
            inner = tl.cast(inner, tl.int64)
            page = tl.cast(page, tl.int64)
        k_at = page * k_page + inner * k_token
        kb_at = page * kb_page + inner * kb_token
        if SAME_STRIDES:  # fewer registers
            v_at = k_at
            vb_at = kb_at
        else:
            v_at = page * v_page + inner * v_token
            vb_at = page * vb_page + inner * vb_token
        k1 = load_values(k_pool, k_blocks, k_at, kb_at, d1, D, D1, FP4, q1.dtype)
        s = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        if D2 > 0:
            d2 = D1 + tl.arange(0, D2)
            k2 = load_values(k_pool, k_blocks, k_at, kb_at, d2, D, D1 + D2, FP4, q1.dtype)
            s = tl.dot(q2, tl.trans(k2), s, input_precision="ieee")
        factor = scale * LOG2E
        if USE_SOFTCAP:
            s = soft_cap(s * scale, cap)
            factor = LOG2E
        if MASK_POLICY == MASKED:
            seen = attention_mask(
                j, qi, prefix, length, drafts, tree, positions, window, MASK, WINDOW
            )
            s = tl.where(seen, s, -float("inf"))
        if MASK_POLICY == MASKED_AT_EDGES:
            edge = start + BN > length
            if MASK != MASK_NONE:
                edge = edge | (start + BN > prefix)
            if WINDOW:
                edge = True
            if edge:
                seen = attention_mask(
                    j, qi, prefix, length, drafts, tree, positions, window, MASK, WINDOW
                )
                s = tl.where(seen, s, -float("inf"))
        p, m, shrink = softmax_step(s, m, factor, MASK_POLICY)
        total = total * shrink + tl.sum(p, 1)
        weights = p.to(q1.dtype)
        if SPLIT_FP8_COLUMNS:
            v, v2 = load_split_columns(v_pool, v_at, BDV, q1.dtype, PTX)
            acc2 = tl.dot(weights, v2, acc2 * shrink[:, None], input_precision="ieee")
        elif LATENT:
            v = k1
        else:
            v = load_values(v_pool, v_blocks, v_at, vb_at, dv, DV, BDV, FP4, q1.dtype)
        acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
    return m, total, acc, acc2


@triton.jit
def init_state(BM: tl.constexpr, BDV: tl.constexpr, SPLIT_FP8_COLUMNS: tl.constexpr):
    """Return m, total, acc and acc2 of rows that have seen no key yet."""
    m = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if SPLIT_FP8_COLUMNS:
        acc = tl.zeros([BM, BDV // 2], tl.float32)
        acc2 = acc
    else:
        acc = tl.zeros([BM, BDV], tl.float32)
        acc2 = total  # not used
    return m, total, acc, acc2


@triton.jit
def concat_acc(acc, acc2, BM: tl.constexpr, BDV: tl.constexpr, SPLIT_FP8_COLUMNS: tl.constexpr):
    """Return the accumulator as [BM, BDV]."""
    if SPLIT_FP8_COLUMNS:
        acc = tl.reshape(tl.join(acc, acc2), [BM, BDV])
    return acc


@triton.jit
def finalize(m, total, acc, sink, v_scale, USE_SINKS: tl.constexpr):
    """Return the output [M, BDV] and the log-sum-exp [M] (natural, sinks included) of rows."""
    if USE_SINKS:
        sink2 = sink * LOG2E
        new = tl.maximum(m, sink2)
        shrink = tl.exp2(m - new)
        total = total * shrink + tl.exp2(sink2 - new)
        acc = acc * shrink[:, None]
        m = new
    none = total == 0.0
    out = acc * (v_scale / tl.where(none, 1.0, total))[:, None]
    lse = tl.where(none, -float("inf"), (m + tl.log2(tl.where(none, 1.0, total))) * LN2)
    return out, lse
