"""The paged pool that holds K and V, or the MLA latents, of all layers of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Literal, Protocol, get_args

import torch

from attn_core.cache.layer_cache import (
    SCALE_BYTES,
    TORCH_DTYPES,
    CachedLayer,
    LayerCache,
    Scale,
    latent_bytes,
)
from attn_core.cache.memory import zeros
from attn_core.dtypes import FP4_BLOCK, LATENT_BLOCK
from attn_core.errors import UnsupportedError, UsageError
from attn_core.formatting import near
from attn_core.spec.requirements import is_count

IndexDtype = Literal["fp32", "fp16", "bf16", "fp8_e4m3"]


class CachePool(Protocol):
    """The attributes of a pool that the dispatcher reads: KVPool or an engine's own class.

    layout: "NHD" or "HND", the same for every layer. Pages may be views into larger tensors, with
    any strides as long as the last one is 1.
    """

    @property
    def page_size(self) -> int: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def device(self) -> torch.device: ...

    def layer(self, layer_id: int) -> LayerCache:
        """Return one layer's cache. Every layer of every pass calls it, so keep it ready."""


def usable_device(device: torch.device | str) -> torch.device:
    """Return a device of tensors. Raises UsageError where torch has none there."""
    try:
        found = torch.device(device)
        torch.empty(0, dtype=torch.uint8, device=found)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"device {str(device)!r}: torch has no tensors there ({reason})"
        ) from error
    return found


