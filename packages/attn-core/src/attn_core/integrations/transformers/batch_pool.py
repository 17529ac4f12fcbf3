"""The cache of transformers' continuous batching as a CachePool: the same memory, seen as pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import UnsupportedError
from attn_core.integrations.transformers.select import DTYPES
from attn_core.runtime.layer import AttentionLayer

CHUNK = "chunk"  # the view of the memory beside the cache


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchLayer:
    """A layer over the cache and, if it has a window, over the memory beside it.

    group: which of the pass's read and write indices are the layer's. chunk: the same layer in the
    view "chunk".
    """

    layer: AttentionLayer
    group: int
    chunk: AttentionLayer | None


class BatchPool:
    """The memory of a PagedAttentionCache, seen as pages of `page_size` tokens.

    Slots, in which transformers' indices count, are rows [Hkv, D] of a layer's keys. In layers with
    a window, the blocks of a request are a ring: the token at position p is at p % window of them.
    page_size divides the blocks and the window, so that a page holds consecutive positions.

    Beside the cache is memory for prompts that are too long for a ring. The layers with a window
    share it. Raises UnsupportedError for windows other than the model's.
    """

    layout = "NHD"

    def __init__(self, cache: Any, layers: Iterable[AttentionLayer], page_size: int) -> None:
        self.page_size, self.device = page_size, torch.device(cache.device)
        self.kv_cache_dtype = DTYPES[cache.dtype]
        self.layers: dict[int, BatchLayer] = {}
        self._caches: dict[int, LayerCache] = {}
        layers = tuple(layers)
        ids = 1 + max(x.layer_id for x in layers)
        for x in layers:
            group, window, k, v = _rows(cache, x.layer_id)
            if window != x.sliding_window:
                raise UnsupportedError(
                    f"layer {x.layer_id} has a window of {x.sliding_window}, transformers' paged "
                    f"cache one of {window}; use another attn_implementation"
                )
            x = replace(x, view=f"group {group}")
            chunk = None if window is None else replace(x, layer_id=x.layer_id + ids, view=CHUNK)
            self.layers[x.layer_id] = BatchLayer(layer=x, group=group, chunk=chunk)
            self._caches[x.layer_id] = self._pages(k, v)
        self.reserve(1)

    @property
    def all_layers(self) -> tuple[AttentionLayer, ...]:
        """The layers of the model, and those with a window once more, for their chunks."""
        model_layers = [x.layer for x in self.layers.values()]
        return (*model_layers, *(x.chunk for x in self.layers.values() if x.chunk is not None))

    def layer(self, layer_id: int) -> LayerCache:
        """Return one layer's cache."""
        return self._caches[layer_id]

    def make_finite(self) -> None:
        """Replace what is no finite number: some releases of transformers fill a new cache with
        nothing, and rows that require finite padding read beside what was written.
        """
        for cache in self._caches.values():
            for x in (cache.k, cache.v):
                if x is not None:
                    x.nan_to_num_()

    def reserve(self, num_pages: int) -> None:
        """Give chunks so many new pages; what they held is gone."""
        windowed = [x for x in self.layers.values() if x.chunk is not None]
        if windowed:
            like = self._caches[windowed[0].layer.layer_id].k
            shape = (num_pages, *like.shape[1:])
            pages = LayerCache(k=like.new_zeros(shape), v=like.new_zeros(shape))
            self._caches |= {x.chunk.layer_id: pages for x in windowed if x.chunk is not None}

    def copy_beside(self, x: BatchLayer, slots: Tensor, places: Tensor) -> None:
        """Copy tokens of a layer's ring to the memory beside it; both int64 slots."""
        assert x.chunk is not None
        ring, chunk_layer = self.layer(x.layer.layer_id), self.layer(x.chunk.layer_id)
        for source, target in ((ring.k, chunk_layer.k), (ring.v, chunk_layer.v)):
            assert source is not None
            assert target is not None
            target.flatten(0, 1).index_copy_(0, places, source.flatten(0, 1)[slots])

    def _pages(self, k: Tensor, v: Tensor) -> LayerCache:
        def pages(x: Tensor) -> Tensor:
            return x[: v.shape[0]].view(-1, self.page_size, *x.shape[1:])

        return LayerCache(k=pages(k), v=pages(v))


def _rows(cache: Any, layer_id: int) -> tuple[int, int | None, Tensor, Tensor]:
    """Return the group and the window of a layer, and its keys and values [rows, Hkv, D].

    In transformers 5.17, a group of layers has a tensor of keys and one of values per layer.
    In 5.23, one tensor holds all: a block has a page of keys and a page of values for each layer
    of its type, one after the other.
    """
    if hasattr(cache, "layer_to_allocator"):
        owner = cache.layer_to_allocator[layer_id]
        group, place = owner.index, 2 * owner.layer_indices.index(layer_id)
        rows, size = owner.cache_tensor.flatten(0, 1), owner.tokens_per_page
        k, v = rows[place * size :], rows[(place + 1) * size :]
    else:
        group, place = cache.layer_index_to_group_indices[layer_id]
        owner = cache.group_cache_managers[group]
        k, v = cache.key_cache[place], cache.value_cache[place]
    return group, getattr(owner, "sliding_window", None), k, v
