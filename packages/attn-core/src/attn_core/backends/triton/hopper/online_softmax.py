"""The softmax of prompts and of 128 rows in decode: a thread sums alone, old sums seldom shrink."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Gluon compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from attn_core.backends.triton.hopper.softmax import visible_scores

GROWTH = gl.constexpr(8.0)  # powers of two

# Not in pools with pages that threads gather (SELDOM): there it was slower on an H100 than
# softmax_step, and a request has the same bits whether its keys lie in pages or side by side.


@gluon.jit
def no_sums(S: gl.constexpr, CONFIG: gl.constexpr):
    """Return the l_i of online_softmax before any key; S: the layout of scores."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    if CONFIG.SELDOM:
        return gl.full([64, 4], 0.0, gl.float32, L)
    else:
        return gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S))


@gluon.jit
def row_sums(l_i, m_i, CONFIG: gl.constexpr):
    """Return the l_i of rows [64]."""
    if CONFIG.SELDOM:
        return gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
    else:
        return l_i


@gluon.jit
def update_max(s, start, q_idx, m_i, mask, scales, CONFIG: gl.constexpr):
    """Return the scores of keys start … start + BN, -inf where hidden, their scale and the new m_i.

    m_i: what p is relative to, a maximum of the keys before. It grows by GROWTH or not at all, so
    that most blocks leave the old sums as they are, as in FlashAttention-4; p is at most 2^GROWTH.
    q_idx: the query of each row. The scale, of base 2, is not applied yet.
    """
    s, log2_scale = visible_scores(s, start, q_idx, mask, scales, CONFIG)
    highest = gl.max(s, 1) * log2_scale
    if CONFIG.SELDOM:
        m_new = gl.where(highest > m_i + GROWTH, highest, m_i)
    else:
        m_new = gl.maximum(m_i, highest)
    return s, log2_scale, m_new


@gluon.jit
def exp_and_sum(s, log2_scale, m_i, m_new, l_i, CONFIG: gl.constexpr):
    """Return p of the scores that update_max returned, the new l_i, and alpha.

    l_i [64, 4], see no_sums: what each of four threads has summed of a row. alpha: by what the old
    sums shrink.
    """
    m_base = gl.where(m_new == -float("inf"), 0.0, m_new)
    p = gl.exp2(s * log2_scale - m_base[:, None])
    alpha = gl.exp2(m_i - m_base)
    if CONFIG.SELDOM:
        LAYOUT: gl.constexpr = l_i.type.layout
        sums = gl.sum(gl.sum(gl.reshape(p, [64, CONFIG.BN // 8, 4, 2]), 3), 1)
        l_i = gl.convert_layout(l_i, sums.type.layout)
        shrink = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None]
        l_i = gl.convert_layout(l_i * shrink + sums, LAYOUT)
    else:
        l_i = l_i * alpha + gl.sum(p, 1)
    return p, l_i, alpha


@gluon.jit
def online_softmax(s, start, q_idx, m_i, l_i, mask, scales, CONFIG: gl.constexpr):
    """Return p of the scores of keys start … start + BN, the new m_i and l_i, and alpha."""
    s, log2_scale, m_new = update_max(s, start, q_idx, m_i, mask, scales, CONFIG)
    p, l_i, alpha = exp_and_sum(s, log2_scale, m_i, m_new, l_i, CONFIG)
    return p, m_new, l_i, alpha


@gluon.jit
def finish_product(product, weights, values, step, full_step):
    """Wait for the product of weights with the values of a step, release these, return the sums.

    full_step: step itself, or the next one, whose values lie in another stage. Waiting for them
    keeps the order: ptxas moves the wait for a product as far ahead as it can, but not past a loop.
    So what stands before the call runs beside the product.
    """
    values.wait_full(full_step)
    acc, _ = hopper.warpgroup_mma_wait(0, deps=[product, weights])
    values.release(step)
    return acc


@gluon.constexpr_function
def _rescale_assembly(count):
    """Return instructions that multiply `count` sums of a thread, its rows in turns of two."""
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i}; " for i in range(count))
    rows = 2 * count, 2 * count + 2
    return (
        "{ .reg .pred p, q; "
        f"setp.neu.f32 p, ${rows[0]}, 0f3F800000; setp.neu.f32 q, ${rows[1]}, 0f3F800000; "
        "or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; "
        f"@!p bra KEPT; {products}KEPT: }}"
    )


@gluon.constexpr_function
def _rescale_constraints(count):
    tied = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + tied + ["f"] * count)


@gluon.jit
def rescale(acc, alpha, CONFIG: gl.constexpr):
    """Return acc [64, …] times alpha [64, 1]; a warp whose rows all keep theirs skips it.

    It skips or multiplies 64 sums of a thread at a time, or all of them.
    """
    COUNT: gl.constexpr = min(acc.shape[1] // 2, 64)
    if CONFIG.SELDOM:
        return gl.inline_asm_elementwise(
            _rescale_assembly(COUNT),
            _rescale_constraints(COUNT),
            [acc, alpha],
            dtype=gl.float32,
            is_pure=True,
            pack=COUNT,
        )
    else:
        return acc * alpha
