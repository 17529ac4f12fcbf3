"""Refuse new tokens that do not fit the cache that they are to be written to, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import UsageError


def check_write(cache: LayerCache, k: Tensor, v: Tensor | None, slots: Tensor) -> None:
    """Raise UsageError for new K and V that do not fit the slots, or slots that are no int64 [N].

    What fitted last is kept with the cache.
    """
    shapes = (slots.dtype, slots.shape, k.shape, None if v is None else v.shape)
    if cache.launchers.get("fits") == shapes:
        return
    heads, dim, v_dim = head_dims(cache)
    fits = slots.dtype == torch.int64 and slots.dim() == 1 and k.shape == (*slots.shape, heads, dim)
    if not fits or (v_dim != 0 if v is None else v.shape != (*slots.shape, heads, v_dim)):
        raise UsageError(
            f"k {list(k.shape)}, v {None if v is None else list(v.shape)} for slots {slots.dtype} "
            f"{list(slots.shape)} of a cache with {heads} heads of {[dim, v_dim] if v_dim else dim}"
            " (expected [slots, heads, head dim] and int64 [slots])"
        )
    cache.launchers["fits"] = shapes


def stray_slots(cache: LayerCache, *slots: Tensor) -> UsageError:
    """Return the error of slots that the cache has not, at which an index failed on a CPU."""
    low, high = min(int(x.min()) for x in slots), max(int(x.max()) for x in slots)
    return UsageError(
        f"token slots {low} to {high} of a cache of {cache.num_pages} pages of {cache.page_size} "
        f"tokens (expected 0 to {cache.num_pages * cache.page_size - 1}: page · page_size + offset)"
    )


def stray_pages(cache: LayerCache, pages: Tensor) -> UsageError:
    """Return the error of pages that the cache has not, at which an index failed on a CPU."""
    return UsageError(
        f"pages {int(pages.min())} to {int(pages.max())} of a cache of {cache.num_pages} pages "
        f"(expected 0 to {cache.num_pages - 1})"
    )


def head_dims(cache: LayerCache) -> tuple[int, int, int]:
    """Return the heads of a cache, the head dim of K and that of V, 0 without V."""
    heads = cache.k.shape[1 if cache.layout == "HND" else 2]
    if cache.latent_dim:
        return heads, cache.latent_dim + cache.latents[2].shape[-1], 0
    packed = 1 if cache.block_scales is None else 2  # numbers in one element of the pool
    v_dim = 0 if cache.v is None else cache.v.shape[-1]
    return heads, cache.k.shape[-1] * packed, v_dim * packed


def check_index_write(dim: int, keys: Tensor, slots: Tensor) -> None:
    """Raise UsageError for keys that are not [N, dim], and for slots that are no int64 [N]."""
    if slots.dtype != torch.int64 or slots.dim() != 1 or keys.shape != (*slots.shape, dim):
        raise UsageError(
            f"index keys {list(keys.shape)} for slots {slots.dtype} {list(slots.shape)} (expected "
            f"[slots, {dim}] and int64 [slots])"
        )
