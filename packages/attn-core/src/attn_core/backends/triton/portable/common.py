"""Device functions that the attention kernels share: masks, online softmax, the loop, the end."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.masks import MASK_CAUSAL, MASK_NONE, MASK_TREE
from attn_core.backends.triton.portable.arguments import State
from attn_core.backends.triton.portable.fp4 import add_scores, interleaved, load_fp4
from attn_core.backends.triton.portable.loads import load_split_columns, load_values

LOG2E = tl.constexpr(1.4426950408889634)  # kernels work in base 2, whose exp is one instruction
LN2 = tl.constexpr(0.6931471805599453)
# When a block of keys is masked: never, since all rows see all its keys; always; at the edges of
# what rows see, which the loop looks for.
UNMASKED = tl.constexpr(0)
MASKED = tl.constexpr(1)
MASKED_AT_EDGES = tl.constexpr(2)


@triton.jit
def store_tile(out, tile, state, acc, sinks, v_scale, C: tl.constexpr):
    """Write the outputs and the LSE of the rows of a tile that have seen all their keys.

    acc: float32 [BM, BDV], all columns of the state's accumulator.
    """
    sink = state.m
    if C.USE_SINKS:
        sink = tl.load(sinks + tile.q_head).to(tl.float32)
    result, lse = finalize(state.m, state.total, acc, sink, v_scale, C.USE_SINKS)
    dv = tl.arange(0, C.BDV)
    offsets = tile.token * out.token_stride + tile.q_head * out.head_stride
    mask = tile.live[:, None] & (dv < C.DV)[None, :]
    tl.store(
        out.ptr + offsets[:, None] + dv[None, :], result.to(out.ptr.dtype.element_ty), mask=mask
    )
    tl.store(out.lse + tile.token * (C.HEADS * C.GROUP) + tile.q_head, lse, mask=tile.live)


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
def attention_mask(j, qi, keys, C: tl.constexpr):
    """Return bool [M, N]: which keys `j` the queries `qi` of a request see, both counted from 0.

    A window counts positions, and the branches of a tree of drafts share them.
    """
    visible = (j < keys.length)[None, :] & (qi >= 0)[:, None]
    if C.CHUNK:
        chunk = (keys.prefix + qi) // C.CHUNK
        visible = visible & (j >= keys.first)[None, :] & (chunk == keys.chunk)[:, None]
    if C.MASK == MASK_CAUSAL:
        visible = visible & (j[None, :] <= keys.prefix + qi[:, None])
        if C.WINDOW:
            visible = visible & (j[None, :] > keys.prefix + qi[:, None] - keys.window)
    if C.MASK == MASK_TREE:
        tree = keys.tree
        drafts = keys.drafts
        draft = j - keys.prefix
        is_draft = (draft >= 0) & (draft < drafts)
        drafted = qi < drafts
        pair = drafted[:, None] & is_draft[None, :]
        bit = tl.load(tree.mask + qi[:, None] * drafts + draft[None, :], mask=pair, other=0)
        visible = visible & ((draft < 0)[None, :] | (bit != 0))
        if C.WINDOW:
            q_pos = tl.load(tree.positions + qi, mask=drafted, other=0)
            k_pos = tl.load(tree.positions + draft, mask=is_draft, other=0)
            k_pos = tl.where(is_draft, k_pos, j.to(k_pos.dtype))
            visible = visible & (k_pos[None, :] > q_pos[:, None] - keys.window)
    return visible


@triton.jit
def softmax_step(s, m, factor, MASK_POLICY: tl.constexpr, PER_ROW: tl.constexpr):
    """Add scores s [M, N] to an online softmax; return p, the new m, and by what sums shrink.

    factor: a positive number, or [M] if PER_ROW, by which s is multiplied last, so that only a
    small difference is rounded; it takes s to base 2.
    """
    new = tl.maximum(m, tl.max(s, 1) * factor)
    # -inf: the row has seen no key yet
    base = tl.where(new == -float("inf"), 0.0, new) if MASK_POLICY != UNMASKED else new
    p = tl.exp2(s * (factor[:, None] if PER_ROW else factor) - base[:, None])
    shrink = tl.exp2(m - base)
    return p, new, shrink


@triton.jit
def attention_loop(
    tile,
    state,
    keys,
    scales,
    lo,
    hi,
    BN: tl.constexpr,
    MASK_POLICY: tl.constexpr,
    STAGES: tl.constexpr,
    C: tl.constexpr,
):
    """Attend over keys lo..hi, multiples of BN, of one KV head; return the new state.

    MASK_POLICY: UNMASKED, MASKED or MASKED_AT_EDGES.
    """
    k, v, k_scales, v_scales = keys.cache
    m, total, acc = state
    dtype: tl.constexpr = tile.q1[0].dtype if C.KEY_PARTS == 4 else tile.q1.dtype
    n = tl.arange(0, BN)
    for start in tl.range(lo, hi, BN, num_stages=STAGES):
        j = start + n
        key_rows = j
        if MASK_POLICY != UNMASKED:  # out-of-range keys are clamped to a key of the request
            key_rows = tl.minimum(tl.maximum(j, keys.first), keys.length - 1)
        if C.PAGE == 0:
            page = key_rows * 0
            inner = key_rows
        elif C.PAGE % BN == 0:  # the whole block lies in one page
            page = tl.load(keys.table + start // C.PAGE)
            inner = key_rows - start // C.PAGE * C.PAGE
        else:
            page = tl.load(keys.table + key_rows // C.PAGE)
            inner = key_rows % C.PAGE
        if C.INT64_OFFSETS:
            inner = tl.cast(inner, tl.int64)
            page = tl.cast(page, tl.int64)
        k_at = page * k.page_stride + inner * k.token_stride
        k_scales_at = page * k_scales.page_stride + inner * k_scales.token_stride
        if C.SAME_STRIDES:  # fewer registers
            v_at = k_at
            v_scales_at = k_scales_at
        else:
            v_at = page * v.page_stride + inner * v.token_stride
            v_scales_at = page * v_scales.page_stride + inner * v_scales.token_stride
        if C.KEY_PARTS == 4:
            k1 = load_fp4(k.ptr, k_scales.ptr, k_at, k_scales_at, 0, C.D1, C.D, dtype, C)
            s = add_scores(tile.q1, k1, tl.zeros([tile.qi.shape[0], BN], tl.float32))
            if C.D2 > 0:
                k2 = load_fp4(k.ptr, k_scales.ptr, k_at, k_scales_at, C.D1, C.D2, C.D, dtype, C)
                s = add_scores(tile.q2, k2, s)
        else:
            k1 = load_values(k.ptr, k_scales.ptr, k_at, k_scales_at, 0, C.D1, C.D, dtype, C)
            s = tl.dot(tile.q1, tl.trans(k1), input_precision="ieee")
            if C.D2 > 0:
                k2 = load_values(k.ptr, k_scales.ptr, k_at, k_scales_at, C.D1, C.D2, C.D, dtype, C)
                s = tl.dot(tile.q2, tl.trans(k2), s, input_precision="ieee")
        factor = scales.qk * LOG2E
        if C.USE_SOFTCAP:
            unit = tile.unit[:, None] if C.SCALE_QUERIES else 1.0
            s = soft_cap(s * (scales.qk * unit), scales.cap)
            factor = LOG2E
        elif C.SCALE_QUERIES:
            factor = factor * tile.unit
        if MASK_POLICY == MASKED:
            visible = attention_mask(j, tile.qi, keys, C)
            s = tl.where(visible, s, -float("inf"))
        if MASK_POLICY == MASKED_AT_EDGES:
            edge = start + BN > keys.length
            if C.MASK != MASK_NONE:
                edge = edge | (start + BN > keys.prefix)
            if C.WINDOW:
                edge = True
            if C.CHUNK:
                edge = (start < keys.first) | (start + BN > keys.seen_by_all)
            if edge:
                visible = attention_mask(j, tile.qi, keys, C)
                s = tl.where(visible, s, -float("inf"))
        per_row: tl.constexpr = C.SCALE_QUERIES and not C.USE_SOFTCAP
        p, m, shrink = softmax_step(s, m, factor, MASK_POLICY, per_row)
        total = total * shrink + tl.sum(p, 1)
        weights = p.to(dtype)
        shrink = shrink[:, None]
        if C.VALUE_PARTS == 4:
            if C.LATENT:
                v1 = k1
            else:
                v1 = load_fp4(v.ptr, v_scales.ptr, v_at, v_scales_at, 0, C.BDV, C.DV, dtype, C)
            acc = (
                tl.dot(weights, v1[0], acc[0] * shrink, input_precision="ieee"),
                tl.dot(weights, v1[1], acc[1] * shrink, input_precision="ieee"),
                tl.dot(weights, v1[2], acc[2] * shrink, input_precision="ieee"),
                tl.dot(weights, v1[3], acc[3] * shrink, input_precision="ieee"),
            )
        elif C.VALUE_PARTS == 2:
            v1, v2 = load_split_columns(v.ptr, v_at, C.BDV, dtype, C.PTX)
            acc1 = tl.dot(weights, v2, acc[1] * shrink, input_precision="ieee")
            acc0 = tl.dot(weights, v1, acc[0] * shrink, input_precision="ieee")
            acc = (acc0, acc1)
        else:
            if C.LATENT and C.KEY_PARTS == 4:
                v1 = interleaved(k1[0], k1[1], k1[2], k1[3], BN, C.BDV)
            elif C.LATENT:
                v1 = k1
            else:
                v1 = load_values(v.ptr, v_scales.ptr, v_at, v_scales_at, 0, C.BDV, C.DV, dtype, C)
            acc = (tl.dot(weights, v1, acc[0] * shrink, input_precision="ieee"),)
    return State(m, total, acc)


@triton.jit
def init_state(BM: tl.constexpr, BDV: tl.constexpr, VALUE_PARTS: tl.constexpr):
    """Return the state of rows that have seen no key yet.

    acc: VALUE_PARTS tiles, of which tile i has the columns i, i + VALUE_PARTS, …
    """
    m = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    part = tl.zeros([BM, BDV // VALUE_PARTS], tl.float32)
    if VALUE_PARTS == 4:
        acc = (part, part, part, part)
    elif VALUE_PARTS == 2:
        acc = (part, part)
    else:
        acc = (part,)
    return State(m, total, acc)


@triton.jit
def concat_acc(state, BM: tl.constexpr, BDV: tl.constexpr, VALUE_PARTS: tl.constexpr):
    """Return the accumulator as [BM, BDV]."""
    acc = state.acc
    if VALUE_PARTS == 4:
        return interleaved(acc[0], acc[1], acc[2], acc[3], BM, BDV)
    elif VALUE_PARTS == 2:
        return tl.reshape(tl.join(acc[0], acc[1]), [BM, BDV])
    else:
        return acc[0]


@triton.jit
def finalize(m, total, acc, sink, v_scale, USE_SINKS: tl.constexpr):
    """Return the output [M, BDV] and the log-sum-exp [M] (natural, sinks included) of rows."""
    if USE_SINKS:
        sink2 = sink * LOG2E
        new = tl.maximum(m, sink2)
        base = tl.where(new == -float("inf"), 0.0, new)  # no key and no sink: a head without one
        shrink = tl.exp2(m - base)
        # an infinite sink takes all of the weight; less itself it would be NaN
        sink_weight = tl.where(sink2 == base, 1.0, tl.exp2(sink2 - base))
        total = total * shrink + sink_weight
        acc = acc * shrink[:, None]
        m = new
    empty = total == 0.0
    out = acc * (v_scale / tl.where(empty, 1.0, total))[:, None]
    lse = tl.where(empty, -float("inf"), (m + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    return out, lse
