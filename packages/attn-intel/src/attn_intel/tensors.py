"""Tensors as Intel's kernels load and fill them: by blocks of rows, from aligned addresses."""

from __future__ import annotations

import torch
from attn_core import AttentionLayer, Output
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


def empty_attention(
    q: Tensor, layer: AttentionLayer, out: Tensor | None, return_lse: bool
) -> Output:
    """Return the attention of queries without keys: zeros, the LSE [T, Hq] is -inf."""
    if out is None:
        out = q.new_empty(q.shape[0], layer.num_q_heads, layer.v_head_dim)
    out.zero_()
    return (out, q.new_full(out.shape[:2], -torch.inf, dtype=torch.float32)) if return_lse else out


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


class Scales:
    """The scales of FP8 stores as the library takes them: float32 [1], each alone in its memory.

    A scale is made on first use and kept. The first use may be in a capture: then the tensor is the
    graph's, which fills it in each replay, and the next call makes its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[float, Tensor] = {}
        self.of(1.0)  # what most stores have

    def of(self, scale: float | Tensor) -> Tensor:
        """Return the tensor of this scale; one that lies among others is copied."""
        if isinstance(scale, Tensor):
            alone = scale.untyped_storage().nbytes() == scale.element_size()
            return (scale if alone else scale.clone()).view(1)
        tensor = self._tensors.get(scale)
        if tensor is None:
            tensor = torch.full((1,), scale, device=self._device)
            if not capturing(self._device):
                self._tensors[scale] = tensor
        return tensor


def capturing(device: torch.device) -> bool:
    """Say whether a graph is captured: what is written now has its value from the replay on."""
    return device.type == "xpu" and torch.xpu.is_current_stream_capturing()
