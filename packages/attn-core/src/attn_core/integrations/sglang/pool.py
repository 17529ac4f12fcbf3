"""SGLang's memory pools as a CachePool: the same memory, seen as pages."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.errors import UnsupportedError
from attn_core.runtime.layer import AttentionLayer

KV_DTYPE = {dtype: name for name, dtype in TORCH_DTYPES.items() if name != "fp4_e2m1"}
_LATENT, _SPARSE = "MLATokenToKVPool", "DSATokenToKVPool"
POOLS = ("MHATokenToKVPool", _LATENT, _SPARSE, "SWAKVPool", "HybridLinearKVPool")


class EnginePool:
    """The pool of a model runner: [slots, H, D] per layer, viewed as [pages, page_size, H, D].

    Nothing is copied. Page 0 is the dummy page of both sides. A pool that waits for a layer's
    transfer (hierarchical cache) is asked in every pass.
    """

    layout = "NHD"

    def __init__(self, pool: Any, page_size: int, device: torch.device) -> None:
        check_pool(pool)
        self.pool = pool
        # a hybrid model's pool finds the layers with softmax attention in one that has no others
        self._rows = getattr(pool, "full_kv_pool", pool)
        self.page_size = page_size
        self.device = device
        self.kv_cache_dtype = KV_DTYPE[pool.dtype]
        self._layers: dict[int, LayerCache] = {}

    @property
    def kind(self) -> Literal["mha", "mla", "dsa"]:
        """The kind of the layers that it serves."""
        return "dsa" if self.is_sparse else "mla" if self.is_latent else "mha"

    @property
    def is_latent(self) -> bool:
        """Whether the pool stores MLA's latents."""
        return type(self._rows).__name__ in (_LATENT, _SPARSE)

    @property
    def is_sparse(self) -> bool:
        """Whether it stores the index keys of sparse MLA, too."""
        return type(self._rows).__name__ == _SPARSE

    @property
    def row_dim(self) -> int:
        """Numbers of a latent's row; 0 for K and V."""
        return int(self._rows.kv_buffer[0].shape[-1]) if self.is_latent else 0

    def has_window(self, layer_id: int) -> bool:
        """Say whether a layer's keys lie in the pool of the windowed layers."""
        mapping = getattr(self.pool, "layers_mapping", None)
        return mapping is not None and bool(mapping[layer_id][1])

    def window_slots(self) -> Tensor | None:
        """Return slot → slot of the windowed layers' pool, int64; None where there is one pool."""
        return getattr(self.pool, "full_to_swa_index_mapping", None)

    def bind(self, module: Any, layer: AttentionLayer) -> None:
        """Take a layer's part of the pool, with the scales of its module."""
        scales = (scale_of(module, "k_scale"), scale_of(module, "v_scale"))
        if self.pool.dtype.itemsize > 1:
            scales = (1.0, 1.0)  # a checkpoint may bring scales for a cache that has none
        if self.is_latent and scales[0] != 1.0:
            raise UnsupportedError(
                f"layer {layer.layer_id}: an FP8 cache of latents with k_scale {scales[0]} "
                "(supports 1.0); choose --kv-cache-dtype auto"
            )
        stores = [self.pool.get_key_buffer(layer.layer_id)]
        if not self.is_latent:
            stores.append(self.pool.get_value_buffer(layer.layer_id))
            check_heads(layer, stores[0].shape[-2])
        pages = [x.view(-1, self.page_size, *x.shape[-2:]) for x in stores]
        self._layers[layer.layer_id] = LayerCache(
            k=pages[0],
            v=None if self.is_latent else pages[1],
            k_scale=scales[0],
            v_scale=1.0 if self.is_latent else scales[1],
            index=self._index_keys(layer.layer_id),
        )

    def _index_keys(self, layer_id: int) -> Tensor | None:
        """Return a layer's index keys, planar pages of FP8 as LayerCache has them."""
        if not self.is_sparse:
            return None
        keys: Tensor = self.pool.get_index_k_with_scale_buffer(layer_id)
        return keys

    def layer(self, layer_id: int) -> LayerCache:
        """Return a layer's cache, once what is transferred to it has arrived."""
        if self.pool.layer_transfer_counter is not None:
            self.pool.get_key_buffer(layer_id)
        return self._layers[layer_id]


def check_heads(layer: AttentionLayer, heads: int) -> None:
    """Raise UnsupportedError for a pool that SGLang made for other KV heads than the layer's.

    With data-parallel attention every rank's pool has all heads. SGLang's class of the model may
    still split them over the ranks: its Llama does (0.5.16), its Qwen3 does not.
    """
    if heads != layer.num_kv_heads:
        raise UnsupportedError(
            f"layer {layer.layer_id} has {layer.num_kv_heads} KV heads on this rank, and SGLang's "
            f"pool {heads} (attn_core serves equal counts): the model splits its heads over all "
            "ranks, also under --enable-dp-attention; start without that flag"
        )


def scale_of(module: Any, name: str) -> float:
    """Return a scale of a layer's cache: of the checkpoint, of --quantization-param-path, or 1.

    The first is kept as NAME_float; the second is a number in the place of the first's tensor.
    """
    of_checkpoint = getattr(module, f"{name}_float")
    if of_checkpoint is not None:
        return float(of_checkpoint)
    of_file = getattr(module, name)
    return float(of_file) if isinstance(of_file, float | int) else 1.0


def check_pool(pool: Any) -> None:
    """Raise UnsupportedError for a pool whose memory is not rows of K and V per token."""
    parts = (getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool"))
    for part in (pool, *filter(None, parts)):
        if type(part).__name__ not in POOLS:
            raise UnsupportedError(
                f"SGLang's pool {type(part).__name__} (attn_core reads {', '.join(POOLS)}); use "
                "another --attention-backend, or --kv-cache-dtype auto"
            )
        layout = getattr(part, "kv_cache_layout", "nhd")
        if layout != "nhd":
            raise UnsupportedError(
                f"a KV pool in layout {layout} (attn_core reads nhd); unset "
                "SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT"
            )
        if getattr(part, "is_quantized_kv_cache", False):
            raise UnsupportedError(
                f"a KV pool quantised by {part.quant_method.name} (attn_core reads bf16, fp16 and "
                "FP8); choose --kv-cache-dtype auto or fp8_e4m3"
            )
    if type(pool).__name__ == _SPARSE and pool.dtype.itemsize == 1:
        raise UnsupportedError(
            "an FP8 cache of sparse MLA, with a scale per 128 numbers of a latent (attn_core reads "
            "bf16 there); choose --kv-cache-dtype bfloat16"
        )
    if pool.dtype not in KV_DTYPE:
        known = ", ".join(sorted(KV_DTYPE.values()))
        raise UnsupportedError(f"a KV pool of {pool.dtype} (attn_core reads {known})")
