"""Faults of reading the cache: pages, slots and stored numbers."""

from dataclasses import replace

import torch
from reference import Reference


class OnePageTooFar(Reference):
    def rows(self, batch, view):
        size, result = self.config.page_size, super().rows(batch, view)
        return [replace(r, length=min(r.length + size, r.table.numel() * size)) for r in result]


class LastPageWhole(Reference):
    """The length of the last page is ignored."""

    def rows(self, batch, view):
        size = self.config.page_size
        return [replace(r, length=-(-r.length // size) * size) for r in super().rows(batch, view)]


class OneKeyShort(Reference):
    def rows(self, batch, view):
        return [replace(r, length=max(r.length - 1, r.queries)) for r in super().rows(batch, view)]


class PagesInOrderOfTheirIds(Reference):
    def rows(self, batch, view):
        size = self.config.page_size
        return [
            replace(r, table=r.table[: -(-r.length // size)].sort().values)
            for r in super().rows(batch, view)
        ]


class SlotForPage(Reference):
    """Table entries are taken for token slots."""

    def slots(self, rows, page_size):
        position = torch.arange(rows.length, device=rows.table.device)
        return rows.table[position // page_size].long() + position % page_size


class PageSizeOf16(Reference):
    def slots(self, rows, page_size):
        position = torch.arange(rows.length, device=rows.table.device)
        index = (position // 16).clamp(max=rows.table.numel() - 1)
        return rows.table[index].long() * page_size + position % 16 % page_size


class TableRowOfTheNext(Reference):
    def rows(self, batch, view):
        result = super().rows(batch, view)
        return [replace(r, table=result[(r.index + 1) % len(result)].table) for r in result]


class TailReadAndMasked(Reference):
    """Keys past the end weigh nothing, but their values are read: 0 · NaN."""

    def read(self, cache, rows, layer):
        size = cache.page_size
        return super().read(cache, replace(rows, length=-(-rows.length // size) * size), layer)

    def visible(self, layer, rows, n, s, device):
        seen = super().visible(layer, rows, n, rows.length, device)
        return torch.nn.functional.pad(seen, (0, s - rows.length))


class CrossKeysOfTheDecoder(Reference):
    def rows(self, batch, view):
        return super().rows(batch, "full")


class ValuesByTheStrideOfKeys(Reference):
    def read(self, cache, rows, layer):
        keys, values = super().read(cache, rows, layer)
        if cache.v is None or cache.v.dtype.itemsize == 1 or cache.layout != "NHD":
            return keys, values
        flat, inner = cache.v.flatten(), cache.k[0, 0].numel()
        slots = self.slots(rows, cache.page_size)[:, None, None]
        head = torch.arange(cache.k.shape[2], device=flat.device)[:, None] * cache.k.shape[3]
        at = slots * inner + head + torch.arange(cache.v.shape[3], device=flat.device)
        return keys, flat[at % flat.numel()].float()


class OffsetsOf16Bits(Reference):
    """Where a page begins is counted in numbers, and wraps."""

    def slots(self, rows, page_size):
        per_token = self.config.layers[0].num_kv_heads * self.config.layers[0].head_dim
        return super().slots(rows, page_size) * per_token % (1 << 16) // per_token


class ScalesSwapped(Reference):
    def scales(self, cache):
        return cache.v_scale, cache.k_scale


class ValueScaleIgnored(Reference):
    def scales(self, cache):
        return cache.k_scale, (cache.k_scale if cache.v is None else 1.0)


class KeyScaleIgnored(Reference):
    def scales(self, cache):
        return 1.0, cache.v_scale


class TensorScalesIgnored(Reference):
    """Only a scale that is a number is applied."""

    def scales(self, cache):
        return tuple(1.0 if isinstance(x, torch.Tensor) else x for x in super().scales(cache))


class TensorScalesReadOnce(Reference):
    """What a scale held in the first pass is kept, though it is calibrated later."""

    def __init__(self, config):
        super().__init__(config)
        self.read_scales = {}

    def scales(self, cache):
        for x in super().scales(cache):
            self.read_scales.setdefault(id(x), float(x))
        return tuple(self.read_scales[id(x)] for x in super().scales(cache))


class E5m2ReadAsE4m3(Reference):
    def decode_fp8(self, x, scale):
        return super().decode_fp8(x.view(torch.float8_e4m3fn), scale)


class Fp4NibblesSwapped(Reference):
    def decode_fp4(self, codes, unit, scale):
        return super().decode_fp4((codes >> 4) | (codes << 4), unit, scale)


class Fp4ScaleOfTheNextBlock(Reference):
    def decode_fp4(self, codes, unit, scale):
        raw = unit.view(torch.uint8)
        return super().decode_fp4(codes, raw.roll(1, -1).view(unit.dtype), scale)


class Fp4ScalesOfTheFirstCall(Reference):
    """The scales of FP4 are made once, though every layer has its own."""

    first = None

    def scales(self, cache):
        if cache.block_scales is None:
            return super().scales(cache)
        self.first = self.first or super().scales(cache)
        return self.first


class ScribblesIntoTheCache(Reference):
    """A scratch row lies in the last page of the pool."""

    def read(self, cache, rows, layer):
        result = super().read(cache, rows, layer)
        self.bytes(cache.k)[-1, -1] = 0
        return result
