"""sgl_kernel.flash_mla 0.4.5, its decode and sparse kernels of sm90."""

import dataclasses
import math

import flash_mla_leaf
import torch

LOG2E = 1 / math.log(2)


@dataclasses.dataclass
class FlashMLASchedMeta:
    @dataclasses.dataclass
    class Config:
        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    assert num_q_tokens_per_head_k is not None
    assert num_heads_k is not None
    if topk is not None:
        raise NotImplementedError("no emulation of this one")
    rows = num_q_tokens_per_head_k
    return flash_mla_leaf.schedule(cache_seqlens, rows, num_heads_k, fp8=is_fp8_kvcache)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | FlashMLASchedMeta,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        return _with_sched_meta(
            q, k_cache, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal,
            is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache,
            topk_length, extra_topk_length,
        )  # fmt: skip
    assert num_splits is not None
    assert block_table is not None
    assert cache_seqlens is not None
    assert attn_sink is None
    assert extra_k_cache is None
    assert extra_indices_in_kvcache is None
    assert topk_length is None
    assert extra_topk_length is None
    assert (descale_q is None) == (descale_k is None), (
        "descale_q and descale_k should be both None or both not None"
    )
    arguments = (
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
        softmax_scale, causal,
    )  # fmt: skip
    if indices is None and q.element_size() == 1:
        return flash_mla_leaf.decode_fp8(*arguments, descale_q, descale_k)
    if indices is not None or is_fp8_kvcache:
        raise NotImplementedError("no emulation of this one")
    return flash_mla_leaf.decode(*arguments)


def _with_sched_meta(
    q, k_cache, head_dim_v, meta, num_splits, softmax_scale, causal, is_fp8_kvcache, indices,
    attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length,
):  # fmt: skip
    assert num_splits is None, "num_splits must be None with FlashMLASchedMeta"
    if indices is None:
        raise NotImplementedError("no emulation of this one")
    asked = FlashMLASchedMeta.Config(
        b=q.shape[0], s_q=q.shape[1], h_q=q.shape[2], page_block_size=k_cache.shape[1],
        h_k=k_cache.shape[2], causal=causal, is_fp8_kvcache=is_fp8_kvcache,
        topk=indices.shape[-1],
        extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
        extra_topk=None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[-1],
    )  # fmt: skip
    if not meta.have_initialized:
        meta.have_initialized, meta.config = True, asked
    assert meta.config == asked, "Input arguments are inconsistent with FlashMLASchedMeta."
    assert not causal, "causal must be False when sparse attention is enabled"
    assert is_fp8_kvcache, "is_fp8_kvcache must be True for sparse attention"
    out, lse, meta.tile_scheduler_metadata, meta.num_splits = flash_mla_leaf.sparse_decode(
        q, k_cache, indices, topk_length, attn_sink, meta.tile_scheduler_metadata, meta.num_splits,
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length, head_dim_v, softmax_scale,
    )  # fmt: skip
    return out, lse


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    arguments = (q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    out, peak, lse = flash_mla_leaf.sparse_prefill(*arguments)
    return out, peak, lse * LOG2E  # to base 2, as measured on an H200; the fork has natural ones
