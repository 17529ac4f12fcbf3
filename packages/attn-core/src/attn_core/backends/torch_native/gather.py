"""Bring the keys and values of a tile together, from pages or by a view, in the queries' dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_core.backends.torch_native.plan import Tile, Where
from attn_core.kv_cache import LayerCache
from attn_core.quant import from_fp4, from_fp8


class Scratch:
    """Buffers that outlive a call: fresh memory costs a CPU more in page faults than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, like: Tensor) -> Tensor:
        """Return `numel` elements of like's dtype and device, contents undefined."""
        buffer = self._buffers.get(name)
        if (
            buffer is None
            or buffer.numel() < numel
            or buffer.dtype != like.dtype
            or buffer.device != like.device
        ):
            buffer = self._buffers[name] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return buffer[:numel]


def gather(
    cache: LayerCache, tile: Tile, requests: int, dtype: torch.dtype, scratch: Scratch
) -> tuple[Tensor, Tensor | None]:
    """Return k [R, Hkv, keys, D] and v alike (None for MLA) of a tile, unscaled, in `dtype`.

    A tile in splits has one request, and its splits take the place of R. k_scale and v_scale are
    left to the caller: they commute with attention, and without them what FP8 and FP4 store is
    exact in float16 and bfloat16. The result lives until the next gather.
    """
    blocks = cache.block_scales or (None, None)

    def side(name: str, pool: Tensor, block_pool: Tensor | None) -> Tensor:
        x = _tokens(name, pool, cache.layout, tile, requests, scratch)
        if block_pool is not None:
            block = _tokens(name + " blocks", block_pool, cache.layout, tile, requests, scratch)
            x = from_fp4(x, block, 1.0, dtype)
        elif x.dtype.itemsize == 1:
            x = from_fp8(x, 1.0, dtype)
        return x.to(dtype).transpose(1, 2)

    k = side("k", cache.k, blocks[0])
    return k, None if cache.v is None else side("v", cache.v, blocks[1])


def _tokens(
    name: str, pool: Tensor, layout: str, tile: Tile, requests: int, scratch: Scratch
) -> Tensor:
    """The tokens of a tile, [R or splits, keys, H, ...], in the pool's dtype."""
    pages = _pages(name, pool, tile.pages, scratch)
    if layout == "HND":
        pages = pages.transpose(1, 2)
    tokens = pages.reshape(requests, -1, *pages.shape[2:])
    tokens = tokens[:, tile.start : tile.start + tile.length]
    return tokens.view(tile.splits, -1, *tokens.shape[2:]) if tile.splits > 1 else tokens


def _pages(name: str, pool: Tensor, pages: Where, scratch: Scratch) -> Tensor:
    if isinstance(pages, slice):
        return pool[pages]
    # not every device indexes float8; its bytes can always be moved
    raw = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
    if not raw.is_contiguous():
        return raw.index_select(0, pages).view(pool.dtype)
    rows = raw.view(raw.shape[0], -1)
    out = scratch.take(name, pages.numel() * rows.shape[1], raw).view(pages.numel(), -1)
    torch.index_select(rows, 0, pages, out=out)
    return out.view(pages.numel(), *raw.shape[1:]).view(pool.dtype)
