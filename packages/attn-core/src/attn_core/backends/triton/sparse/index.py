"""The scores of the indexer: each query against all keys that it sees."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.sparse.e4m3 import from_e4m3


@triton.jit
def load_index_keys(keys, scales, table, position, valid, strides, C: tl.constexpr):
    """Return index keys [BN, BD] as they are stored, and their scales [BN]."""
    page = tl.load(table + position // C.PAGE, mask=valid, other=0).to(tl.int64)
    offset = position % C.PAGE
    d = tl.arange(0, C.BD)
    offsets = page * strides.page + offset * strides.token
    mask = valid[:, None] & (d < C.D)[None, :]
    key = tl.load(keys + offsets[:, None] + d[None, :], mask=mask, other=0.0)
    if C.FP8:
        scale = tl.load(scales + page * strides.scales_page + offset, mask=valid, other=0.0)
        # of a key with a NaN or an infinity: all its products are NaN, and relu of these is 0
        scale = tl.where(scale < float("inf"), scale, 0.0)
    else:
        scale = tl.full((C.BN,), 1.0, tl.float32)
    return key, scale


@triton.jit
def load_queries(q, q_token, q_head, weights, weights_token, token, C: tl.constexpr):
    """Return the queries [BH, BD] of a token and their weights [BH]."""
    head = tl.arange(0, C.BH)
    d = tl.arange(0, C.BD)
    of_heads = head < C.HEADS
    mask = of_heads[:, None] & (d < C.D)[None, :]
    offsets = token * q_token + head.to(tl.int64)[:, None] * q_head + d[None, :]
    query = tl.load(q + offsets, mask=mask, other=0.0)
    return query, tl.load(weights + token * weights_token + head, mask=of_heads, other=0.0)


@triton.jit
def as_factor(key, dtype: tl.constexpr, C: tl.constexpr):
    """Return keys in the dtype that they are multiplied in, see factor_dtype."""
    if C.FP8 and not C.NATIVE:
        key = from_e4m3(key)
    return key.to(dtype)


@triton.jit
def weigh(key, query, w):
    """Return the scores [BN] of keys before their scales."""
    products = tl.dot(key, tl.trans(query), input_precision="ieee")
    return tl.sum(tl.maximum(products, 0.0) * w[None, :], 1)


@triton.jit(do_not_specialize=["tokens", "first", "span", "table_stride", "row_stride"])
def index_scores(
    q, weights, q_token, q_head, weights_token, page_table, table_stride, seq_lens, cu_seqlens_q,
    requests, tokens, first, scores, row_stride, span, keys, scales, strides,
    TOPK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Score `span` keys for C.BT tokens. Keys stay while tokens pass, or one token while keys do.

    Queries that see at most TOPK keys need no scores. What a query does not see is not written.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    begin = tl.program_id(1) * span
    row = tl.program_id(0) * C.BT
    last = tl.minimum(row + C.BT, tokens)
    while row < last:
        request = tl.load(requests + first + row)
        end = tl.load(cu_seqlens_q + request + 1)
        length = tl.load(seq_lens + request)
        table = page_table + request.to(tl.int64) * table_stride
        stop = tl.maximum(tl.minimum(last, end - first), row + 1)  # rows of the request
        max_visible = tl.minimum(length - (end - first - stop), length)  # that any of them sees
        if (max_visible > TOPK) & (begin < max_visible):
            if C.BT == 1:
                token = (first + row).to(tl.int64)
                query, w = load_queries(q, q_token, q_head, weights, weights_token, token, C)
                out = scores + row.to(tl.int64) * row_stride
                for start in tl.range(begin, tl.minimum(begin + span, max_visible), C.BN):
                    position = start + tl.arange(0, C.BN)
                    valid = position < max_visible
                    key, scale = load_index_keys(keys, scales, table, position, valid, strides, C)
                    score = weigh(as_factor(key, dtype, C), query, w)
                    tl.store(out + position, score * scale, mask=valid)
            else:
                position = begin + tl.arange(0, C.BN)
                valid = position < max_visible
                key, scale = load_index_keys(keys, scales, table, position, valid, strides, C)
                key = as_factor(key, dtype, C)
                for r in tl.range(row, stop):
                    row64 = tl.full((), 0, tl.int64) + r  # the interpreter counts in plain numbers
                    token = first + row64
                    visible = tl.minimum(length - (end - first - r) + 1, length)
                    query, w = load_queries(q, q_token, q_head, weights, weights_token, token, C)
                    score = weigh(key, query, w)
                    valid = (position < visible) & (visible > TOPK)
                    out = scores + row64 * row_stride
                    tl.store(out + position, score * scale, mask=valid)
        row = stop
