"""vLLM's attention layers and their caches as attn-core's: the same memory, seen as pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.errors import UnsupportedError
from attn_core.runtime.layer import AttentionLayer


def to_layer(layer_id: int, module: Any) -> AttentionLayer:
    """Return the AttentionLayer of vLLM's Attention module, whose heads are this rank's."""
    impl = module.impl
    sinks = impl.sinks
    return AttentionLayer(
        layer_id=layer_id,
        num_q_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        v_head_dim=impl.head_size,
        scale=impl.scale,
        logit_cap=impl.logits_soft_cap or None,
        sliding_window=impl.sliding_window,
        sinks=None if sinks is None else sinks.detach(),
    )


def to_latent_layer(layer_id: int, module: Any) -> AttentionLayer:
    """Return the absorbed AttentionLayer of vLLM's MLAAttention module."""
    impl = module.impl
    return AttentionLayer(
        layer_id=layer_id,
        num_q_heads=impl.num_heads,
        num_kv_heads=1,
        head_dim=impl.kv_lora_rank + impl.qk_rope_head_dim,
        v_head_dim=impl.kv_lora_rank,
        scale=impl.scale,
    )


def to_cache(module: Any, kv_cache: Tensor, stored: str) -> LayerCache:
    """View a layer's memory as pages, with the scales of its module.

    kv_cache: [2, blocks, block_size, Hkv, D], or MLA's [blocks, block_size, 576]; FP8 as bytes.
    stored: the name of its dtype.
    """
    pages = kv_cache.view(TORCH_DTYPES[stored])
    scales = (1.0, 1.0)
    if pages.dtype.itemsize == 1:  # a checkpoint may bring scales for a cache that has none
        scales = (float(module._k_scale_float), float(module._v_scale_float))
    if pages.dim() == 5:
        return LayerCache(k=pages[0], v=pages[1], k_scale=scales[0], v_scale=scales[1])
    if scales[0] != 1.0:
        raise UnsupportedError(
            f"{module.layer_name}: an FP8 cache of latents with k_scale {scales[0]} (supports "
            "1.0); choose --kv-cache-dtype auto"
        )
    return LayerCache(k=pages.unsqueeze(2), v=None)


class CachedPages:
    """A layer's cache, viewed once for each tensor that vLLM binds to it."""

    def __init__(self, stored: str) -> None:
        self.stored = stored
        self._seen: tuple[Tensor, LayerCache] | None = None

    def of(self, module: Any, kv_cache: Tensor) -> LayerCache:
        """Return the pages of a layer, whose memory vLLM may replace between passes."""
        if self._seen is None or self._seen[0] is not kv_cache:
            self._seen = (kv_cache, to_cache(module, kv_cache, self.stored))
        return self._seen[1]


class EnginePool:
    """The caches of some layers as a CachePool. Nothing is copied.

    modules: vLLM's layers, by layer id. Block 0 is the dummy page of both sides.
    """

    layout = "NHD"

    def __init__(
        self, modules: Mapping[int, Any], page_size: int, stored: str, device: torch.device
    ) -> None:
        self._modules = modules
        self._pages = {layer_id: CachedPages(stored) for layer_id in modules}
        self.page_size = page_size
        self.kv_cache_dtype = stored
        self.device = device

    def layer(self, layer_id: int) -> LayerCache:
        """Return one layer's cache."""
        module = self._modules[layer_id]
        return self._pages[layer_id].of(module, module.kv_cache)
