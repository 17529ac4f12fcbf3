"""sgl_kernel.flash_mla 0.4.5, its dense decode and sparse prefill of sm90."""

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
        raise NotImplementedError("no emulation of this one")
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
