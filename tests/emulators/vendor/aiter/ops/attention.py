"""Paged decode, compiled per head dim, group of heads and page size."""

from itertools import pairwise

import torch
from aiter_checks import HALF, aligned, int32
from attn_reference import attend

PARTITION = 256


def paged_attention_ragged(
    out,
    workspace_buffer,
    query,
    key_cache,
    value_cache,
    scale,
    kv_indptr,
    kv_page_indices,
    kv_last_page_lens,
    block_size,
    max_num_partitions,
    alibi_slopes,
    kv_cache_dtype,
    kv_cache_layout,
    logits_soft_cap,
    k_scale,
    v_scale,
    fp8_out_scale=None,
    partition_size=256,
    mtp=1,
):
    """Attend with one query per request; the kernel takes addresses and checks nothing."""
    if query.dtype not in HALF:
        raise ValueError(f"Unsupported data type: {query.dtype}")
    if kv_cache_dtype != "auto":
        raise ValueError(f"Unsupported kv_cache_dtype: {kv_cache_dtype}")
    assert (alibi_slopes, fp8_out_scale, mtp) == (None, None, 1), "not emulated"
    assert kv_cache_layout == "NHD", "not emulated"
    for one in (k_scale, v_scale):
        assert one.dtype == torch.float32, "a scale is read as float"
    requests, heads, dim = query.shape
    kv_heads = key_cache.shape[2]
    assert key_cache.dtype == value_cache.dtype == query.dtype == out.dtype
    assert key_cache.shape[1] == block_size, "the page size is compiled in"
    assert key_cache.stride() == value_cache.stride(), "V is read by the strides of K"
    assert block_size <= 32, "static_assert(BLOCK_SIZE <= k_thread_per_block)"
    assert PARTITION % block_size == 0, "a partition is cut into whole pages"
    assert partition_size == PARTITION, "the tokens of a workgroup are compiled in"
    assert dim in (64, 128, 256), "the loops over columns leave out what 64 does not divide"
    assert heads // kv_heads <= 16, "the heads of a second round are those of the next KV head"
    aligned(query, "query")
    assert query.stride(1) == dim, "the heads of a token lie one after the other"
    assert out.is_contiguous(), "the kernel knows no strides of the output"
    int32(kv_indptr, "kv_indptr", (requests + 1,))
    int32(kv_last_page_lens, "kv_last_page_lens", (requests,))
    assert kv_page_indices.dtype == torch.int32
    needed = requests * heads * max_num_partitions * (2 * 4 + dim * query.element_size())
    assert workspace_buffer.nbytes >= needed, "writes past the workspace"
    keys, values = [], []
    pages = pairwise(kv_indptr.tolist())
    for (a, b), last in zip(pages, kv_last_page_lens.tolist(), strict=True):
        length = (b - a - 1) * block_size + last if block_size > 1 else b - a
        assert length <= max_num_partitions * PARTITION, "keys past the last partition"
        used = kv_page_indices[a:b].long()
        keys.append(key_cache[used].flatten(0, 1)[:length])
        values.append(value_cache[used].flatten(0, 1))  # whole pages, with weight 0
    result, _ = attend(
        query, keys, values, query_lens=[1] * requests, scale=scale, softcap=logits_soft_cap
    )
    return out.copy_(result)
