"""The softmax of a tile, block by block, and what is stored at its end."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn_core.backends.triton.hopper.common import row_offsets
from attn_core.backends.triton.masks import MASK_CAUSAL, MASK_TREE

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


class KeyMask(NamedTuple):
    """Which keys the rows of a tile see.

    context_len: keys before the first query. unmasked_low … unmasked_high: keys that every row
    sees, so that their blocks need no mask. tree: bool [drafts, drafts] of this sequence.
    """

    seq_len: Any
    context_len: Any
    unmasked_low: Any
    unmasked_high: Any
    window: Any
    tree: Any
    drafts: Any


@gluon.jit
def tanh(y):
    """Return tanh y: its series below 0.1, else (1 - e) / (1 + e) with e = exp(-2|y|).

    The sources and the bound of the error are those of soft_cap in portable/common.py.
    """
    square = y * y
    small = y * (1 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    e = gl.exp2(gl.abs(y) * (-2 * 1.4426950408889634))
    large = (1 - e) / (1 + e)
    return gl.where(gl.abs(y) < 0.1, small, gl.where(y < 0, -large, large))


@gluon.jit
def visible_scores(s, start, q_idx, mask, scales, CONFIG: gl.constexpr):
    """Return the scores of keys start … start + BN, -inf where hidden, and their scale of base 2.

    q_idx: the query of each row. The scale, which is positive, is not applied yet.
    """
    BN: gl.constexpr = CONFIG.BN
    log2_scale = scales.qk * LOG2E
    if CONFIG.USE_SOFTCAP:
        s = tanh(s * (scales.qk / scales.cap))
        log2_scale = scales.cap * LOG2E
    if (start < mask.unmasked_low) | (start + BN > mask.unmasked_high):
        j = start + gl.arange(0, BN, gl.SliceLayout(0, s.type.layout))
        end = mask.seq_len + 0 * q_idx  # of each row: one comparison a score
        if CONFIG.MASK == MASK_CAUSAL:
            end = gl.minimum(end, mask.context_len + q_idx + 1)
        visible = j[None, :] < end[:, None]
        if CONFIG.MASK == MASK_CAUSAL and CONFIG.WINDOW:
            oldest = mask.context_len + q_idx - mask.window
            visible = visible & (j[None, :] > oldest[:, None])
        if CONFIG.MASK == MASK_TREE:
            draft = j - mask.context_len
            in_tree = (draft >= 0) & (draft < mask.drafts)
            in_tree = (q_idx < mask.drafts)[:, None] & in_tree[None, :]
            bits = mask.tree + q_idx[:, None] * mask.drafts + draft[None, :]
            bit = gl.load(bits, mask=in_tree, other=0)
            visible = visible & ((draft < 0)[None, :] | (bit != 0))
        s = gl.where(visible, s, -float("inf"))
    return s, log2_scale


@gluon.jit
def softmax_step(s, start, q_idx, m_i, l_i, mask, scales, CONFIG: gl.constexpr):
    """Return p of the scores of keys start … start + BN, the new m_i and l_i, and alpha.

    alpha: by what the old accumulator shrinks. q_idx: the query of each row.
    """
    s, log2_scale = visible_scores(s, start, q_idx, mask, scales, CONFIG)
    m_new = gl.maximum(m_i, gl.max(s, 1) * log2_scale)
    m_base = gl.where(m_new == -float("inf"), 0.0, m_new)
    p = gl.exp2(s * log2_scale - m_base[:, None])
    alpha = gl.exp2(m_i - m_base)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def add_sink(acc, m_i, l_i, sinks, heads):
    """Return acc, m_i and l_i with the sink of each row's head: a score without a value.

    sinks: those of a group. heads [64]: of each row, in its group.
    """
    sink = gl.load(sinks + heads).to(gl.float32) * LOG2E
    m_new = gl.maximum(m_i, sink)
    m_base = gl.where(m_new == -float("inf"), 0.0, m_new)  # no key and no sink
    alpha = gl.exp2(m_i - m_base)
    # an infinite sink less itself is NaN
    sink_weight = gl.where(sink == m_base, 1.0, gl.exp2(sink - m_base))
    l_i = l_i * alpha + sink_weight
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, m_new, l_i


@gluon.jit
def store_output(
    acc,
    m_i,
    l_i,
    empty,
    out,
    v_scale,
    q_start,
    q_len,
    head,
    first_row,
    CONFIG: gl.constexpr,
):
    """Store 64 rows of a KV head, acc / l_i, and their lse.

    l_i: 1 where a row is empty, which has no keys: its output is 0 and its lse -inf.
    """
    D: gl.constexpr = CONFIG.D
    GROUP: gl.constexpr = CONFIG.GROUP
    B: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    normalized = acc * gl.convert_layout(v_scale / l_i, gl.SliceLayout(1, acc.type.layout))[:, None]
    normalized = gl.convert_layout(normalized.to(out.ptr.dtype.element_ty), B)
    rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, B))
    columns = gl.arange(0, D, gl.SliceLayout(0, B))
    valid = (rows // GROUP < q_len)[:, None] & (columns >= 0)[None, :]
    offsets = row_offsets(out, q_start, head, rows, GROUP)
    gl.store(out.ptr + offsets[:, None] + columns[None, :], normalized, mask=valid)
    store_lse(m_i, l_i, empty, out, q_start, q_len, head, first_row, CONFIG)


@gluon.jit
def store_part(acc, m_i, l_i, partial, slot, half, CONFIG: gl.constexpr):
    """Store the state of 64 rows, half 0 or 1 of a tile, in a slot of KeyParts or Partials."""
    empty = l_i == 0.0
    l_i = gl.where(empty, 1.0, l_i)
    D: gl.constexpr = CONFIG.D
    O: gl.constexpr = acc.type.layout  # noqa: E741
    offset = slot.to(gl.int64) * 128 + half * 64
    normalized = acc * gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, O))[:, None]
    rows = offset + gl.arange(0, 64, gl.SliceLayout(1, O))
    columns = gl.arange(0, D, gl.SliceLayout(0, O))
    gl.store(partial.out + rows[:, None] * D + columns[None, :], normalized)
    lse = gl.where(empty, -float("inf"), m_i + gl.log2(l_i))
    gl.store(partial.lse + offset + gl.arange(0, 64, m_i.type.layout), lse)


@gluon.jit
def store_lse(
    m_i,
    l_i,
    empty,
    out,
    q_start,
    q_len,
    head,
    first_row,
    CONFIG: gl.constexpr,
):
    """Store the natural lse of 64 rows of a KV head."""
    GROUP: gl.constexpr = CONFIG.GROUP
    lse = gl.where(empty, -float("inf"), (m_i + gl.log2(l_i)) * LN2)
    rows = first_row + gl.arange(0, 64, m_i.type.layout)
    offsets = (q_start + rows // GROUP) * (CONFIG.HEADS * GROUP) + head * GROUP + rows % GROUP
    gl.store(out.lse + offsets, lse, mask=rows // GROUP < q_len)
