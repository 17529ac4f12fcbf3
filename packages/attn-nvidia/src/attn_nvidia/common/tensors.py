"""Tensors as NVIDIA's kernels load them: from 16 bytes on, token by token."""

from __future__ import annotations

import torch
from torch import Tensor


def aligned(x: Tensor) -> Tensor:
    """Return x itself, of any strides but the last, if it begins at 16 bytes, else a dense copy."""
    if x.stride(-1) == 1 and not x.data_ptr() % 16:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def request_of_token(cu_seqlens_q: Tensor, num_tokens: int) -> Tensor:
    """Return the request of each token, int64 [num_tokens], from int32 [B + 1]; never syncs.

    Tokens past the last request, which pad a batch, count as its.
    """
    batch_size = cu_seqlens_q.shape[0] - 1
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens_q.device)
    requests = torch.searchsorted(cu_seqlens_q.narrow(0, 1, batch_size), tokens, right=True)
    return requests.clamp_(max=batch_size - 1)
