"""Memory that passes share: one buffer per device, stream and use."""

from __future__ import annotations

import torch
from torch import Tensor

# Process-wide, since sharing is the point: the passes of a stream run one after the other, and each
# fills what it reads, the replays of captured graphs too.
_HELD: dict[tuple[torch.device, int, str], Tensor] = {}


def workspace(device: torch.device, use: str, nbytes: int) -> Tensor:
    """Return a uint8 buffer [at least nbytes] for one use on a device's current stream.

    Where a larger one is asked for, a new one takes its place; who captured the old one in a graph
    must hold on to it. Ask when planning, never inside a capture.
    """
    stream = 0
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        stream = torch._C._cuda_getCurrentRawStream(index)
    buffer = _HELD.get((device, stream, use))
    if buffer is None or buffer.numel() < nbytes:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _HELD[device, stream, use] = buffer
    return buffer
