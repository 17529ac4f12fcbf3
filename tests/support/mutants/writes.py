"""Faults of writing the cache: a kernel that stores new keys and values itself."""

import torch
from reference import Reference


class WritesOneSlotOff(Reference):
    def write(self, cache, k, v, slots):
        super().write(cache, k, v, slots + 1)


class WritesPaddedRows(Reference):
    """Tokens of padded rows go to a real page instead of the dummy."""

    def write(self, cache, k, v, slots):
        size = cache.page_size
        super().write(cache, k, v, torch.where(slots < size, slots + size, slots))


class WritesTheFirstLayer(Reference):
    first = None

    def forward(self, q, k, v, layer, cache, *args, **kwargs):
        if layer.layer_id == 0:
            self.first = cache
        return super().forward(q, k, v, layer, cache, *args, **kwargs)

    def write(self, cache, k, v, slots):
        super().write(self.first, k, v, slots)


class WritesFusedTakenForContiguous(Reference):
    """Keys and values that lie among the queries of one product are read without its strides."""

    def write(self, cache, k, v, slots):
        k, v = (
            x if x is None else x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))
            for x in (k, v)
        )
        super().write(cache, k, v, slots)


class WritesAtOffsetsOf16Bits(Reference):
    """Where a token is stored is counted in numbers, and wraps."""

    def write(self, cache, k, v, slots):
        per_token = k.shape[1] * k.shape[2]
        super().write(cache, k, v, slots * per_token % (1 << 16) // per_token)


class WritesWithoutSaturation(Reference):
    def encode_fp8(self, x, dtype, scale):
        y = x.float() / scale
        # not every cast gives NaN beyond the largest number, so say it
        return y.masked_fill(y.abs() > torch.finfo(dtype).max, torch.nan).to(dtype)


class WritesValuesOverKeys(Reference):
    def write(self, cache, k, v, slots):
        super().write(cache, k if v is None or v.shape != k.shape else v, v, slots)
