"""The numbers behind torch-npu's emulated operators of sparse attention, and what they refuse.

Sources: the wheel's torch_npu/_op_plugin_docs.py, its Meta kernels, and CANN's pages of
aclnnSparseFlashAttention and aclnnLightningIndexer.
"""

from itertools import pairwise

import torch
from attn_reference import attend

HALF = (torch.float16, torch.bfloat16)
LENGTHS = "int32 on the device, one number for each request"


def check(ok, message):
    """Refuse what the operator refuses."""
    if not ok:
        raise RuntimeError(f"EZ9999: {message}")


def _dense(**tensors):
    for name, x in tensors.items():
        check(x.is_contiguous(), f"{name}: non-contiguous tensors are not supported")
        check(x.numel() > 0, f"{name}: empty tensors are not supported")


def _sums(ends, total):
    """Return how many of each request a list of sums says."""
    check(ends is not None and ends.dtype == torch.int32 and ends.dim() == 1, LENGTHS)
    sums = ends.tolist()
    check(min(sums) >= 0 and sums == sorted(sums), "TND: the lengths are cumulative")
    check(sums[-1] <= total, "TND: more tokens than there are")
    return [b - a for a, b in pairwise([0, *sums])]


def npu_sparse_flash_attention(
    query,
    key,
    value,
    sparse_indices,
    scale_value,
    *,
    actual_seq_lengths_query=None,
    actual_seq_lengths_kv=None,
    query_rope=None,
    key_rope=None,
    sparse_block_size=1,
    layout_query="BSND",
    layout_kv="BSND",
    sparse_mode=3,
    attention_mode=0,
    return_softmax_lse=False,
    **more,
):
    assert not more, f"not emulated: {list(more)}"
    assert (layout_query, layout_kv) == ("TND", "TND"), "not emulated"
    assert (sparse_block_size, return_softmax_lse) == (1, False), "not emulated"
    check(value is not None, "value=None: CANN 9.2 or later alone")
    check(attention_mode == 2, "attention_mode: 2 alone, absorbed MLA")
    check(query_rope is not None and key_rope is not None, "attention_mode 2: both ropes")
    _dense(query=query, key=key, value=value, sparse_indices=sparse_indices)
    _dense(query_rope=query_rope, key_rope=key_rope)
    check(query.dtype in HALF, "query: float16, bfloat16")
    check(len({x.dtype for x in (query, key, value, query_rope, key_rope)}) == 1, "one dtype")
    tokens, heads, dim = query.shape
    check(heads in (1, 2, 4, 8, 16, 32, 64, 128), f"{heads} heads: 1, 2, 4 … 128")
    check(dim == 512 and key.shape[1:] == (1, 512), "D 512, and one head of keys")
    check(key.shape == value.shape, "value has the shape of key")
    check(query_rope.shape == (tokens, heads, 64), "query_rope: (T, N, 64)")
    check(key_rope.shape == (key.shape[0], 1, 64), "key_rope: (T, 1, 64)")
    check(sparse_indices.dtype == torch.int32, "sparse_indices: int32")
    check(sparse_indices.shape[:2] == (tokens, 1), "sparse_indices: (T, 1, K)")
    check(sparse_mode in (0, 3), "not emulated: sparse_mode")
    queries = _sums(actual_seq_lengths_query, tokens)
    keys = _sums(actual_seq_lengths_kv, key.shape[0])
    check(len(queries) == len(keys), LENGTHS)
    out = torch.full_like(query, torch.nan)  # what no request has is not written
    first = begin = 0
    for count, n in zip(queries, keys, strict=True):
        for i in range(count):
            row = sparse_indices[first + i, 0]
            valid = row[row >= 0].long()
            assert (row[: len(valid)] >= 0).all(), "valid indices come first"
            assert not len(valid) or valid.max() < n, "reads outside of its request"
            if sparse_mode == 3:
                valid = valid[valid <= n - count + i]
            chosen = slice(begin, begin + n)
            k, v, rope = (x[chosen][valid] for x in (key, value, key_rope))
            q = torch.cat([query[first + i], query_rope[first + i]], -1)[None]
            got, _ = attend(q, [torch.cat([k, rope], -1)], [v], query_lens=[1], scale=scale_value)
            # of a query without keys: not documented
            out[first + i] = got[0].to(query.dtype) if len(valid) else torch.nan
        first, begin = first + count, begin + n
    return out, torch.zeros(0), torch.zeros(0)


def npu_lightning_indexer(
    query,
    key,
    weights,
    *,
    actual_seq_lengths_query=None,
    actual_seq_lengths_key=None,
    block_table=None,
    layout_query="BSND",
    layout_key="BSND",
    sparse_count=2048,
    sparse_mode=3,
    **more,
):
    """Return positions in no order, of equal scores the latest: neither is documented."""
    assert not more, f"not emulated: {list(more)}"
    assert (layout_query, layout_key) == ("TND", "PA_BSND"), "not emulated"
    _dense(query=query, key=key, weights=weights, block_table=block_table)
    _dense(lengths=actual_seq_lengths_key)
    check(query.dtype in HALF and query.dtype == key.dtype, "query, key: float16, bfloat16")
    check(weights.dtype == query.dtype, "weights: the dtype of query")
    tokens, heads, dim = query.shape
    check(heads <= 64 and dim == 128, "up to 64 heads of dim 128")
    check(key.dim() == 4 and key.shape[2:] == (1, 128), "key: (blocks, block, 1, 128)")
    size = key.shape[1]
    check(size % 16 == 0 and size <= 1024, "block_size: multiples of 16 up to 1024")
    check(weights.shape == (tokens, heads), "weights: (T, N)")
    check(1 <= sparse_count <= 2048 or sparse_count in range(3072, 8193, 1024), "sparse_count")
    check(sparse_mode in (0, 3), "sparse_mode: 0, 3")
    queries = _sums(actual_seq_lengths_query, tokens)
    lengths = actual_seq_lengths_key
    check(lengths.dtype == torch.int32 and lengths.shape == (len(queries),), LENGTHS)
    check(block_table.dtype == torch.int32 and block_table.dim() == 2, "block_table: int32, 2 dims")
    check(block_table.shape[0] == len(queries), "block_table: one row per request")
    lengths = lengths.tolist()
    check(-(-max(lengths) // size) <= block_table.shape[1], "block_table: too few columns")
    # rows that no request has are not written
    chosen = torch.full((tokens, 1, sparse_count), -(2**30), dtype=torch.int32)
    first = 0
    for row, count, n in zip(block_table, queries, lengths, strict=True):
        own = key[row[: -(-n // size)].long()].flatten(0, 2)[:n].float()
        for i in range(first, first + count):
            seen = n if sparse_mode == 0 else n - count + (i - first) + 1
            scores = weights[i].float() @ (query[i].float() @ own[:seen].T).relu()
            best = scores.flip(0).argsort(descending=True, stable=True)[:sparse_count]
            best = (seen - 1 - best).int()
            chosen[i, 0] = -1
            chosen[i, 0, : len(best)] = best
        first += count
    return chosen, torch.zeros(0)
