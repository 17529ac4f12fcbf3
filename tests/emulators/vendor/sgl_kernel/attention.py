"""sgl_kernel.attention 0.4.5, its latent decode of sm100 by CUTLASS."""

import attn_reference
import torch


def cutlass_mla_decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c_and_k_pe_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    workspace: torch.Tensor,
    sm_scale: float,
    num_kv_splits: int = 1,
) -> torch.Tensor:
    assert q_nope.ndim == q_pe.ndim == kv_c_and_k_pe_cache.ndim == 3
    batch, heads, latent = q_nope.shape
    assert q_pe.shape[:2] == (batch, heads)
    page = kv_c_and_k_pe_cache.shape[1]
    assert (latent, q_pe.shape[2], kv_c_and_k_pe_cache.shape[2]) == (512, 64, 576)
    assert heads <= 128, f"H must be <= 128, but got {heads}"
    assert page_table.ndim == 2
    assert page_table.shape[0] == batch
    width = page_table.shape[1]
    assert width > 0, f"block num must be greater than 0, got {width}"
    assert width % (128 / page) == 0
    assert q_nope.dtype in (torch.float16, torch.bfloat16), (
        f"q_nope.dtype needs to be fp16 or bf16 but got {q_nope.dtype}."
    )
    assert q_nope.dtype == q_pe.dtype == kv_c_and_k_pe_cache.dtype
    assert seq_lens.dtype == torch.int32
    assert page_table.dtype == torch.int32
    # what follows is the kernel: it takes strides of the queries alone
    if page > 128 or page & (page - 1):
        raise RuntimeError("cutlass can_implement failed: Error Invalid Problem")
    need = cutlass_mla_get_workspace_size(width * page, batch, 0, num_kv_splits)
    if workspace.numel() * workspace.element_size() < need:
        raise RuntimeError("Error Workspace Null")
    for q in (q_nope, q_pe):
        assert [q.stride(2), *(s * 2 % 16 for s in q.stride()[:2])] == [1, 0, 0], "TMA's strides"
    pages, table = (
        torch.as_strided(t, t.shape, _dense_strides(t), t.storage_offset())
        for t in (kv_c_and_k_pe_cache, page_table)
    )
    lens = seq_lens.tolist()
    keys = attn_reference.gather(pages.unsqueeze(2), table, lens)
    found, _ = attn_reference.attend(
        torch.cat([q_nope, q_pe], -1),
        keys,
        [k[..., :512] for k in keys],
        query_lens=[1] * batch,
        scale=sm_scale,
    )
    return found.to(q_nope.dtype)


def cutlass_mla_get_workspace_size(
    max_seq_len: int,
    num_batches: int,
    sm_count: int = 0,
    num_kv_splits: int = 1,
) -> int:
    assert max_seq_len > 0, f"max_seq_len must be greater than 0, got {max_seq_len}"
    assert num_batches > 0, f"num_batches must be greater than 0, got {num_batches}"
    if num_kv_splits == 1:
        return 0
    return 128 * num_batches * num_kv_splits * (512 + 1) * 4


def _dense_strides(t):
    strides = [1]
    for size in reversed(t.shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides
