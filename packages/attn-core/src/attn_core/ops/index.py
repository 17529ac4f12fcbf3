"""Write and read the index keys of sparse MLA (DSA), on any device and without a sync."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as cached

import torch
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache
from attn_core.cache.paged_tensor import put, take
from attn_core.ops.kv import has_triton, real_slots, write_kv
from attn_core.ops.quant import INDEX_SMALLEST, INDEX_UNIT, from_fp8, power_of_two_scale, to_fp8
from attn_core.ops.write_checks import check_index_write, stray_slots


def write_index(cache: LayerCache, keys: Tensor, slots: Tensor, form: int = -1) -> None:
    """Write index keys [N, dim] into token slots int64 [N], in the format of the cache.

    FP8 computes one float32 scale per key: its largest magnitude, at least 1e-4, times 1/448. This
    product has the same bits on every device; torch's division by a number has not. A Hadamard
    transform is the caller's, of queries and keys alike.
    On a GPU with Triton this is one launch. There and on a CPU nothing is written for a slot of -1.
    form: see attn_core.ops.kv.write_kv.

    Raises UnsupportedError without index keys, UsageError for what does not fit them.
    """
    try:
        _writer(slots.device.type)(cache, keys, slots, form)
    except IndexError as error:
        raise stray_slots(cache, slots) from error


def write_latents_and_index(
    cache: LayerCache, keys: Tensor, k: Tensor, slots: Tensor, form: int = -1
) -> None:
    """Write new index keys and latents k [N, 1, D] into token slots, as write_index and write_kv.

    On a GPU with Triton this is one launch. The arguments and errors are those of these two.
    """
    if has_triton(slots.device.type):
        from attn_core.ops.triton import sparse_write

        if sparse_write.fits_one_launch(cache):
            sparse_write.write_latents_and_index(cache, keys, k, slots, form)
            return
    write_index(cache, keys, slots)
    write_kv(cache, k, None, slots)


@cached
def _writer(device_type: str) -> Callable[[LayerCache, Tensor, Tensor, int], None]:
    """Return what writes on a type of device; both write the same bits."""
    if has_triton(device_type):
        from attn_core.ops.triton import index

        return index.write_index
    return _write


def _write(cache: LayerCache, keys: Tensor, slots: Tensor, form: int = -1) -> None:
    values, scales = cache.index_keys
    check_index_write(values.shape[-1], keys, slots)
    if (valid := real_slots(slots)) is not None:
        keys, slots = keys[valid], slots[valid]
    x = keys.detach()
    if scales is None:
        return put(values, "NHD", slots, x.to(values.dtype))
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=INDEX_SMALLEST) * INDEX_UNIT
    put(values, "NHD", slots, to_fp8(x, values.dtype, scale))
    put(scales, "NHD", slots, scale[:, 0])


def read_index(cache: LayerCache, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather token slots, int64 of any shape S, as index keys [*S, dim] in `dtype`.

    FP8 is dequantised in float32. Raises UnsupportedError without index keys and, on a CPU,
    UsageError for slots that the cache has not.
    """
    values, scales = cache.index_keys
    try:
        stored = take(values, "NHD", slots)
    except IndexError as error:
        raise stray_slots(cache, slots) from error
    if scales is None:
        return stored.to(dtype)
    return from_fp8(stored, take(scales, "NHD", slots)[..., None], dtype)


def to_fp8_queries(q_index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the indexer's queries [T, Hi, Di] to e4m3, and take their scales into the weights.

    weights: float32 [T, Hi]. A query has one scale, a power of two. Returns what index_topk takes:
    its scores are those of the queries before, up to the rounding to e4m3, since relu(s · x) is
    s · relu(x) for a scale s > 0.
    """
    scale = power_of_two_scale(q_index.detach())
    return to_fp8(q_index.detach(), torch.float8_e4m3fn, scale[..., None]), weights * scale
