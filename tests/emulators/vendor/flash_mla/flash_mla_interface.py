"""flash_mla 1.0.0 (sgl-flash-mla), its kernels of sm90; metadata as the real one keeps it."""

import dataclasses

import flash_mla_leaf
import torch


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

        enable_batch_invariant: bool

    have_initialized: bool = False

    config: Config | None = None

    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args, **kwargs) -> tuple[FlashMLASchedMeta, None]:
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: torch.Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not use_legacy:
        raise NotImplementedError("no emulation of the current kernels, which have no sm90")
    if topk is not None:
        raise NotImplementedError("no emulation of this one")
    return flash_mla_leaf.schedule(seqlens_k, num_q_tokens_per_head_k, h_k, fp8=is_fp8_kvcache)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    meta = tile_scheduler_metadata
    assert isinstance(meta, FlashMLASchedMeta), (
        "tile_scheduler_metadata must be of type FlashMLASchedMeta"
    )
    assert num_splits is None, "num_splits must be None"
    if is_fp8_kvcache is None:
        is_fp8_kvcache = indices is not None
    if indices is not None:
        assert not causal, "causal must be False when sparse attention is enabled"
        assert is_fp8_kvcache, (
            "is_fp8_kvcache must be True, since only sparse attention with a quantized KV cache "
            "is supported"
        )
        if softmax_scale is None:
            softmax_scale = q.shape[-1] ** (-0.5)
        asked = FlashMLASchedMeta.Config(
            b=q.shape[0], s_q=q.shape[1], h_q=q.shape[2], page_block_size=k_cache.shape[1],
            h_k=k_cache.shape[2], causal=causal, is_fp8_kvcache=is_fp8_kvcache,
            topk=indices.shape[-1],
            extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
            extra_topk=None
            if extra_indices_in_kvcache is None
            else extra_indices_in_kvcache.shape[-1],
            enable_batch_invariant=enable_batch_invariant,
        )  # fmt: skip
        if not meta.have_initialized:
            meta.have_initialized, meta.config = True, asked
        assert meta.config == asked, "Your input arguments are inconsistent with sched_meta."
        if not use_legacy:
            raise NotImplementedError("no emulation of the current kernels, which have no sm90")
        assert not enable_batch_invariant, (
            "enable_batch_invariant is a 2026.09.30 feature and only exists on the current kernels"
        )
        if kv_format is not None:
            raise NotImplementedError("no emulation of this one")
        out, lse, meta.tile_scheduler_metadata, meta.num_splits = flash_mla_leaf.sparse_decode(
            q, k_cache, indices, topk_length, attn_sink, meta.tile_scheduler_metadata,
            meta.num_splits, extra_k_cache, extra_indices_in_kvcache, extra_topk_length,
            head_dim_v, softmax_scale,
        )  # fmt: skip
        return out, lse
    assert use_legacy, (
        "Sparse attention is required: `indices` must be provided. Dense MLA decoding was "
        "removed from the current kernels; pass use_legacy=True to reach the legacy one"
    )
    assert kv_format is None, "kv_format does not apply to dense decoding"
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    if is_fp8_kvcache:
        assert meta.tile_scheduler_metadata is not None, (
            "dense fp8 decoding needs metadata from get_mla_decoding_metadata(..., "
            "is_fp8_kvcache=True, use_legacy=True) before the first call"
        )
        return flash_mla_leaf.decode_fp8(
            q, k_cache, block_table, cache_seqlens, head_dim_v, meta.tile_scheduler_metadata,
            meta.num_splits, softmax_scale, causal, descale_q, descale_k,
        )  # fmt: skip
    assert descale_q is None, "descale_q/descale_k apply to the dense fp8 path only"
    assert descale_k is None, "descale_q/descale_k apply to the dense fp8 path only"
    if meta.tile_scheduler_metadata is None:  # scheduled by the first call
        rows = q.shape[1] * q.shape[2] // k_cache.shape[2]
        tiles = flash_mla_leaf.schedule(cache_seqlens, rows, k_cache.shape[2])
        meta.tile_scheduler_metadata, meta.num_splits = tiles
    return flash_mla_leaf.decode(
        q, k_cache, block_table, cache_seqlens, head_dim_v, meta.tile_scheduler_metadata,
        meta.num_splits, softmax_scale, causal,
    )  # fmt: skip


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    if not use_legacy:
        raise NotImplementedError("no emulation of the current kernels, which have no sm90")
    if return_log2_lse is not None:
        raise NotImplementedError("no emulation of this one")
    return flash_mla_leaf.sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
