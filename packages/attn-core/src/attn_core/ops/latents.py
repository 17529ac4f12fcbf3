"""FP8 latents of sparse MLA (DSA): a scale per 128 values of a token, its rope part in bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_core.cache.layer_cache import split_latents
from attn_core.dtypes import LATENT_BLOCK
from attn_core.ops.quant import power_of_two_scale, to_fp8


def to_latents(x: Tensor, latent_dim: int) -> Tensor:
    """Encode latents [..., D], any float dtype, as uint8 [..., bytes], what LayerCache.k stores.

    The scale of 128 values is a power of two (power_of_two_scale), so that what is stored times its
    scale is exact in bfloat16. A NaN or an infinity makes its 128 values NaN.
    Source: the quantiser of FlashMLA's tests, whose kernels read this store.
    """
    values = torch.unflatten(x[..., :latent_dim].float(), -1, (-1, LATENT_BLOCK))
    scale = power_of_two_scale(values)
    stored = to_fp8(values, torch.float8_e4m3fn, scale[..., None]).flatten(-2)
    rope = x[..., latent_dim:].to(torch.bfloat16).contiguous()
    return torch.cat([part.view(torch.uint8) for part in (stored, scale, rope)], -1)


def from_latents(tokens: Tensor, latent_dim: int, dtype: torch.dtype) -> Tensor:
    """Decode what to_latents wrote: uint8 [..., bytes] → [..., D] in `dtype`, through float32.

    FP8 may round a value of fp16 up to 65,536, beyond fp16; it is read as 65,504, fp16's largest.
    """
    values, scales, rope = split_latents(tokens, latent_dim)
    blocks = torch.unflatten(values.float(), -1, (-1, LATENT_BLOCK)) * scales[..., None]
    if dtype is torch.float16:
        blocks.clamp_(-65504.0, 65504.0)
    return torch.cat([blocks.flatten(-2), rope.float()], -1).to(dtype)
