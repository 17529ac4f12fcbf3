"""Unified attention: every pass over a page table, in causal order."""

import torch
from aiter_checks import fill, int32
from attn_reference import attend, gather

TILE = 64  # keys
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def unified_attention(
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    max_seqlen_q,
    seqused_k,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    block_table,
    softcap,
    q_descale,
    k_descale,
    v_descale,
    alibi_slopes=None,
    output_scale=None,
    qq_bias=None,
    sinks=None,
):
    assert causal, "Only causal attention is supported"
    assert q_descale is None, "Q scales not supported"
    assert all(x is None for x in (alibi_slopes, output_scale, qq_bias)), "not emulated"
    if sinks is not None:
        assert sinks.shape[0] == q.shape[1], "Sinks must be num_query_heads size"
    page = v.shape[1]
    assert page >= 16, "a tile of fewer than 16 keys does not compile"
    assert page & (page - 1) == 0, "arange's range must be a power of 2"
    requests = cu_seqlens_q.shape[0] - 1
    int32(cu_seqlens_q, "cu_seqlens_q", (requests + 1,))
    int32(seqused_k, "seqused_k", (requests,))
    assert block_table.dtype == torch.int32
    whole = block_table.shape[1] * page % TILE == 0
    assert whole, "the pages of a whole tile are looked up: reads past the table"
    assert all(t.stride(-1) == 1 for t in (q, out, block_table)), "columns are read one by one"
    lengths, queries = seqused_k.tolist(), cu_seqlens_q.diff().tolist()
    assert max(queries) <= max_seqlen_q, "max_seqlen_q is below a query: another kernel"
    assert max(lengths) <= max_seqlen_k, "max_seqlen_k is below a length: another kernel"
    keys = [_read(x, k_descale, q) for x in gather(k, block_table, lengths)]
    # a tile is a page in decode: its tail is loaded too, with weight 0
    values = [_read(x, v_descale, q) for x in gather(v, block_table, lengths, whole=True)]
    result, _ = attend(
        q,
        keys,
        values,
        query_lens=queries,
        scale=softmax_scale,
        causal=True,
        left=window_size[0] if window_size[0] >= 0 else None,
        softcap=softcap,
        sinks=sinks,
    )
    fill(out, result)


def _read(x, descale, q):
    """Dequantise a tile, in the dtype of the queries."""
    if x.dtype not in FP8:
        return x
    assert descale.dtype == torch.float32
    return (x.float() * descale).to(q.dtype)
