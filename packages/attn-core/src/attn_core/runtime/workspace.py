"""Scratch memory of kernels: one zeroed buffer per device, stream and use, shared by all."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_core.runtime.kernel_tensors import capturing

# Process-wide, since sharing is the point: the layers of a pass run one after the other on one
# stream, so every backend, model and plan of that stream can use the same scratch. The replays of
# captured graphs too: each pass fills what it reads.
_HELD: dict[tuple[torch.device, int, str], Tensor] = {}


def workspace(device: torch.device, use: str, nbytes: int) -> Tensor:
    """Return a uint8 buffer [at least nbytes] for one use on a device's current stream.

    Zeroed when created: kernels that need zeros (semaphores) leave zeros behind, so a use must
    never be shared by kernels of another kind. Where a larger one is asked for, a new one takes
    its place; who captured the old one in a graph must hold on to it. Ask when planning: one that
    is made inside a capture is the graph's alone, which zeroes it in each replay. The streams of
    CUDA and ROCm are told apart, those of other devices are not.
    """
    stream = 0
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        # what torch's own generated code asks; a Stream object costs ten times as much
        stream = torch._C._cuda_getCurrentRawStream(index)
    buffer = _HELD.get((device, stream, use))
    if buffer is None or buffer.numel() < nbytes:
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        if not capturing(device):
            _HELD[device, stream, use] = buffer
    return buffer
