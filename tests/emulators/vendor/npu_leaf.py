"""The numbers behind the emulated operators of torch-npu, and what its documentation refuses.

The documentation is the wheel's own, torch_npu/_op_plugin_docs.py. What it leaves undefined is NaN.
"""

from itertools import pairwise

import torch
from attn_reference import attend, gather, split
from npu_gdn_leaf import npu_chunk_gated_delta_rule, npu_recurrent_gated_delta_rule
from npu_sparse_leaf import npu_lightning_indexer, npu_sparse_flash_attention

__all__ = [
    "_npu_fused_infer_attention_score_v2_get_max_workspace",
    "_npu_fused_infer_attention_score_v2_infer_output", "_npu_paged_attention_mla",
    "npu_attention_update", "npu_chunk_gated_delta_rule", "npu_fused_infer_attention_score_v2",
    "npu_fused_infer_attention_score_v2_out", "npu_lightning_indexer",
    "npu_recurrent_gated_delta_rule", "npu_scatter_pa_kv_cache", "npu_sparse_flash_attention",
]  # fmt: skip

HALF = (torch.float16, torch.bfloat16)
UNLIMITED = 2147483647
PACKED = ((128, 128), (192, 192), (192, 128))
TILE = 128  # keys that are loaded at once, with weight 0 past a request's last one


def check(ok, message):
    """Refuse what the operator refuses."""
    if not ok:
        raise RuntimeError(f"EZ9999: {message}")


