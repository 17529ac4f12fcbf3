"""FP8 and FP4 (e2m1) numbers of the KV cache: saturating encoding and decoding, without a sync."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_core.cache.layer_cache import Scale
from attn_core.dtypes import FP4_BLOCK

# Bits of float32 numbers, as integers.
INFINITY = 0x7F800000  # those of NaN are above
BELOW_1_75 = 0x1FFFFF  # what a mantissa above 1.75 lacks to the next exponent
EIGHT = 8 << 23  # of an exponent
SMALLEST = (127 - 13) << 23  # 2^-13, the power of two above 1e-4
INDEX_SMALLEST = 1e-4  # the magnitude that an FP8 index key's scale stands for at least
INDEX_UNIT = 1.0 / 448.0  # of e4m3's largest number
_FP4_MAX = 6.0
_E4M3_MAX = 448.0


def to_fp8(x: Tensor, dtype: torch.dtype, scale: Scale) -> Tensor:
    """Return x / scale as float8 `dtype`, clamped to its largest finite number (448 or 57344).

    A plain cast of an out-of-range number gives NaN or infinity on some devices and versions.
    """
    top = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-top, top).to(dtype)


def from_fp8(x: Tensor, scale: Scale, dtype: torch.dtype) -> Tensor:
    """Return x · scale in `dtype`; the product is computed in float32."""
    if not isinstance(scale, Tensor) and scale == 1.0:
        return x.to(dtype)
    return (x.float() * scale).to(dtype)


def power_of_two_scale(x: Tensor) -> Tensor:
    """Return a scale float32 [...] for each group of numbers [..., n] that are stored in e4m3.

    2^ceil(log2(max(a / 448, 1e-4))), a the largest magnitude. What is stored times such a scale is
    exact in bfloat16. Of a group with a NaN the scale is NaN, with an infinity infinite. It is
    computed in integers, without the quotient, whose last bit differs from device to device.
    """
    top = x.float().abs().contiguous().view(torch.int32).amax(-1)  # so NaN is the largest
    # 448 is 1.75 · 2^8: a mantissa above 1.75 carries into the exponent
    scale = (((top + BELOW_1_75) & INFINITY) - EIGHT).clamp(min=SMALLEST)
    return torch.where(top >= INFINITY, top, scale).view(torch.float32)


def to_fp4(x: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
    """Encode [..., D] as e2m1 with one scale per 16 values: x ≈ e2m1 · block · scale.

    Returns codes uint8 [..., D / 2], low nibble first, and blocks float8_e4m3fn [..., D / 16].
    A block is the largest magnitude / 6, so its largest value is ±6; ties round to the even code,
    values beyond 6 · 448 · scale saturate, a NaN makes its whole block NaN. D % 16 must be 0.
    """
    y = torch.unflatten(x.float(), -1, (x.shape[-1] // FP4_BLOCK, FP4_BLOCK)) / scale
    blocks = (y.abs().amax(-1) / _FP4_MAX).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    unit = blocks.float().unsqueeze(-1)
    a = (y / unit.masked_fill(unit == 0, 1.0)).flatten(-2)
    m = a.abs()
    # comparisons instead of a table: nothing is copied to the device, so a graph can record it
    code = (m > 0.25).to(torch.uint8) + (m >= 0.75) + (m > 1.25) + (m >= 1.75)
    code = (code + (m > 2.5) + (m >= 3.5) + (m > 5.0)) | ((a < 0).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4), blocks


def from_fp4(codes: Tensor, blocks: Tensor, scale: Scale, dtype: torch.dtype) -> Tensor:
    """Decode what to_fp4 wrote: codes uint8 [..., D / 2], blocks [..., D / 16] → [..., D]."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    exponent, odd = (nibbles >> 1) & 3, nibbles & 1
    # twice the magnitude: 0 1 2 3 4 6 8 12, exact in uint8
    doubled = torch.where(exponent == 0, odd, (2 + odd) << (exponent.clamp(min=1) - 1))
    value = torch.where(nibbles > 7, -0.5, 0.5) * doubled
    unit = (blocks.float() * scale).unsqueeze(-1)
    return (value.view(*blocks.shape, FP4_BLOCK) * unit).flatten(-2).to(dtype)
