"""Stores of a cache as TMA reads them: rows of tokens, 64 swizzled columns at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_core.backends.triton.portable.arguments import Scales, Store
from attn_core.backends.triton.portable.launch import needs_int64_offsets
from attn_core.cache.layer_cache import LayerCache
from attn_core.runtime.layer import AttentionLayer

PANEL = 64  # columns of 16 bits that one copy brings: a row of 128 swizzled bytes
SWIZZLED = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
SWIZZLE_ROWS = 8  # rows that the swizzle goes over; smaller pages are gathered


class LayerArguments:
    """What the kernels are given of a layer and its cache, in every pass.

    rows(n): the stores as rows of tokens for TMA, n at a time. sinks: any tensor for a layer
    without.
    """

    def __init__(self, layer: AttentionLayer, cache: LayerCache) -> None:
        k, v, layout = cache.k, cache.k if cache.v is None else cache.v, cache.layout
        self.k, self.v = _store(k, layout), _store(v, layout)
        v_scale = cache.k_scale if cache.v is None else cache.v_scale
        self.scales = Scales(layer.scale * cache.k_scale, layer.logit_cap or 1.0, v_scale)
        strides = (*self.k[1:], *self.v[1:])
        self.int64_offsets = needs_int64_offsets(cache, layer.num_kv_heads, strides)
        self.sinks = k if layer.sinks is None else layer.sinks
        self.layout = layout
        self._rows: dict[int, tuple[TensorDescriptor, TensorDescriptor]] = {}

    def rows(self, count: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Return the descriptors of K and V."""
        descriptors = self._rows.get(count)
        if descriptors is None:
            k, v = (rows_descriptor(store.ptr, self.layout, count) for store in (self.k, self.v))
            descriptors = self._rows[count] = (k, v)
        return descriptors


def layer_arguments(
    layer: AttentionLayer, cache: LayerCache, dtype: torch.dtype
) -> LayerArguments | None:
    """Return what the kernels are given of a layer; None where TMA cannot read its stores."""
    stores = (cache.k, cache.v)
    fits = all(
        store is not None and store.dtype is dtype and rows_fit(store, cache.layout)
        for store in stores
    )
    return LayerArguments(layer, cache) if fits else None


def _store(store: Tensor, layout: str) -> Store:
    page, token, head, _ = store.stride() if layout == "NHD" else _swapped(store.stride())
    return Store(store, page, token, head)


def rows_fit(store: Tensor, layout: str) -> bool:
    """Say whether a store is rows of adjacent columns, evenly spaced and 16-byte aligned.

    Rows that lie one in the other, as those of an expanded tensor, are none of TMA's, nor is an
    empty store.
    """
    _, size, heads, dim = store.shape if layout == "NHD" else _swapped(store.shape)
    page, token, head, last = store.stride() if layout == "NHD" else _swapped(store.stride())
    token = page if layout == "NHD" and size == 1 else token
    even = last == 1 and store.data_ptr() % 16 == 0 and token * store.element_size() % 16 == 0
    even = even and token >= (heads * dim if layout == "NHD" else dim) and store.numel() > 0
    if layout == "NHD":
        return even and (heads == 1 or head == dim) and (size == 1 or page == size * token)
    return even and head == size * token and page == heads * head


def _swapped(x: tuple[int, ...]) -> tuple[int, int, int, int]:
    return x[0], x[2], x[1], x[3]


def rows_descriptor(store: Tensor, layout: str, rows: int) -> TensorDescriptor:
    """View a store as rows of tokens (NHD: the heads are columns; HND: rows too)."""
    pages, size, heads, dim = store.shape if layout == "NHD" else _swapped(store.shape)
    token = store.stride(1 if layout == "NHD" else 2)
    if layout == "NHD":
        token = store.stride(0) if size == 1 else token
        shape = [pages * size, heads * dim]
    else:
        shape = [pages * heads * size, dim]
    return TensorDescriptor(store, shape, [token, 1], [rows, PANEL], SWIZZLED)
