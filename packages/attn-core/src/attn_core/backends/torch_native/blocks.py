"""Where the blocks of a request lie: in a page table, or one after another in ragged tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_core.backends.torch_native.plan import BlocksOf, Where


def paged(table: Tensor, split: int) -> BlocksOf:
    """Look blocks up in a page table; every page is `split` of them."""
    if split > 1:
        part = torch.arange(split, dtype=table.dtype, device=table.device)
        table = (table[:, :, None] * split + part).flatten(1)

    def blocks_of(requests: Sequence[int], first: int, end: int) -> Where:
        a, b = requests[0], requests[-1]
        rows = table[a : b + 1] if b - a == len(requests) - 1 else table[list(requests)]
        ids = rows[:, first:end].reshape(-1)
        # only a table on the host can be looked at without a sync
        if ids.device.type == "cpu" and _consecutive(ids):
            return slice(int(ids[0]), int(ids[0]) + ids.numel())
        return ids

    return blocks_of


def ragged(starts: Sequence[int], device: torch.device) -> BlocksOf:
    """Look tokens up that lie one after another; starts: the first of each request."""

    def blocks_of(requests: Sequence[int], first: int, end: int) -> Where:
        offsets = torch.tensor([starts[b] for b in requests], device="cpu")
        ids = (offsets[:, None] + torch.arange(first, end, device="cpu")).reshape(-1)
        if _consecutive(ids):
            return slice(int(ids[0]), int(ids[0]) + ids.numel())
        return ids.to(device)

    return blocks_of


def _consecutive(ids: Tensor) -> bool:
    first, last = int(ids[0]), int(ids[-1])
    return last - first == ids.numel() - 1 and bool((ids.diff() == 1).all())
