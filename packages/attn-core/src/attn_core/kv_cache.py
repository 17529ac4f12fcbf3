"""Paged pools: where K and V, MLA latents and linear-attention states live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attn_core.errors import UnsupportedError, UsageError, near
from attn_core.forward import AttentionLayer
from attn_core.quant import FP4_BLOCK, check_scales, from_fp4, from_fp8, to_fp4, to_fp8
from attn_core.slots import put, take, take_pages

STORES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp4_e2m1": torch.uint8,  # two codes a byte
}
_Gather = Callable[[Tensor, str, Tensor], Tensor]  # paged tensor, layout, where → tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCache:
    """One layer's pages, and the only home of their scales.

    MHA: k [pages, page_size, Hkv, D], v [pages, page_size, Hkv, Dv] (layout "NHD"; "HND" is
    [pages, Hkv, page_size, D]). MLA: k is the latent [pages, page_size, 1, 576], v is None (V is
    the first v_head_dim of k). FP8: float8, value = stored · scale, per tensor. FP4 (e2m1): uint8
    [..., D / 2], low nibble first, value = e2m1 · block · scale, block_scales = (k, v) e4m3
    [..., D / 16]. Others have no scales. index: keys of sparse MLA, bf16 [pages, page_size, dim].
    """

    k: Tensor
    v: Tensor | None
    k_scale: float = 1.0
    v_scale: float = 1.0
    block_scales: tuple[Tensor, Tensor | None] | None = None
    index: Tensor | None = None
    layout: str = "NHD"

    def __post_init__(self) -> None:
        check_scales(self.k.dtype, self.k_scale, self.v_scale, latent=self.v is None)

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        return self.k.shape[2 if self.layout == "HND" else 1]

    def parts(self) -> list[tuple[Tensor, str]]:
        """Every tensor that holds tokens, with its layout."""
        stores = (self.k, self.v, *(self.block_scales or ()))
        index = [] if self.index is None else [(self.index, "NHD")]
        return [(t, self.layout) for t in stores if t is not None] + index


@dataclass(frozen=True, kw_only=True, eq=False)
class StateCache:
    """One linear layer's states [slots, Hv, V, K], and one intermediate per draft for verify."""

    state: Tensor
    intermediate: Tensor | None = None  # [slots, drafts, Hv, V, K]


def write_kv(cache: LayerCache, k: Tensor | None, v: Tensor | None, slots: Tensor) -> None:
    """Write new K and V into token slots, quantised as the cache stores them.

    k [N, Hkv, D], v [N, Hkv, Dv] (None for MLA), slots int64 [N] = page · page_size + offset;
    padding goes to slot 0. k None: nothing to write. FP8 saturates; FP4 takes one e4m3 scale per
    16 values from themselves. Never syncs. Raises UsageError where only v or only the V pool is.
    """
    if k is None:
        return
    if (v is None) != (cache.v is None):
        latent = "v is given, but the cache is latent and stores none: give v None"
        raise UsageError("v is None, but the cache stores V: give it" if v is None else latent)
    blocks = cache.block_scales or (None, None)
    sides = ((k, cache.k, blocks[0], cache.k_scale), (v, cache.v, blocks[1], cache.v_scale))
    for values, pool, block_pool, scale in sides:
        if values is None or pool is None:
            continue
        x = values.detach()
        if block_pool is not None:
            x, block = to_fp4(x, scale)
            put(block_pool, cache.layout, slots, block)
        elif pool.dtype.itemsize == 1:
            x = to_fp8(x, pool.dtype, scale)
        put(pool, cache.layout, slots, x.to(pool.dtype))


