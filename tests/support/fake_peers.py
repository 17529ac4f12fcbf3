"""Stand-ins of the peers' libraries: their names and arguments, plain float32 arithmetic."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import torch


def attend(q, cu, keys, values, scale, *, causal, masks=None):
    """Attend request by request: q [T, H, D], keys[b] [L, Hkv, D], values[b] [L, Hkv, Dv]."""
    bounds, outs = cu.tolist(), []
    assert cu.dtype == torch.int32
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = q[bounds[b] : bounds[b + 1]].float()
        n, length, group = len(rows), len(k), q.shape[1] // k.shape[1]
        k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
        seen = torch.ones(n, length, dtype=torch.bool)
        if masks is not None:
            seen = masks[b].view(n, length)
        elif causal:
            seen = seen.tril(length - n)
        scores = (torch.einsum("nhd,khd->hnk", rows, k) * scale).masked_fill(~seen, -torch.inf)
        outs.append(torch.einsum("hnk,khd->nhd", scores.softmax(-1), v))
    return torch.cat(outs)


def gather(pool, table, lens):
    return [pool[row.long()].flatten(0, 1)[:n] for row, n in zip(table, lens.tolist(), strict=True)]


def csr_gather(pool, indptr, indices, lens):
    assert indptr.dtype == indices.dtype == torch.int32
    at = indptr.tolist()
    return [
        pool[indices[at[b] : at[b + 1]].long()].flatten(0, 1)[:n]
        for b, n in enumerate(lens.tolist())
    ]


# sgl_kernel.flash_attn


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False,
):  # fmt: skip
    sizes = cu_seqlens_k.diff().tolist()
    assert max_seqlen_k == max(sizes)
    scale = softmax_scale or q.shape[-1] ** -0.5
    out = attend(q, cu_seqlens_q, k.split(sizes), v.split(sizes), scale, causal=causal)
    return out.to(q.dtype)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, qv=None, cache_seqlens=None, page_table=None, cu_seqlens_q=None,
    max_seqlen_q=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False,
):  # fmt: skip
    assert q.dtype == k_cache.dtype
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    out_dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    if q.dtype.itemsize == 1:
        assert q_descale.shape == k_descale.shape == v_descale.shape
    keys = gather(k_cache, page_table, cache_seqlens)
    values = gather(v_cache, page_table, cache_seqlens)
    if qv is not None:
        assert qv.is_contiguous()
        q, keys = torch.cat((qv, q), -1), [
            torch.cat(pair, -1) for pair in zip(values, keys, strict=True)
        ]  # fmt: skip
    scale = softmax_scale or q.shape[-1] ** -0.5
    return attend(q, cu_seqlens_q, keys, values, scale, causal=causal).to(out_dtype)


# sgl_kernel.flash_mla


def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
    assert num_heads_k == 1
    return ("schedule", num_heads_per_head_k), cache_seqlens


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
    softmax_scale=None, causal=False,
):  # fmt: skip
    batch, queries, heads, _ = q.shape
    assert k_cache.shape[1] == 64
    assert tile_scheduler_metadata == ("schedule", queries * heads)
    keys = gather(k_cache, block_table, cache_seqlens)
    values = [k[..., :head_dim_v] for k in keys]
    cu = torch.arange(batch + 1, dtype=torch.int32) * queries
    out = attend(q.flatten(0, 1), cu, keys, values, softmax_scale, causal=causal)
    return out.to(q.dtype).view(batch, queries, heads, head_dim_v), None


# flash_attn.cute


def fa4_varlen(
    q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    seqused_k=None, page_table=None, softmax_scale=None, causal=False,
):  # fmt: skip
    if page_table is None:
        sizes = cu_seqlens_k.diff().tolist()
        keys, values = k.split(sizes), v.split(sizes)
    else:
        assert k.shape[1] == 128
        assert max_seqlen_k >= seqused_k.max()
        keys, values = gather(k, page_table, seqused_k), gather(v, page_table, seqused_k)
    return attend(q, cu_seqlens_q, keys, values, softmax_scale, causal=causal).to(q.dtype), None


# flashinfer


class _Wrapper:
    def __init__(self, workspace, kv_layout="NHD", *, backend="auto", use_tensor_cores=False):
        assert workspace.dtype == torch.uint8
        self.backend, self.tensor_cores = backend, use_tensor_cores


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *, q_data_type, kv_data_type, sm_scale,
    ):  # fmt: skip
        assert self.tensor_cores
        lens = (indptr.diff() - 1) * page_size + last_page_len
        self.plan_ = (indptr, indices, lens, sm_scale)
        self.shape = (num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type, kv_data_type)

    def run(self, q, paged_kv_cache):
        k = paged_kv_cache[0]
        assert self.shape == (q.shape[1], k.shape[2], q.shape[2], k.shape[1], q.dtype, k.dtype)
        indptr, indices, lens, scale = self.plan_
        keys, values = (csr_gather(x, indptr, indices, lens) for x in paged_kv_cache)
        cu = torch.arange(len(lens) + 1, dtype=torch.int32)
        return attend(q, cu, keys, values, scale, causal=True).to(q.dtype)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk,
        *, causal, q_data_type, sm_scale,
    ):  # fmt: skip
        assert causal
        self.plan_ = (qo_indptr, kv_indptr, sm_scale)
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, q_data_type)

    def run(self, q, k, v):
        assert self.shape == (q.shape[1], k.shape[1], q.shape[2], q.dtype)
        cu, kv, scale = self.plan_
        sizes = kv.diff().tolist()
        return attend(q, cu, k.split(sizes), v.split(sizes), scale, causal=True).to(q.dtype)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, *, custom_mask=None, causal, q_data_type,
        kv_data_type, sm_scale,
    ):  # fmt: skip
        assert custom_mask is None or self.backend == "fa2"
        lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        masks = None
        if custom_mask is not None:
            assert custom_mask.dtype == torch.bool
            masks = custom_mask.split((qo_indptr.diff() * lens).tolist())
        self.plan_ = (qo_indptr, paged_kv_indptr, paged_kv_indices, lens, sm_scale, causal, masks)
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, kv_data_type)

    def run(self, q, paged_kv_cache):
        k = paged_kv_cache[0]
        assert self.shape == (q.shape[1], k.shape[2], q.shape[2], k.shape[1], k.dtype)
        cu, indptr, indices, lens, scale, causal, masks = self.plan_
        keys, values = (csr_gather(x, indptr, indices, lens) for x in paged_kv_cache)
        return attend(q, cu, keys, values, scale, causal=causal, masks=masks).to(q.dtype)


class BatchMLAPagedAttentionWrapper(_Wrapper):
    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
        page_size, causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        self.plan_ = (qo_indptr, kv_indptr, kv_indices, kv_len_arr, sm_scale, causal)
        self.shape = (num_heads, head_dim_ckv, head_dim_kpe, page_size)

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache):
        assert q_nope.is_contiguous()
        assert q_pe.is_contiguous()
        heads, dims = q_nope.shape[1], (ckv_cache.shape[-1], kpe_cache.shape[-1])
        assert self.shape == (heads, *dims, ckv_cache.shape[1])
        cu, indptr, indices, lens, scale, causal = self.plan_
        pages = torch.cat((ckv_cache, kpe_cache), -1)[:, :, None]
        keys = csr_gather(pages, indptr, indices, lens)
        values = [k[..., : dims[0]] for k in keys]
        q = torch.cat((q_nope, q_pe), -1)
        return attend(q, cu, keys, values, scale, causal=causal).to(q.dtype)


def trtllm_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0,
    bmm2_scale=1.0, *, kv_layout="HND", backend="auto",
):  # fmt: skip
    assert (kv_layout, backend, bmm2_scale) == ("NHD", "xqa", 1.0)
    assert max_seq_len == seq_lens.max()
    assert not workspace_buffer[: 8 << 20].any()
    keys, values = (gather(x, block_tables, seq_lens) for x in kv_cache)
    cu = torch.arange(len(seq_lens) + 1, dtype=torch.int32)
    return attend(query, cu, keys, values, bmm1_scale, causal=True).to(query.dtype)


def install(monkeypatch) -> None:
    """Put the stand-ins where the real libraries would be imported from."""
    modules = {
        "sgl_kernel": (),
        "sgl_kernel.flash_attn": (flash_attn_varlen_func, flash_attn_with_kvcache),
        "sgl_kernel.flash_mla": (get_mla_metadata, flash_mla_with_kvcache),
        "flash_attn": (),
        "flash_attn.cute": (),
        "flashinfer": (
            BatchDecodeWithPagedKVCacheWrapper,
            BatchPrefillWithRaggedKVCacheWrapper,
            BatchPrefillWithPagedKVCacheWrapper,
        ),
        "flashinfer.decode": (trtllm_batch_decode_with_kv_cache,),
        "flashinfer.mla": (BatchMLAPagedAttentionWrapper,),
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for member in members:
            setattr(module, member.__name__, member)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["flash_attn.cute"].flash_attn_varlen_func = fa4_varlen
