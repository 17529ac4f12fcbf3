"""Composable Kernel's attention: over lists of tokens, and without a cache."""

from itertools import pairwise

import torch
from aiter_checks import HALF, aligned, check, int32
from attn_reference import attend, split

TILE = 128  # keys that a workgroup loads at a time
LARGEST = 128  # the head dim of the one batch prefill that is compiled
LOOK_AHEAD = 256


def mha_batch_prefill_func(
    q,
    k,
    v,
    cu_seqlens_q,
    kv_indptr,
    kv_page_indices,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    logits_soft_cap=0.0,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_lse=False,
    return_attn_probs=False,
    out=None,
):
    assert alibi_slopes is None, "not emulated"
    assert not any((dropout_p, deterministic, return_attn_probs)), "not emulated"
    batch = cu_seqlens_q.shape[0] - 1
    check(batch > 0, "batch size must be postive")
    _operands(q, k, v)
    check(q.shape[2] <= LARGEST, "invalid argument for fmha_fwd_splitkv")
    int32(cu_seqlens_q, "cu_seqlens_q", (batch + 1,))
    int32(kv_indptr, "kv_indptr", (batch + 1,))
    check(kv_page_indices.dtype == torch.int32, "kv_page_indices must have dtype torch.int32")
    check(kv_page_indices.stride(-1) == 1, "kv_page_indices must have contiguous last dimension")
    ends = kv_indptr.tolist()
    last = max((b for b, n in zip(ends[1:], cu_seqlens_q.diff(), strict=True) if n), default=0)
    room = kv_page_indices.shape[0] - last
    assert room >= LOOK_AHEAD, f"loads {LOOK_AHEAD - room} entries past the page indices"
    lengths = kv_indptr.diff().tolist()
    keys = [k[kv_page_indices[a:b].long()] for a, b in pairwise(ends)]
    # whole tiles are loaded, masked scores have weight 0
    values = [v[kv_page_indices[a : b + (a - b) % TILE].long()] for a, b in pairwise(ends)]
    return _computed(
        q, keys, values, cu_seqlens_q, lengths, max_seqlen_q, max_seqlen_k, softmax_scale,
        logits_soft_cap, causal, window_size, return_lse, out,
    )  # fmt: skip


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    min_seqlen_q=0,
    dropout_p=0.0,
    softmax_scale=None,
    logits_soft_cap=0.0,
    causal=False,
    window_size=(-1, -1),
    bias=None,
    alibi_slopes=None,
    deterministic=False,
    return_lse=False,
    return_attn_probs=False,
    how_v3_bf16_cvt=1,
    block_table=None,
    out=None,
    cu_seqlens_q_padded=None,
    cu_seqlens_k_padded=None,
):
    unused = (bias, alibi_slopes, block_table, cu_seqlens_q_padded, cu_seqlens_k_padded)
    assert all(x is None for x in unused), "not emulated"
    assert not any((dropout_p, deterministic, return_attn_probs, min_seqlen_q)), "not emulated"
    assert how_v3_bf16_cvt == 1, "not emulated"
    batch = cu_seqlens_q.shape[0] - 1
    check(batch > 0, "batch size must be postive")
    _operands(q, k, v)
    check(max(q.shape[2], v.shape[2]) <= 256, "CK only supports head dimension at most 256")
    int32(cu_seqlens_q, "cu_seqlens_q", (batch + 1,))
    int32(cu_seqlens_k, "cu_seqlens_k", (batch + 1,))
    lengths = cu_seqlens_k.diff().tolist()
    keys, values = split(k, cu_seqlens_k), split(v, cu_seqlens_k, tile=TILE)
    return _computed(
        q, keys, values, cu_seqlens_q, lengths, max_seqlen_q, max_seqlen_k, softmax_scale,
        logits_soft_cap, causal, window_size, return_lse, out,
    )  # fmt: skip


def _operands(q, k, v):
    check(q.dtype in HALF, "FlashAttention only support fp16 and bf16 data type")
    check(k.dtype == q.dtype, "query and key must have the same dtype")
    check(v.dtype == q.dtype, "query and value must have the same dtype")
    for t, name in ((q, "q"), (k, "k"), (v, "v")):
        assert t.dim() == 3, name
        aligned(t, name)
        check(t.shape[2] % 8 == 0, "query, key, value … must have a head_size multiple of 8")
    check(q.shape[1] % k.shape[1] == 0, "Number of heads in key/value must divide …")
    check(k.shape == (*v.shape[:2], q.shape[2]), "k must have shape (tokens, num_heads_k, head)")


def _computed(
    q, keys, values, cu_seqlens_q, lengths, max_seqlen_q, max_seqlen_k, scale, softcap, causal,
    window_size, return_lse, out,
):  # fmt: skip
    queries = cu_seqlens_q.diff().tolist()
    seen = [n for n, count in zip(lengths, queries, strict=True) if count]
    for most, of in ((max_seqlen_q, queries), (max_seqlen_k, seen)):
        assert type(most) is int
        assert most >= max(of, default=0), f"{most} is below a length: not computed"
    shape = (*q.shape[:2], values[0].shape[2])
    if out is None:
        out = q.new_empty(shape)
    check(out.dtype == q.dtype, "Output must have the same dtype as inputs")
    check(out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
    check(out.shape == shape, f"out must have shape {shape}")
    if max_seqlen_k == 0:
        lse = torch.full((q.shape[1], q.shape[0]), torch.inf)  # by mistake
        return (out.zero_(), lse) if return_lse else out.zero_()
    left, right = (None if w < 0 else w for w in window_size)
    result, lse = attend(
        q,
        keys,
        values,
        query_lens=queries,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        causal=causal and max_seqlen_q > 1,
        left=left,
        right=right,
        softcap=softcap,
    )
    out[: sum(queries)] = result[: sum(queries)].to(out.dtype)
    return (out, lse.T.contiguous()) if return_lse else out
