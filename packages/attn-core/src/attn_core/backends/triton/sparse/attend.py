"""Absorbed MLA over the selected slots of each query: every query token has keys of its own."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.sparse.e4m3 import from_e4m3
from attn_core.dtypes import LATENT_BLOCK
from attn_core.ops.triton.read import saturated

GROUP = tl.constexpr(LATENT_BLOCK)  # values of an FP8 latent that share a scale
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_values(latents, scales, page, inner, valid, like: tl.constexpr, C: tl.constexpr):
    """Return the values of latents [BN, BDV] in the dtype `like`; of unused slots, zeros."""
    d = tl.arange(0, C.BDV)
    offsets = page * C.PAGE_STRIDE + inner * C.TOKEN_STRIDE
    mask = valid[:, None] & (d < C.DV)[None, :]
    values = tl.load(latents + offsets[:, None] + d[None, :], mask=mask, other=0.0)
    if C.FP8:
        group = tl.arange(0, C.BDV // GROUP)
        offsets = page * C.SCALES_PAGE + inner * C.SCALES_TOKEN
        mask = valid[:, None] & (group < C.DV // GROUP)[None, :]
        scale = tl.load(scales + offsets[:, None] + group[None, :], mask=mask, other=0.0)
        values = values.to(tl.float32) if C.NATIVE else from_e4m3(values)
        grouped = tl.reshape(values, (C.BN, C.BDV // GROUP, GROUP))
        values = tl.reshape(grouped * scale[:, :, None], (C.BN, C.BDV))
        return saturated(values, like)
    else:
        return values.to(like)


@triton.jit(do_not_specialize=["keys", "row_stride", "out_split", "lse_split"])
def attend_selected(
    q, topk_indices, out, lse, q_token, q_head, row_stride, keys, scale, out_split, out_token,
    out_head, lse_split, lse_token, latents, rope_parts, scales,
    C: tl.constexpr,
):  # fmt: skip
    """Attend with C.BM heads of a token to a part of its slots, `keys` of them or fewer.

    Latents are those of LayerCache, their rope parts and FP8's scales by pointers of their own.
    Slots are valid first. Writes the output and the natural LSE of the part; a part without slots
    gives zeros and -inf.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(2)
    head = tl.program_id(1) * C.BM + tl.arange(0, C.BM)
    head_mask = head < C.HEADS
    d = tl.arange(0, C.BDV)
    rope = tl.arange(0, C.BDR)
    of_v = d < C.DV
    of_rope = rope < C.DR
    q_offsets = token * q_token + head.to(tl.int64) * q_head
    q1 = tl.load(
        q + q_offsets[:, None] + d[None, :], mask=head_mask[:, None] & of_v[None, :], other=0.0
    )
    if C.DR > 0:
        at_rope = q_offsets[:, None] + C.DV + rope[None, :]
        q2 = tl.load(q + at_rope, mask=head_mask[:, None] & of_rope[None, :], other=0.0)
    m = tl.full((C.BM,), -float("inf"), tl.float32)
    total = tl.full((C.BM,), 0.0, tl.float32)
    acc = tl.full((C.BM, C.BDV), 0.0, tl.float32)
    first = part * keys
    indices_ptr = topk_indices + token * row_stride
    count = tl.full((), 0, tl.int32)
    for start in range(first, tl.minimum(first + keys, C.TOPK), C.BN):
        n = start + tl.arange(0, C.BN)
        slot = tl.load(indices_ptr + n, mask=n < C.TOPK, other=-1)
        count += tl.sum((slot >= 0).to(tl.int32))
    for start in range(first, first + count, C.BN):
        n = start + tl.arange(0, C.BN)
        valid = n < first + count
        slot = tl.load(indices_ptr + n, mask=valid, other=0).to(tl.int64)
        page = slot // C.PAGE
        inner = slot % C.PAGE
        k1 = load_values(latents, scales, page, inner, valid, dtype, C)
        s = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        if C.DR > 0:
            rope_mask = valid[:, None] & of_rope[None, :]
            of_slot = rope_parts + (page * C.ROPE_PAGE + inner * C.ROPE_TOKEN)[:, None]
            k2 = tl.load(of_slot + rope[None, :], mask=rope_mask, other=0.0)
            s += tl.dot(q2, tl.trans(k2.to(q2.dtype)), input_precision="ieee")
        s = tl.where(valid[None, :], s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1) * (scale * LOG2E))
        p = tl.exp2(s * (scale * LOG2E) - new[:, None])
        shrink = tl.exp2(m - new)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(k1.dtype), k1, input_precision="ieee")
        m = new
    empty = total == 0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    q_offsets = part.to(tl.int64) * out_split + token * out_token + head.to(tl.int64) * out_head
    rope_mask = head_mask[:, None] & of_v[None, :]
    tl.store(out + q_offsets[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=rope_mask)
    state = tl.where(empty, -float("inf"), (m + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    tl.store(lse + part.to(tl.int64) * lse_split + token * lse_token + head, state, mask=head_mask)