class KVPool:
    """The KV cache of a model: one LayerCache per softmax layer, initialised to zeros.

    num_pages: includes page 0, the dummy page; a mapping gives each view its own number.
    kv_cache_dtype: a key of TORCH_DTYPES. Sparse MLA (DSA) in "fp8_e4m3" has a scale per 128 values
    of a token, and its rope part in bf16.
    layout: "NHD" or "HND", as in LayerCache.
    kind: "mla" and "dsa" store the latent of all heads once and no V: their layers have 1 KV head.
    index_dim: above 0, layers of sparse MLA (DSA) also store index keys of so many dims.
    index_dtype: "bf16", "fp16", "fp32", or "fp8_e4m3" with a scale per key.
    index_layers: the ids of the layers with an indexer; None = all. A layer that shares another
    layer's selection has none, and stores no index keys.
    scales: for FP8 and FP4 only: layer_id → (k_scale, v_scale), 1.0 if absent, each a number or a
    tensor as in LayerCache. Latents have no v_scale.
    Raises UsageError, and UnsupportedError if FP4 or FP8 latents do not support a head dim.
    """

    def __init__(
        self,
        layers: Iterable[CachedLayer],
        *,
        num_pages: int | Mapping[str, int],
        page_size: int,
        kv_cache_dtype: str,
        device: torch.device | str = "cpu",
        kind: Literal["mha", "mla", "dsa"] = "mha",
        layout: str = "NHD",
        index_dim: int = 0,
        index_dtype: IndexDtype = "bf16",
        index_layers: Collection[int] | None = None,
        scales: Mapping[int, tuple[Scale, Scale]] | None = None,
    ) -> None:
        if kv_cache_dtype not in TORCH_DTYPES:
            raise UsageError(
                f"kv_cache_dtype {kv_cache_dtype!r}: {near(kv_cache_dtype, TORCH_DTYPES)}"
            )
        if not is_count(page_size):
            raise UsageError(f"page_size {page_size!r} (expected an integer of 1 or more)")
        if layout not in ("NHD", "HND"):
            raise UsageError(f"layout {layout!r} (expected 'NHD' or 'HND')")
        if kind not in ("mha", "mla", "dsa"):
            raise UsageError(f"kind {kind!r} (expected 'mha', 'mla' or 'dsa')")
        check_index(index_dim, index_dtype)
        self.page_size, self.kv_cache_dtype, self.kind = page_size, kv_cache_dtype, kind
        self.layout, self.device, self.index_dim = layout, usable_device(device), index_dim
        self.index_dtype, self._index_layers = index_dtype, index_layers
        self._layers: dict[int, LayerCache] = {}
        for x in layers:
            pages = num_pages.get(x.view, 0) if isinstance(num_pages, Mapping) else num_pages
            if not is_count(pages):
                raise UsageError(f"layer {x.layer_id}: {pages!r} pages for its view {x.view!r}")
            if x.layer_id in self._layers:
                raise UsageError(
                    f"two layers of layer_id {x.layer_id}, which would write the same pages; a "
                    "layer that reads the keys of another has none in the pool"
                )
            scale = (scales or {}).get(x.layer_id, (1.0, 1.0))
            if not isinstance(scale, Sequence) or len(scale) != 2:
                raise UsageError(
                    f"scales of layer {x.layer_id}: {scale!r} (expected (k_scale, v_scale))"
                )
            self._layers[x.layer_id] = self._create(x, int(pages), scale)
        for name, ids in (("scales", scales or {}), ("index_layers", index_layers or ())):
            if unknown := sorted(set(ids) - self._layers.keys()):
                raise UsageError(f"{name} of layers {unknown} (layers: {sorted(self._layers)})")

    def _create(self, layer: CachedLayer, pages: int, scale: tuple[Scale, Scale]) -> LayerCache:
        fp4, size, heads = self.kv_cache_dtype == "fp4_e2m1", self.page_size, layer.num_kv_heads
        dims = [layer.head_dim] if self.kind != "mha" else [layer.head_dim, layer.v_head_dim]
        if fp4 and any(d % FP4_BLOCK for d in dims):
            raise UnsupportedError(
                f"layer {layer.layer_id}: head dims {dims} in fp4_e2m1 (supports multiples of "
                f"{FP4_BLOCK}); take fp8_e4m3 or bf16"
            )
        packed = self.kind == "dsa" and self.kv_cache_dtype == "fp8_e4m3"
        if packed:
            check_latents(layer)
        if self.kind != "mha" and (heads != 1 or layer.v_head_dim > layer.head_dim):
            raise UsageError(
                f"layer {layer.layer_id} of {heads} KV heads, head_dim {layer.head_dim} and "
                f"v_head_dim {layer.v_head_dim} in a pool of kind {self.kind!r}, in which one "
                "latent of a token serves all heads (expected 1 KV head, and a V of the first "
                "numbers of K, as in 576/512); give the layer after absorption, or take kind 'mha'"
            )
        shape = (pages, size, heads) if self.layout == "NHD" else (pages, heads, size)

        store, per_byte = TORCH_DTYPES[self.kv_cache_dtype], 2 if fp4 else 1
        kv = [zeros((*shape, d // per_byte), store, self.device) for d in dims]
        if packed:
            size_of_token = latent_bytes(layer.head_dim, layer.v_head_dim)
            kv = [zeros((*shape, size_of_token), torch.uint8, self.device)]
        blocks = [
            zeros((*shape, d // FP4_BLOCK), torch.float8_e4m3fn, self.device) for d in dims if fp4
        ]
        index, has_index = None, self._index_layers is None or layer.layer_id in self._index_layers
        if self.index_dim and has_index:
            fp8 = self.index_dtype == "fp8_e4m3"
            keys = (size * (self.index_dim + SCALE_BYTES),) if fp8 else (size, self.index_dim)
            index_store = torch.uint8 if fp8 else TORCH_DTYPES[self.index_dtype]
            index = zeros((pages, *keys), index_store, self.device)
        return LayerCache(
            k=kv[0],
            v=kv[1] if len(kv) > 1 else None,
            k_scale=scale[0],
            v_scale=scale[1],
            block_scales=(blocks[0], blocks[1] if len(blocks) > 1 else None) if fp4 else None,
            latent_dim=layer.v_head_dim if packed else 0,
            index=index,
            layout=self.layout,
        )

    def layer(self, layer_id: int) -> LayerCache:
        """Return one layer's cache. Raises UsageError for a layer that is not in the pool."""
        try:
            return self._layers[layer_id]
        except KeyError:
            layer_ids = sorted(self._layers)
            raise UsageError(f"layer {layer_id} has no KV cache (layers: {layer_ids})") from None

    @property
    def nbytes(self) -> int:
        """Size of this pool in bytes."""
        return sum(t.nbytes for cache in self._layers.values() for t, _ in cache.parts())

    @classmethod
    def bytes_per_page(
        cls,
        layers: Iterable[CachedLayer],
        *,
        page_size: int,
        kv_cache_dtype: str,
        kind: Literal["mha", "mla", "dsa"] = "mha",
        index_dim: int = 0,
        index_dtype: IndexDtype = "bf16",
        index_layers: Collection[int] | None = None,
    ) -> int:
        """Return the size in bytes of one page over all layers, before anything is allocated."""
        return cls(
            layers,
            num_pages=1,
            page_size=page_size,
            kv_cache_dtype=kv_cache_dtype,
            device="meta",
            kind=kind,
            index_dim=index_dim,
            index_dtype=index_dtype,
            index_layers=index_layers,
        ).nbytes

    @classmethod
    def pages_that_fit(
        cls,
        memory: int,
        layers: Iterable[CachedLayer],
        *,
        page_size: int,
        kv_cache_dtype: str,
        kind: Literal["mha", "mla", "dsa"] = "mha",
        index_dim: int = 0,
        index_dtype: IndexDtype = "bf16",
        index_layers: Collection[int] | None = None,
    ) -> int:
        """Return how many pages, including the dummy page, fit into `memory` bytes.

        Raises UsageError without layers.
        """
        layers = tuple(layers)
        if not layers:
            raise UsageError("no layers: a page of none takes no memory")
        bytes_per_page = cls.bytes_per_page(
            layers,
            page_size=page_size,
            kv_cache_dtype=kv_cache_dtype,
            kind=kind,
            index_dim=index_dim,
            index_dtype=index_dtype,
            index_layers=index_layers,
        )
        return max(0, int(memory // bytes_per_page))


def check_latents(layer: CachedLayer) -> None:
    """Raise UnsupportedError for a layer whose latents FP8 does not divide."""
    latent, rope = layer.v_head_dim, layer.head_dim - layer.v_head_dim
    if latent % LATENT_BLOCK or rope < 0 or rope % 2:
        raise UnsupportedError(
            f"layer {layer.layer_id}: latents of {latent} values and {rope} of rope in fp8_e4m3 "
            f"(supports values by {LATENT_BLOCK}, each with a scale, and an even rope part); take "
            "bf16"
        )


def check_index(dim: int, dtype: str) -> None:
    """Raise UsageError for index keys that a pool cannot store."""
    if dtype not in get_args(IndexDtype):
        raise UsageError(f"index_dtype {dtype!r} (expected {' or '.join(get_args(IndexDtype))})")
    if not isinstance(dim, Integral) or dim < 0 or (dim % SCALE_BYTES and dtype == "fp8_e4m3"):
        raise UsageError(
            f"index_dim {dim!r} in {dtype} (expected 0 or more, in fp8_e4m3 a multiple of "
            f"{SCALE_BYTES}: a page's scales follow its values)"
        )
