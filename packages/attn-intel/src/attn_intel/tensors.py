"""Tensors as Intel's kernels load and fill them: by blocks of rows, from aligned addresses."""

from __future__ import annotations

import torch
from attn_core import LayerCache, UnsupportedError
from torch import Tensor

_BASE = 64  # bytes at whose multiples a surface of blocks begins


def loads(x: Tensor) -> bool:
    """Say whether block loads and stores reach x [T, H, D] where it lies."""
    unit = 16 // x.element_size()
    token, head, column = x.stride()
    return column == 1 and not (token % unit or head % unit or x.data_ptr() % _BASE)


def aligned(x: Tensor) -> Tensor:
    """Return x [T, H, D] itself where block loads reach it, else a dense copy."""
    return x if loads(x) else x.clone(memory_format=torch.contiguous_format)


def refuse_pages(name: str, cache: LayerCache) -> None:
    """Raise UnsupportedError for pages, parts of a larger tensor, that block loads do not reach."""
    assert cache.v is not None
    pages = (cache.k, cache.v)
    # both are addressed by tokens, through one table
    distances = {divmod(x.stride(0), x.stride(1)) for x in pages}
    if len(distances) > 1 or distances.pop()[1] or not all(loads(x[0]) for x in pages):
        raise UnsupportedError(
            f"pool pages {list(pages[0].shape)} with strides {list(pages[0].stride())} and "
            f"{list(pages[1].stride())}: {name} reads pages a whole number of tokens apart, the "
            f"same for K and V, and rows that begin at {_BASE} bytes and go on by 16; create the "
            "pool with a tensor for each of K and V, as KVPool does, or name another backend"
        )


def without_keys(
    cu_seqlens_q: Tensor, key_lengths: Tensor, num_tokens: int, *, causal: bool
) -> Tensor:
    """Say which queries see no key, bool [T]: the kernels divide by 0 there. Never syncs.

    cu_seqlens_q int32 [B + 1], key_lengths int32 [B]. In causal order these are the first queries
    of a request that has fewer keys.
    """
    lengths = cu_seqlens_q.diff()
    blind = (lengths - key_lengths).clamp_(min=0)
    if not causal:
        blind = torch.where(key_lengths == 0, lengths, 0)
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens_q.device)
    request = torch.searchsorted(cu_seqlens_q[1:].contiguous(), tokens, right=True)
    request.clamp_(max=lengths.shape[0] - 1)  # rows that pad a batch count as the last one's
    return tokens - cu_seqlens_q[request] < blind[request]


def alone(scale: float | Tensor) -> float | Tensor:
    """Return a scale itself, or a copy of one that lies among others, as the library takes them."""
    if isinstance(scale, Tensor) and scale.untyped_storage().nbytes() != scale.element_size():
        return scale.clone()
    return scale
