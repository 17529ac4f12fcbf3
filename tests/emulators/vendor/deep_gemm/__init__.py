"""deep_gemm of sgl-deep-gemm 0.1.4.post1: the indexer's scores on sm90, emulated on a CPU."""

import torch

_FP8 = torch.float8_e4m3fn
_BLOCK = 256  # scores of a row are stored in steps of so many


def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0):
    """Score q [T, H, 128] against keys [n, 128] from ks to ke; the other columns are garbage."""
    keys, scales = kv
    tokens, heads, dim = q.shape
    _check(q.dtype == _FP8 and keys.dtype == _FP8, "q and kv must be float8_e4m3fn")
    _check(heads in (32, 64), "arch_major == 9 and (num_heads == 32 or num_heads == 64)")
    _check(dim in (32, 64, 128) and keys.dim() == 2 and keys.shape[1] == dim, "head_dim")
    _check(scales.shape == keys.shape[:1] and scales.dtype == torch.float32, "kv scales")
    _check(weights.shape == (tokens, heads), "seq_len == _seq_len and num_heads == _num_heads")
    _check(weights.dtype == torch.float32, "weights must be float32")
    for x in (q, keys, scales, weights, ks, ke):
        _check(x.is_contiguous(), "is_contiguous()")
    for x in (ks, ke):
        _check(x.dtype == torch.int32 and x.shape == (tokens,), "cu_seq_len_k")
    if clean_logits or max_seqlen_k:
        raise NotImplementedError("no emulation of this one")
    logits = _garbage(tokens, len(keys))
    for t, (first, end) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
        logits[t, first:end] = _scores(q[t], weights[t], keys[first:end], scales[first:end])
    return logits


def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None):
    """Cut contexts int32 [B, next_n] into parts: int32 [num_sms + 1, 2]."""
    _check(context_lens.dtype == torch.int32, "context_lens.scalar_type() == torch::kInt")
    _check(context_lens.dim() == 2, "context_lens.dim() == 2")
    _check(context_lens.is_contiguous(), "context_lens.is_contiguous()")
    _check(block_kv == 64, "block_kv == 64")
    if indices is not None:
        raise NotImplementedError("no emulation of this one")
    schedule = torch.zeros(num_sms + 1, 2, dtype=torch.int32)
    blocks = (context_lens + block_kv - 1) // block_kv
    schedule[-1] = torch.tensor([len(context_lens), int(blocks.sum())], dtype=torch.int32)
    return schedule


def fp8_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
    clean_logits=False, indices=None,
):  # fmt: skip
    """Score q [B, next_n, H, 128] against pages uint8 [pages, 64, 1, 132], values before scales.

    Columns from a context's length on are garbage, and so is what another schedule leaves out.
    """
    batch, next_n, heads, dim = q.shape
    _check(q.dtype == _FP8, "q must be float8_e4m3fn")
    _check(next_n in (1, 2), "next_n == 1 or next_n == 2")
    _check(heads in (32, 64), "Unsupported num_heads for paged MQA logits")
    _check(kv_cache.dtype == torch.uint8, "fused_kv_cache.scalar_type() == torch::kByte")
    _check(kv_cache.shape[1:] == (64, 1, dim + 4), "block_kv == 64")
    _check(kv_cache.stride(1) == dim + 4 and kv_cache.stride(3) == 1, "fused_kv_cache.stride(1)")
    _check(weights.shape == (batch * next_n, heads), "_batch_size_next_n == batch_size * next_n")
    _check(weights.dtype == torch.float32, "weights must be float32")
    _check(context_lens.dim() == 2, "context_lens.dim() == 2")
    _check(context_lens.shape == (batch, next_n), "batch_size == __batch_size")
    _check(context_lens.dtype == torch.int32, "context_lens.scalar_type() == torch::kInt")
    _check(block_table.dtype == torch.int32 and len(block_table) == batch, "block_table")
    _check(block_table.stride(1) == 1 and q.is_contiguous(), "is_contiguous()")
    if clean_logits or indices is not None:
        raise NotImplementedError("no emulation of this one")
    logits = _garbage(batch * next_n, max_context_len)
    sms = len(schedule_meta) - 1
    if not torch.equal(schedule_meta, get_paged_mqa_logits_metadata(context_lens, 64, sms)):
        return logits
    planes = kv_cache.flatten(1)
    values = planes[:, : 64 * dim].contiguous().view(_FP8).view(-1, 64, dim)
    scales = planes[:, 64 * dim :].contiguous().view(torch.float32)
    for t, length in enumerate(context_lens.flatten().tolist()):
        pages = block_table[t // next_n, : -(-length // 64)].long()
        keys = values.view(torch.uint8)[pages].view(_FP8).flatten(0, 1)[:length]
        logits[t, :length] = _scores(
            q.flatten(0, 1)[t], weights[t], keys, scales[pages].flatten()[:length]
        )
    return logits


def _scores(q, weights, keys, scales):
    return scales * (weights[:, None] * (q.float() @ keys.float().T).relu()).sum(0)


def _garbage(rows, columns):
    return torch.full((rows, -(-columns // _BLOCK) * _BLOCK), torch.nan)[:, :columns]


def _check(ok, what):
    if not ok:
        raise RuntimeError(f"Assertion error: {what}")