def npu_fused_infer_attention_score_v2(
    query,
    key,
    value,
    *,
    atten_mask=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    block_table=None,
    num_query_heads=1,
    num_key_value_heads=0,
    softmax_scale=1.0,
    pre_tokens=UNLIMITED,
    next_tokens=UNLIMITED,
    input_layout="BSH",
    sparse_mode=0,
    block_size=0,
    return_softmax_lse=False,
    **more,
):
    assert not more, f"not emulated: {list(more)}"
    assert input_layout in ("TND", "BSND"), "not emulated"
    packed, paged = input_layout == "TND", block_table is not None
    for t in (query, key, value, atten_mask):
        check(t is None or t.is_contiguous(), "non-contiguous tensors are not supported")
    check(query.dtype in HALF, "query: float16, bfloat16, int8")
    check(query.dtype == key.dtype == value.dtype, "one dtype")
    check(query.dim() == (3 if packed else 4), f"query has no layout {input_layout}")
    heads, dim = query.shape[-2:]
    kv_heads = num_key_value_heads or num_query_heads
    check(heads == num_query_heads, "num_query_heads is not that of query")
    check(heads <= 256, "N up to 256")
    check(heads % kv_heads == 0, "the heads of the keys divide those of the queries")
    check(heads // kv_heads <= 64, "up to 64 query heads per head of the keys")
    check(dim % 16 == 0, "D is a multiple of 16")
    check(dim <= 512, "D up to 512")
    if packed:
        queries = _packed_lengths(query, key, value, actual_seq_qlen, actual_seq_kvlen, paged)
        lone = False
    else:
        queries = [query.shape[1]] * query.shape[0]
        check(len(queries) <= 65536, "B up to 65536")
        lone = query.shape[1] == 1
        check(key.shape == value.shape, "key and value have the same shape")
    lengths = _key_lengths(key, actual_seq_kvlen, packed, paged, len(queries))
    if paged:
        v_dim = value.shape[-1] // kv_heads
        _pages(key, value, block_table, block_size, lengths, kv_heads * dim, lone)
        shape = (*key.shape[:2], kv_heads, dim)
        keys = gather(key.view(shape), block_table, lengths)
        values = gather(value.view(shape), block_table, lengths, whole=True)
    else:
        check(key.shape[-2] == kv_heads, "num_key_value_heads is not that of key")
        v_dim = value.shape[-1]
        if packed:
            ends = torch.tensor([0, *actual_seq_kvlen])
            keys, values = split(key, ends), split(value, ends, tile=TILE)
        else:
            keys, values = list(key), list(value)
    seen = _visible(
        atten_mask, sparse_mode, pre_tokens, next_tokens, lone, lengths,
        block_table.shape[1] * block_size if paged else key.shape[1],
    )  # fmt: skip
    if sparse_mode == 3 and packed:
        check(all(q <= n for q, n in zip(queries, lengths, strict=True)), "more queries than keys")
    out, lse = attend(
        query.reshape(-1, heads, dim),
        keys,
        values,
        query_lens=queries,
        scale=softmax_scale,
        **seen,
    )
    out = out.to(query.dtype).view(*query.shape[:-1], v_dim)
    lse = lse.masked_fill(lse == -torch.inf, torch.nan)  # of no keys: not documented
    if not return_softmax_lse:
        return out, torch.zeros(1)
    return out, lse[..., None] if packed else lse.view(query.shape[:-1]).transpose(1, 2)[
        ..., None
    ].contiguous()


def _npu_fused_infer_attention_score_v2_get_max_workspace(query, key, value, **more):
    npu_fused_infer_attention_score_v2(query, key, value, **more)  # refuses what it refuses
    return torch.full((64,), torch.nan)


def _npu_fused_infer_attention_score_v2_infer_output(query, value, **more):
    """Return the output and its LSE, unwritten, in the shapes that the call has."""
    assert more["input_layout"] == "BSND", "not emulated"
    heads, width = more["num_query_heads"], value.shape[-1]
    if more.get("block_table") is not None:
        width //= more["num_key_value_heads"]
    requests, count = query.shape[:2]
    out = query.new_full((requests, count, heads, width), torch.nan)
    if not more.get("return_softmax_lse"):
        return out, torch.zeros(1)
    return out, torch.full((requests, heads, count, 1), torch.nan)


def npu_fused_infer_attention_score_v2_out(query, key, value, *, workspace=None, out=None, **more):
    check(workspace is not None, "a task of a graph has its workspace")
    found = npu_fused_infer_attention_score_v2(query, key, value, **more)
    for own, new in zip(out, found, strict=True):
        check(own.shape == new.shape, "out has another shape")
        own.copy_(new)
    return found


def _packed_lengths(query, key, value, ends, key_ends, paged):
    """Return the queries of each request of a packed call."""
    check(query.dtype == torch.bfloat16, "TND: bfloat16 alone")
    check(ends is not None and key_ends is not None, "TND: both lists of lengths")
    check(len(ends) <= 4096, "TND: up to 4096 requests")
    check(list(ends) == sorted(ends), "TND: actual_seq_qlen is cumulative")
    check(ends[-1] <= query.shape[0], "TND: more queries than there are")
    dims = (query.shape[-1], query.shape[-1] if paged else value.shape[-1])
    check(dims in PACKED, f"TND: D {dims}")
    return [b - a for a, b in pairwise([0, *ends])]


def _key_lengths(key, lengths, packed, paged, requests):
    if lengths is None:
        check(not paged, "pages need actual_seq_kvlen")
        return [key.shape[1]] * requests
    check(len(lengths) == requests, "one length for each request")
    check(min(lengths, default=0) >= 0, "a negative length")
    if paged or not packed:
        return list(lengths)
    check(list(lengths) == sorted(lengths), "TND: actual_seq_kvlen is cumulative without pages")
    check(lengths[-1] <= key.shape[0], "TND: more keys than there are")
    return [b - a for a, b in pairwise([0, *lengths])]


def _pages(key, value, table, block_size, lengths, width, lone):
    check(key.dim() == 3, "not emulated: pages other than (blocks, block, H)")
    check(key.shape == value.shape, "key and value have the same shape")
    check(key.shape[1] == block_size, "block_size is not that of key")
    check(block_size <= 512, "block_size up to 512")
    check(
        block_size % (16 if lone else 128) == 0, "block_size: multiples of 16, or 128 with Q_S > 1"
    )
    check(key.shape[2] == width, "H is not heads · D")
    check(width <= 65535, "H up to 65535")
    check(not lone or key.numel() < 2**31, "more numbers than int32 has")
    check(table.dtype == torch.int32, "block_table: int32")
    check(table.is_contiguous(), "non-contiguous tensors are not supported")
    check(table.dim() == 2 and table.shape[0] == len(lengths), "block_table: one row per request")
    check(-(-max(lengths) // block_size) <= table.shape[1], "block_table: too few columns")


def _visible(mask, mode, before, after, lone, lengths, columns):
    """Return what the queries see, as arguments of the reference."""
    if lone:  # sparse_mode, pre_tokens and next_tokens have no effect
        if mask is None:
            return {}
        check(mask.dtype in (torch.bool, torch.int8, torch.uint8), "atten_mask: bool, int8, uint8")
        check(mask.shape[-1] >= columns, "atten_mask: fewer columns than the keys have room for")
        check(
            mask.shape in ((len(lengths), 1, 1, mask.shape[-1]), (1, 1, 1, mask.shape[-1])),
            "atten_mask: shape",
        )
        rows = mask.expand(len(lengths), -1, -1, -1)[:, 0]
        return {"masks": [~row[:, :n].bool() for row, n in zip(rows, lengths, strict=True)]}
    check(mode in (0, 3, 4), "not emulated: sparse_mode")
    if mode == 0:
        check(mask is None, "not emulated: a mask of one's own for several queries")
        return {}
    check(mask is not None and tuple(mask.shape[-2:]) == (2048, 2048), "atten_mask: 2048 x 2048")
    check(mask.dtype in (torch.bool, torch.int8, torch.uint8), "atten_mask: bool, int8, uint8")
    row = torch.arange(2048)
    assert torch.equal(mask.bool().view(2048, 2048), row > row[:, None]), "1 hides what comes after"
    return {"causal": True} if mode == 3 else {"left": before, "right": after}


def npu_scatter_pa_kv_cache(
    key, value, key_cache, value_cache, slot_mapping, *, cache_mode="PA_NZ"
):
    for t in (key, value, key_cache, value_cache, slot_mapping):
        check(t.is_contiguous(), "non-contiguous tensors are not supported")
    check(len({t.dtype for t in (key, value, key_cache, value_cache)}) == 1, "one dtype")
    check(slot_mapping.dtype in (torch.int32, torch.int64), "slot_mapping: int32, int64")
    check(key.dim() == 3 and key.shape[:2] == value.shape[:2], "key and value: 3 dims")
    check(key_cache.dim() == 4 and value_cache.dim() == 4, "caches: 4 dims")
    check(slot_mapping.shape == key.shape[:1], "slot_mapping: one per token")
    slots = slot_mapping.long()
    blocks, size = key_cache.shape[:2]
    assert slots.numel() == 0 or (slots.min() >= 0 and slots.max() < blocks * size), (
        "writes outside"
    )
    _, where, count = slots.unique(return_inverse=True, return_counts=True)
    doubtful = (count > 1)[where]
    for x, cache in ((key, key_cache), (value, value_cache)):
        rows = torch.where(doubtful[:, None, None], torch.nan, x)  # slots that several tokens have
        if cache_mode in (None, "Norm"):
            cache.view(blocks * size, *x.shape[1:])[slots] = rows
        else:  # PA_NZ: 16 columns of all tokens of a block lie together
            tiled = cache.view(blocks, -1, size, 16)
            tiled[slots // size, :, slots % size] = rows.reshape(len(slots), -1, 16)


def npu_attention_update(lse, local_out, update_type):
    """Merge parts by the documented formula: NaN where all are -inf, or any is +inf."""
    check(update_type in (0, 1), "update_type is 0 or 1")
    check(len(lse) == len(local_out), "one lse for each local_out")
    check(1 <= len(lse) <= 16, "sp is from 1 to 16")
    check(local_out[0].shape[1] in range(8, 513, 8), "head_dim: a multiple of 8 from 8 to 512")
    for sums, part in zip(lse, local_out, strict=True):
        check(sums.dtype == torch.float32, "lse: float32")
        check(part.dtype in (torch.float32, *HALF), "local_out: float32, float16, bfloat16")
        check(part.dtype == local_out[0].dtype, "local_out: one dtype")
        check(sums.dim() == 1 and part.dim() == 2, "lse [N], local_out [N, head_dim]")
        check(part.shape == (sums.numel(), local_out[0].shape[1]), "lse and local_out fit")
        check(sums.is_contiguous() and part.is_contiguous(), "ND, contiguous")
    sums = torch.stack(list(lse))
    most = sums.amax(0)
    total = most + (sums - most).exp().sum(0).log()
    parts = torch.stack([part.float() for part in local_out])
    out = (parts * (sums - total).exp()[..., None]).sum(0).to(local_out[0].dtype)
    return out, total if update_type == 1 else torch.full_like(total, torch.nan)


def _npu_paged_attention_mla(
    query,
    key_cache,
    num_kv_heads,
    num_heads,
    scale_value,
    block_table,
    context_lens,
    mla_vheadsize,
    out,
):
    for t in (query, key_cache, block_table, context_lens, out):
        check(t.is_contiguous(), "non-contiguous tensors are not supported")
    check(query.dtype in HALF, "query: float16, bfloat16")
    check(query.dtype == key_cache.dtype == out.dtype, "one dtype")
    requests, heads, dim = query.shape
    check(heads == num_heads, "num_heads is not that of query")
    check(num_kv_heads == 1, "one latent head")
    check(key_cache.shape[1:] == (key_cache.shape[1], 1, dim), "key_cache: (blocks, block, 1, D)")
    check(key_cache.shape[1] <= 128, "block_size up to 128")
    check(requests <= 8192, "up to 8192 requests")
    check(block_table.dtype == torch.int32, "block_table: int32")
    check(block_table.shape[0] == requests, "block_table: one row per query")
    check(context_lens.dtype == torch.int32, "context_lens: int32")
    check(context_lens.device.type == "cpu", "context_lens: on the host")
    check(context_lens.shape == (requests,), "context_lens: one per query")
    check(out.shape == (requests, heads, mla_vheadsize), "out: (queries, heads, mla_vheadsize)")
    lengths = context_lens.tolist()
    values = gather(key_cache, block_table, lengths, whole=True)
    result, _ = attend(
        query,
        gather(key_cache, block_table, lengths),
        [x[..., :mla_vheadsize] for x in values],
        query_lens=[1] * requests,
        scale=scale_value,
    )
    out.copy_(result)
