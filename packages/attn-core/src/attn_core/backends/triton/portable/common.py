"""Device functions that the attention kernels share: tokens of pages, visibility, softmax."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # kernels work in base 2, whose exp is one instruction
LN2 = tl.constexpr(0.6931471805599453)
# What a query sees of the keys: all of them, those up to its own, or the prefix and what the mask
# of a tree of drafts says of the rest.
SEE_ALL = tl.constexpr(0)
SEE_CAUSAL = tl.constexpr(1)
SEE_TREE = tl.constexpr(2)


@triton.jit
def find_request(cu, batch, item, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the last b < batch with cu[b] · SCALE // BLOCK + b <= item (BLOCK 0: cu[b] · SCALE).

    cu does not fall, so that of equal entries the last one counts: requests without work are
    passed over.
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
    """Load rows of a store as [N, len(d)] in the dtype of `like`.

    at, block_at: int [N], where each row and its FP4 scales begin. d: the columns; those from D
    on are 0. FP4 is e2m1, low nibble first, one e4m3 scale per 16 columns.
    """
    here = (at >= 0)[:, None] & (d[None, :] < D)  # at is; without padding nothing is masked
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
def load_halves(pool, at, D: tl.constexpr, like: tl.constexpr, PTX: tl.constexpr):
    """Load rows of an FP8 store as their even and their odd columns, [N, D / 2] each in `like`.

    A matrix operand of bytes that lie across its rows is read byte by byte, one of 16 bits by the
    instruction for it. PTX: take two neighbours apart by NVIDIA's instructions.
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
    """Return cap · tanh(x / cap): the interpreter has no tanh, and small x need their bits."""
    y = x / cap
    square = y * y
    small = y * (1 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    e = tl.exp2(tl.abs(y) * (-2 * 1.4426950408889634))
    large = (1 - e) / (1 + e)
    return cap * tl.where(tl.abs(y) < 0.1, small, tl.where(y < 0, -large, large))


@triton.jit
def visible(
    j, qi, prefix, length, drafts, tree, positions, window, SEES: tl.constexpr, WINDOW: tl.constexpr
):
    """Return bool [M, N]: which keys `j` (numbers in the request) the queries `qi` see.

    prefix: keys before the first query. drafts: n of the tree mask [n, n] at `tree`, whose tokens
    have the positions at `positions`: a window counts positions, and a tree's branches share them.
    """
    seen = (j < length)[None, :] & (qi >= 0)[:, None]
    if SEES == SEE_CAUSAL:
        seen = seen & (j[None, :] <= prefix + qi[:, None])
        if WINDOW:
            seen = seen & (j[None, :] > prefix + qi[:, None] - window)
    if SEES == SEE_TREE:
        draft = j - prefix
        inside = (draft >= 0) & (draft < drafts)
        mine = qi < drafts
        both = mine[:, None] & inside[None, :]
        bit = tl.load(tree + qi[:, None] * drafts + draft[None, :], mask=both, other=0)
        seen = seen & ((draft < 0)[None, :] | (bit != 0))
        if WINDOW:
            own = tl.load(positions + qi, mask=mine, other=0)
            theirs = tl.load(positions + draft, mask=inside, other=0)
            theirs = tl.where(inside, theirs, j.to(theirs.dtype))
            seen = seen & (theirs[None, :] > own[:, None] - window)
    return seen


@triton.jit
def attend_keys(
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
    HALVES: tl.constexpr,
    PTX: tl.constexpr,
    TWINS: tl.constexpr,
    WIDE: tl.constexpr,
    CAP: tl.constexpr,
    SEES: tl.constexpr,
    WINDOW: tl.constexpr,
    EDGES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Go over keys lo..hi (multiples of BN) of one KV head; return the new m, total, acc and acc2.

    q1, q2: the first D1 and the other D2 columns of the queries, [M, D1] and [M, D2]. m, total:
    float32 [M], running maximum (base 2) and sum. acc: float32 [M, BDV];
    HALVES: its even columns, acc2 the odd ones, see load_halves. Keys before `first` and
    from `length` on are never read. PAGE 0: keys lie one after the other at k_token.
    TWINS: K and V have equal strides. WIDE: their offsets need 64 bits.
    EDGES 0: every key is seen by every query; 1: each block is masked; 2: where it has to be.
    """
    n = tl.arange(0, BN)
    d1 = tl.arange(0, D1)
    dv = tl.arange(0, BDV)
    for start in tl.range(lo, hi, BN, num_stages=STAGES):
        j = start + n
        at = j
        if EDGES > 0:  # what is nobody's is not read: a key of the request stands in for it
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
        if WIDE:
            inner = tl.cast(inner, tl.int64)
            page = tl.cast(page, tl.int64)
        k_at = page * k_page + inner * k_token
        kb_at = page * kb_page + inner * kb_token
        if TWINS:  # fewer registers
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
        if CAP:
            s = soft_cap(s * scale, cap)
            factor = LOG2E
        if EDGES == 1:
            seen = visible(j, qi, prefix, length, drafts, tree, positions, window, SEES, WINDOW)
            s = tl.where(seen, s, -float("inf"))
        if EDGES == 2:
            edge = start + BN > length
            if SEES != SEE_ALL:
                edge = edge | (start + BN > prefix)
            if WINDOW:
                edge = True
            if edge:
                seen = visible(j, qi, prefix, length, drafts, tree, positions, window, SEES, WINDOW)
                s = tl.where(seen, s, -float("inf"))
        # the factor, which is positive, comes last: one rounding, of a small difference
        new = tl.maximum(m, tl.max(s, 1) * factor)
        base = tl.where(new == -float("inf"), 0.0, new) if EDGES > 0 else new
        p = tl.exp2(s * factor - base[:, None])
        shrink = tl.exp2(m - base)
        total = total * shrink + tl.sum(p, 1)
        weights = p.to(q1.dtype)
        if HALVES:
            v, v2 = load_halves(v_pool, v_at, BDV, q1.dtype, PTX)
            acc2 = tl.dot(weights, v2, acc2 * shrink[:, None], input_precision="ieee")
        elif LATENT:
            v = k1
        else:
            v = load_values(v_pool, v_blocks, v_at, vb_at, dv, DV, BDV, FP4, q1.dtype)
        acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
        m = new
    return m, total, acc, acc2


@triton.jit
def unseen(BM: tl.constexpr, BDV: tl.constexpr, HALVES: tl.constexpr):
    """Return m, total, acc and acc2 of lines that have seen nothing."""
    m = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if HALVES:
        acc = tl.zeros([BM, BDV // 2], tl.float32)
        acc2 = acc
    else:
        acc = tl.zeros([BM, BDV], tl.float32)
        acc2 = total  # nobody's
    return m, total, acc, acc2


@triton.jit
def joined(acc, acc2, BM: tl.constexpr, BDV: tl.constexpr, HALVES: tl.constexpr):
    """Return the accumulator as [BM, BDV]."""
    if HALVES:
        acc = tl.reshape(tl.join(acc, acc2), [BM, BDV])
    return acc


@triton.jit
def finish(m, total, acc, sink, v_scale, SINKS: tl.constexpr):
    """Return the output [M, BDV] and the log-sum-exp (natural) of finished rows; sinks included."""
    if SINKS:
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