def read_kv(cache: LayerCache, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Gather token slots, int64 of any shape S, as k [*S, Hkv, D] and v [*S, Hkv, Dv] in `dtype`.

    FP8 and FP4 are dequantised in float32. MLA: v is None, the values are k[..., :v_head_dim].
    """
    return _read(cache, slots, dtype, take)


def read_pages(
    cache: LayerCache, pages: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Gather whole pages, int of any shape S, as k [*S, page_size, Hkv, D] and v alike.

    Both layouts come back token-major ("HND" as a transposed view). Else as read_kv.
    """
    return _read(cache, pages, dtype, take_pages)


def _read(
    cache: LayerCache, where: Tensor, dtype: torch.dtype, gather: _Gather
) -> tuple[Tensor, Tensor | None]:
    def side(pool: Tensor, block_pool: Tensor | None, scale: float) -> Tensor:
        stored = gather(pool, cache.layout, where)
        if block_pool is not None:
            return from_fp4(stored, gather(block_pool, cache.layout, where), scale, dtype)
        return from_fp8(stored, scale, dtype) if pool.dtype.itemsize == 1 else stored.to(dtype)

    blocks = cache.block_scales or (None, None)
    k = side(cache.k, blocks[0], cache.k_scale)
    return k, None if cache.v is None else side(cache.v, blocks[1], cache.v_scale)


def write_index(cache: LayerCache, keys: Tensor, slots: Tensor) -> None:
    """Write index keys [N, index_dim] of sparse MLA into token slots int64 [N]."""
    if cache.index is None:
        raise UnsupportedError("this cache has no index keys; create the KVPool with index_dim")
    put(cache.index, "NHD", slots, keys.detach().to(cache.index.dtype))


def copy_slots(cache: LayerCache, src: Tensor, dst: Tensor) -> None:
    """Copy tokens between slots, int64 [N] each, as if all were read before any is written.

    For the partial last page of a draft branch, and to compact accepted tokens of a tree.
    """
    for t, layout in cache.parts():
        put(t, layout, dst, take(t, layout, src))


class KVPool:
    """The KV cache of a model: one LayerCache per softmax layer, zeros at first.

    num_pages: with page 0, the dummy; a mapping gives each view its own number. kv_cache_dtype: a
    key of STORES. kind "mla" and "dsa" store the latent once and no V; index_dim > 0 adds index
    keys. scales, of FP8 and FP4 alone: layer_id → (k_scale, v_scale), 1.0 where absent; latents
    have no v_scale. Raises UsageError, and UnsupportedError where FP4 does not fit a head dim.
    """

    def __init__(
        self,
        layers: Iterable[AttentionLayer],
        *,
        num_pages: int | Mapping[str, int],
        page_size: int,
        kv_cache_dtype: str,
        device: torch.device | str = "cpu",
        kind: Literal["mha", "mla", "dsa"] = "mha",
        layout: Literal["NHD", "HND"] = "NHD",
        index_dim: int = 0,
        scales: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        if kv_cache_dtype not in STORES:
            raise UsageError(f"kv_cache_dtype {kv_cache_dtype!r}: {near(kv_cache_dtype, STORES)}")
        if page_size < 1:
            raise UsageError(f"page_size {page_size} (expected 1 or more)")
        self.page_size, self.kv_cache_dtype, self.kind = page_size, kv_cache_dtype, kind
        self.layout, self.device, self.index_dim = layout, torch.device(device), index_dim
        self._layers: dict[int, LayerCache] = {}
        for x in layers:
            pages = num_pages if isinstance(num_pages, int) else num_pages.get(x.view, 0)
            if pages < 1:
                raise UsageError(f"layer {x.layer_id}: {pages} pages for its view {x.view!r}")
            scale = (scales or {}).get(x.layer_id, (1.0, 1.0))
            self._layers[x.layer_id] = self._create(x, pages, scale)

    def _create(self, layer: AttentionLayer, pages: int, scale: tuple[float, float]) -> LayerCache:
        fp4, size, heads = self.kv_cache_dtype == "fp4_e2m1", self.page_size, layer.num_kv_heads
        dims = [layer.head_dim] if self.kind != "mha" else [layer.head_dim, layer.v_head_dim]
        if fp4 and any(d % FP4_BLOCK for d in dims):
            raise UnsupportedError(
                f"layer {layer.layer_id}: head dims {dims} in fp4_e2m1 (supports multiples of "
                f"{FP4_BLOCK}); take fp8_e4m3 or bf16"
            )
        shape = (pages, size, heads) if self.layout == "NHD" else (pages, heads, size)

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        store, per_byte = STORES[self.kv_cache_dtype], 2 if fp4 else 1
        kv = [zeros((*shape, d // per_byte), store) for d in dims]
        blocks = [zeros((*shape, d // FP4_BLOCK), torch.float8_e4m3fn) for d in dims if fp4]
        index = zeros((pages, size, self.index_dim), torch.bfloat16) if self.index_dim else None
        return LayerCache(
            k=kv[0],
            v=kv[1] if len(kv) > 1 else None,
            k_scale=scale[0],
            v_scale=scale[1],
            block_scales=(blocks[0], blocks[1] if len(blocks) > 1 else None) if fp4 else None,
            index=index,
            layout=self.layout,
        )

    def layer(self, layer_id: int) -> LayerCache:
        """Return one layer's cache. Raises UsageError for a layer that has none."""
        try:
            return self._layers[layer_id]
        except KeyError:
            known = sorted(self._layers)
            raise UsageError(f"layer {layer_id} has no KV cache (layers: {known})") from None

    @property
    def nbytes(self) -> int:
        """Bytes that this pool holds."""
        return sum(t.nbytes for cache in self._layers.values() for t, _ in cache.parts())

    @classmethod
    def bytes_per_page(
        cls,
        layers: Iterable[AttentionLayer],
        *,
        page_size: int,
        kv_cache_dtype: str,
        kind: Literal["mha", "mla", "dsa"] = "mha",
        index_dim: int = 0,
    ) -> int:
        """Return what one page of all layers takes, in bytes, before anything is allocated."""
        return cls(
            layers,
            num_pages=1,
            page_size=page_size,
            kv_cache_dtype=kv_cache_dtype,
            device="meta",
            kind=kind,
            index_dim=index_dim,
        ).nbytes

    @classmethod
    def pages_that_fit(
        cls,
        memory: int,
        layers: Iterable[AttentionLayer],
        *,
        page_size: int,
        kv_cache_dtype: str,
        kind: Literal["mha", "mla", "dsa"] = "mha",
        index_dim: int = 0,
    ) -> int:
        """Return how many pages, the dummy included, fit into `memory` bytes."""
        return memory // cls.bytes_per_page(
            layers,
            page_size=page_size,
            kv_cache_dtype=kv_cache_dtype,
            kind=kind,
            index_dim=index_dim,
        )


class StatePool:
    """The states of a model's linear layers: one StateCache per layer, zeros at first.

    A layer's head_dim is K, v_head_dim V and num_kv_heads Hv. dtype: "fp32" or "bf16".
    num_drafts > 0 adds one intermediate state per slot and draft, for verify.
    """

    def __init__(
        self,
        layers: Iterable[AttentionLayer],
        *,
        num_slots: int,
        dtype: str = "fp32",
        num_drafts: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if dtype not in ("fp32", "bf16"):
            raise UsageError(f"linear-attention states of dtype {dtype!r} (supports fp32, bf16)")

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=STORES[dtype], device=device)

        self._layers: dict[int, StateCache] = {}
        for x in layers:
            inner = (x.num_kv_heads, x.v_head_dim, x.head_dim)
            drafts = zeros(num_slots, num_drafts, *inner) if num_drafts else None
            state = zeros(num_slots, *inner)
            self._layers[x.layer_id] = StateCache(state=state, intermediate=drafts)

    def layer(self, layer_id: int) -> StateCache:
        """Return one layer's states. Raises UsageError for a layer that has none."""
        try:
            return self._layers[layer_id]
        except KeyError:
            known = sorted(self._layers)
            raise UsageError(f"layer {layer_id} has no state (layers: {known})") from None
