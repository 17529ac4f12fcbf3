"""Move tokens in and out of a paged tensor, by token slot or by whole page, without a sync."""

from __future__ import annotations

import torch
from torch import Tensor

# A paged tensor is [pages, page_size, ...] in layout "NHD" and [pages, heads, page_size, ...] in
# "HND". A token slot is page · page_size + offset, int64.


def _raw(t: Tensor) -> Tensor:
    # not every device indexes float8; its bytes can always be moved
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def _index(t: Tensor, layout: str, slots: Tensor) -> tuple[Tensor | slice, ...]:
    page_size = t.shape[2 if layout == "HND" else 1]
    page, offset = slots // page_size, slots % page_size
    if slots.is_cpu:  # torch counts a negative page from the end, but refuses one past the end
        page = torch.where(page < 0, t.shape[0], page)
    return (page, slice(None), offset) if layout == "HND" else (page, offset)


def put(t: Tensor, layout: str, slots: Tensor, values: Tensor) -> None:
    """Write values [N, ...] of t's dtype into slots [N] of a paged tensor."""
    t, values = _raw(t), _raw(values)
    if layout == "NHD" and t.is_contiguous():
        t.view(-1, *t.shape[2:]).index_copy_(0, slots, values)
    else:
        t[_index(t, layout, slots)] = values


def take(t: Tensor, layout: str, slots: Tensor) -> Tensor:
    """Gather slots of any shape S as a new tensor [*S, ...]."""
    raw, flat = _raw(t), slots.reshape(-1)
    if layout == "NHD" and raw.is_contiguous():
        # rows of one dimension: three times as fast on a CPU
        rows = raw.view(raw.shape[0] * raw.shape[1], -1).index_select(0, flat)
        gathered = rows.view(-1, *raw.shape[2:])
    else:
        gathered = raw[_index(raw, layout, flat)]
    return gathered.view(t.dtype).view(*slots.shape, *gathered.shape[1:])


def take_pages(t: Tensor, layout: str, pages: Tensor) -> Tensor:
    """Gather pages, int of any shape S, as [*S, page_size, ...]; "HND" gives a transposed view."""
    raw, flat = _raw(t), pages.reshape(-1)
    if raw.is_contiguous():
        gathered = raw.view(raw.shape[0], -1).index_select(0, flat)
    else:
        gathered = raw.index_select(0, flat)
    gathered = gathered.view(t.dtype).view(*pages.shape, *raw.shape[1:])
    return gathered.transpose(-3, -2) if layout == "HND" else gathered
