"""Which rows of a batch begin with the same tokens, so that they can share pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_core.runtime.batch import CacheView


def common_prompts(marks: Tensor, valid: Tensor, page_size: int) -> list[tuple[int, int]]:
    """Return for each row an earlier one and the first tokens that both have, in whole pages.

    marks: int64 [B, T, N] on the host, equal where tokens are. valid: bool [B, T], False = padding,
    which is no part of a row. Rows that begin like no other have (themselves, 0).
    """
    nodes: dict[tuple[int, bytes], tuple[int, int]] = {}  # node, next page → its node, first row
    result = []
    for row, (row_marks, mask) in enumerate(zip(marks, valid, strict=True)):
        tokens = row_marks[mask].numpy()
        node, source, shared = 0, row, 0
        for end in range(page_size, len(tokens) + 1, page_size):
            step = (node, tokens[end - page_size : end].tobytes())
            node, first = nodes.setdefault(step, (len(nodes) + 1, row))
            if first != row:
                source, shared = first, end
        result.append((source, shared))
    return result


def marks_of(ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """Return what keys and values of tokens depend on, int64 [B, T, N] on the host.

    ids: [B, T]. position_ids: [..., B or 1, T], or None: those of the columns.
    """
    b, t = ids.shape
    if position_ids is None:
        position_ids = torch.arange(t, device="cpu")[None]
    positions = position_ids.expand(*position_ids.shape[:-2], b, t).reshape(-1, b, t)
    return torch.cat([ids[None].cpu(), positions.cpu()]).long().permute(1, 2, 0).contiguous()


def written_once(
    views: Mapping[str, CacheView], lens: Sequence[int], shared: Sequence[int]
) -> dict[str, CacheView]:
    """Return the views of a first pass in which nobody writes the first shared[i] tokens of row i.

    An earlier row writes them. They go to slot 0, of the dummy page. lens: tokens of each row.
    """
    page_slots = torch.cat(
        [torch.arange(n, device="cpu") >= first for n, first in zip(lens, shared, strict=True)]
    )
    result = {}
    for name, view in views.items():
        assert view.out_cache_loc is not None
        slots = view.out_cache_loc * page_slots.to(view.out_cache_loc.device)
        result[name] = replace(view, out_cache_loc=slots)
    return result
