"""What a pass of SGLang says of linear layers: lengths on the host, and the states to keep."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_core.cache.state_pool import CHUNK_SIZE
from attn_core.runtime.batch import ForwardMode


def query_lens(forward_batch: Any, mode: ForwardMode, drafts: int) -> tuple[int, ...]:
    """Return the new tokens of each request; waits for lengths that the host lacks."""
    size: int = forward_batch.batch_size
    if mode is ForwardMode.DECODE:
        return (1,) * size
    if mode is ForwardMode.TARGET_VERIFY:
        return (drafts,) * size
    known = forward_batch.extend_seq_lens_cpu
    return tuple(map(int, forward_batch.extend_seq_lens.tolist() if known is None else known))


def checkpoint_slots(forward_batch: Any, lens: tuple[int, ...]) -> Tensor:
    """Return where an extend keeps states for SGLang's prefix cache: int32 [chunks], on the host.

    A request keeps one, at its last checkpoint before `mamba_track_seqlens`. Waits for the device.
    """
    from sglang.srt.runtime_context import get_server_args

    every = int(get_server_args().mamba_cache_chunk_size)  # a multiple of 64
    columns = ("mamba_track_mask", "mamba_track_indices", "mamba_track_seqlens")
    table = torch.stack([getattr(forward_batch, x).long() for x in columns])
    starts = forward_batch.extend_prefix_lens.long()
    requests = torch.cat([table, starts[None]]).T.tolist()
    slots: list[int] = []
    for (keeps, slot, end, start), tokens in zip(requests, lens, strict=True):
        own = [-1] * -(-tokens // CHUNK_SIZE)
        last = (end - start) // every * (every // CHUNK_SIZE)
        if keeps and last > 0:
            own[last - 1] = slot
        slots += own
    return torch.tensor(slots, dtype=torch.int32, device="cpu")
