"""The scores of the indexer: each query against all keys that it sees."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton.sparse.e4m3 import from_e4m3


@triton.jit
def load_index_keys(keys, scales, table, position, seen, strides, C: tl.constexpr):
    """Return index keys [BN, BD] in the dtype that they are multiplied in, and scales [BN]."""
    page = tl.load(table + position // C.PAGE, mask=seen, other=0).to(tl.int64)
    offset = position % C.PAGE
    d = tl.arange(0, C.BD)
    at = page * strides.page + offset * strides.token
    inside = seen[:, None] & (d < C.D)[None, :]
    raw = tl.load(keys + at[:, None] + d[None, :], mask=inside, other=0)
    if C.FP8:
        key = from_e4m3(raw)
        scale = tl.load(scales + page * strides.scales_page + offset, mask=seen, other=0.0)
    else:
        key = raw
        scale = tl.full((C.BN,), 1.0, tl.float32)
    return key, scale


@triton.jit(do_not_specialize=["tokens", "first", "table_stride", "row_stride"])
def index_scores(
    q, q_token, q_head, weights, weights_token, keys, scales, strides,
    page_table, table_stride, seq_lens, cu_seqlens_q, requests, tokens, first, scores, row_stride,
    TOPK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Score C.BN keys for C.BT tokens; consecutive tokens of one request share what is loaded.

    Queries that see at most TOPK keys need no scores. What a query does not see is not written.
    """
    position = tl.program_id(1) * C.BN + tl.arange(0, C.BN)
    head = tl.arange(0, C.BH)
    d = tl.arange(0, C.BD)
    for i in range(C.BT):
        row = tl.program_id(0) * C.BT + i
        token = (first + row).to(tl.int64)
        here = row < tokens
        request = tl.load(requests + token, mask=here, other=0)
        end = tl.load(cu_seqlens_q + request + 1)
        visible = tl.load(seq_lens + request) - (end - token).to(tl.int32) + 1
        if here & (visible > TOPK) & (tl.program_id(1) * C.BN < visible):
            seen = position < visible
            table = page_table + request.to(tl.int64) * table_stride
            k, scale = load_index_keys(keys, scales, table, position, seen, strides, C)
            of_heads = head < C.HEADS
            at = token * q_token + head[None, :] * q_head + d[:, None]
            inside = of_heads[None, :] & (d < C.D)[:, None]
            query = tl.load(q + at, mask=inside, other=0.0)
            w = tl.load(weights + token * weights_token + head, mask=of_heads, other=0.0)
            products = tl.dot(k.to(query.dtype), query, input_precision="ieee")
            score = tl.sum(tl.maximum(products, 0.0) * w[None, :], 1) * scale
            tl.store(scores + row.to(tl.int64) * row_stride + position, score, mask=seen)
