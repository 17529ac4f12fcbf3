"""Bring the keys and values of a tile together, from pages or by a view, in the queries' dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_core.backends.torch_native.plan import Tile, Where
from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import BatchError
from attn_core.ops.quant import from_fp4, from_fp8

Buffers = dict[str, Tensor]  # outlive a call: fresh memory costs a CPU more than the copy into it


_LINE = 64  # bytes at whose multiples torch's memory on a CPU begins


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy of the same strides where it begins between two lines of memory.

    A CPU's products take the first numbers apart until the rest is aligned, so that the last bits
    of their sums depend on the address.
    """
    return x.clone() if x.is_cpu and x.data_ptr() % _LINE else x


class KeyValues:
    """The keys and values of one layer, read tile by tile, unscaled, in `dtype`.

    k_scale and v_scale are left to the caller: they commute with attention, and without them what
    FP8 and FP4 store is exact in float16 and bfloat16.
    """

    def __init__(self, cache: LayerCache, dtype: torch.dtype, block: int, buffers: Buffers) -> None:
        scales = cache.block_scales or (None, None)

        def reader(name: str, pool: Tensor | None) -> _Blocks | None:
            return None if pool is None else _Blocks(name, pool, cache.layout, block, buffers)

        self._dtype = dtype
        self._k, self._v = reader("k", cache.k), reader("v", cache.v)
        self._k_scales, self._v_scales = (
            reader("k scales", scales[0]),
            reader("v scales", scales[1]),
        )

    def read(self, tile: Tile, requests: int) -> tuple[Tensor, Tensor | None]:
        """Return k [R, Hkv, keys, D] and v alike (None for MLA), valid until the next read.

        A tile in splits has one request, and its splits take the place of R.
        """
        k = self._side(self._k, self._k_scales, tile, requests)
        assert k is not None
        return k, self._side(self._v, self._v_scales, tile, requests)

    def _side(
        self, values: _Blocks | None, scales: _Blocks | None, tile: Tile, requests: int
    ) -> Tensor | None:
        if values is None:
            return None
        x = values.tokens(tile, requests)
        if x.dtype != self._dtype:
            if scales is not None:
                x = from_fp4(x, scales.tokens(tile, requests), 1.0, self._dtype)
            else:
                x = from_fp8(x, 1.0, self._dtype)  # a plain dtype is cast alike
        return x.transpose(1, 2)


class _Blocks:
    """One paged tensor in blocks of tokens, and the buffer that they are gathered into."""

    def __init__(self, name: str, pool: Tensor, layout: str, block: int, buffers: Buffers) -> None:
        self._pool = pool if layout == "NHD" else pool.transpose(1, 2)
        self._name, self._block, self._buffers = name, block, buffers
        # not every device indexes float8; its bytes can always be moved
        self._raw = self._pool.view(torch.uint8) if pool.dtype.itemsize == 1 else self._pool
        self._tail = self._pool.shape[2:]
        self._flat: Tensor | None = None
        if self._raw.is_contiguous():
            width = block * math.prod(self._tail)  # a pool may have no tokens
            self._flat = self._raw.view(pool.shape[0] * self._raw.shape[1] // block, width)

    def tokens(self, tile: Tile, requests: int) -> Tensor:
        """The tokens of a tile, [R or splits, keys, H, ...], in the pool's dtype."""
        blocks = self._scattered(tile.blocks) if self._flat is None else self._rows(tile.blocks)
        if self._raw is not self._pool:
            blocks = blocks.view(self._pool.dtype)
        if tile.whole:
            return blocks.view(max(requests, tile.splits), -1, *self._tail)
        tokens = blocks.view(requests, -1, *self._tail)[:, tile.start : tile.start + tile.length]
        return tokens.view(tile.splits, -1, *self._tail) if tile.splits > 1 else tokens

    def _rows(self, blocks: Where) -> Tensor:
        """Blocks of a pool whose tokens follow each other: a view, or whole rows copied."""
        assert self._flat is not None
        if isinstance(blocks, slice):
            self._refuse_stray(blocks)
            return self._flat[blocks]
        count, width = blocks.shape[0], self._flat.shape[1]
        buffer = self._buffers.get(self._name)
        if buffer is None or buffer.numel() < count * width or buffer.dtype != self._flat.dtype:
            with torch.inference_mode(False):  # passes of either mode fill it
                buffer = self._buffers[self._name] = self._flat.new_empty(count * width)
        out = buffer.as_strided((count, width), (width, 1))
        try:
            return torch.index_select(self._flat, 0, blocks, out=out)
        except IndexError:  # of a CPU; asking before each call would cost a decode step
            self._refuse_stray(blocks)
            raise

    def _scattered(self, blocks: Where) -> Tensor:
        """The same of any other pool, token by token."""
        self._refuse_stray(blocks)
        if isinstance(blocks, slice):
            blocks = torch.arange(blocks.start, blocks.stop, device=self._raw.device)
        offset = torch.arange(self._block, device=blocks.device)
        slots = (blocks[:, None].long() * self._block + offset).flatten()
        page_size = self._raw.shape[1]
        return self._raw[slots // page_size, slots % page_size]

    def _refuse_stray(self, blocks: Where) -> None:
        """Raise BatchError for blocks that the pool lacks, which only a CPU can look at.

        A slice would leave them out, and torch's kernel ends the process where no key is left.
        """
        if isinstance(blocks, slice):
            low, high = blocks.start, blocks.stop - 1
        elif blocks.is_cpu and blocks.numel():
            low, high = (int(x) for x in blocks.aminmax())
        else:
            return
        pages, per_page = self._raw.shape[0], self._raw.shape[1] // self._block
        if low < 0 or high >= pages * per_page:
            page = (low if low < 0 else high) // per_page
            raise BatchError(
                f"the page table lists page {page} of a pool of {pages} pages (expected 0 to "
                f"{pages - 1})"
            )
