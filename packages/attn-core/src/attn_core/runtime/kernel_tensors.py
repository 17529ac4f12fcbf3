"""Tensors as the kernels of vendors load and fill them: dense, 16 bytes at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_core.runtime.backend import Output
from attn_core.runtime.layer import AttentionLayer

_E4M3_MAX = 448.0


def align16(x: Tensor) -> Tensor:
    """Return x [T, H, D] itself where kernels can load 16 bytes at a time, else a dense copy.

    D is taken as a multiple of 16 bytes. A slice of fused Q, K and V is no copy. A dim of size 1
    may have any stride, which TMA reads all the same.
    """
    unit = 16 // x.element_size()
    token, head, column = x.stride()
    if column == 1 and not (token % unit or head % unit or x.data_ptr() % 16):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def contiguous16(x: Tensor) -> Tensor:
    """Return x itself where a kernel that takes no strides can load it, else a dense copy."""
    if x.is_contiguous() and not x.data_ptr() % 16:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def to_e4m3_saturating(q: Tensor) -> Tensor:
    """Return q as dense e4m3, saturated: what FP8 kernels multiply an FP8 cache by."""
    clamped = q.clamp(-_E4M3_MAX, _E4M3_MAX)
    return clamped.to(torch.float8_e4m3fn, memory_format=torch.contiguous_format)


def contiguous_out(q: Tensor, v_dim: int, out: Tensor | None) -> Tensor:
    """Return what a kernel that knows no strides of its output can fill, `out` where possible."""
    return q.new_empty(*q.shape[:2], v_dim) if out is None or not out.is_contiguous() else out


def copy_to_out(result: Tensor, out: Tensor | None) -> Tensor:
    """Return what a kernel gave in a buffer of its own, in `out` where that was given."""
    return result if out is None or out is result else out.copy_(result)


def empty_attention(
    q: Tensor, layer: AttentionLayer, out: Tensor | None, return_lse: bool
) -> Output:
    """Return the attention of queries without keys: zeros, the LSE [T, Hq] is the sink or -inf.

    q may have no tokens. `out`, if passed, is filled and returned.
    """
    if out is None:
        out = q.new_empty(q.shape[0], layer.num_q_heads, layer.v_head_dim)
    out.zero_()
    if not return_lse:
        return out
    lse = q.new_full(out.shape[:2], -torch.inf, dtype=torch.float32)
    return out, lse if layer.sinks is None else lse.copy_(layer.sinks.expand_as(lse))


class ScaleTensors:
    """The scales of FP8 stores as kernels read them, float32 [1] on the device.

    A scale is made on first use and kept. The first use may be in a capture: then the tensor is the
    graph's, which fills it in each replay, and the next call makes its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[float, Tensor] = {}
        self.of(1.0)  # what most stores have

    def of(self, scale: float | Tensor) -> Tensor:
        """Return the tensor of this scale; one that is a tensor is read where it lies."""
        if isinstance(scale, Tensor):
            return scale.view(1)
        tensor = self._tensors.get(scale)
        if tensor is None:
            tensor = torch.full((1,), scale, dtype=torch.float32, device=self._device)
            if not capturing(self._device):
                self._tensors[scale] = tensor
        return tensor


def capturing(device: torch.device) -> bool:
    """Say whether a graph is captured: what is written now has its value from the replay on."""
    if device.type == "cpu":
        return False
    query = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return query is not None and bool(query())
