"""Which keys a query of sparse MLA (DSA) attends to: npu_lightning_indexer, and torch beside it."""

from __future__ import annotations

from typing import Final

import torch
from attn_core import CacheView, LayerCache, kernel_pages, read_index, slot_table, split_pages
from torch import Tensor

from attn_ascend.calls import PAGE
from attn_ascend.library import operator

INDEXER: Final = (
    *("query", "key", "weights", "actual_seq_lengths_query", "actual_seq_lengths_key"),
    *("block_table", "layout_query", "layout_key", "sparse_count", "sparse_mode"),
)
CAUSAL: Final = 3  # of sparse_mode; the last query sees the last key
HEADS, DIM, TOPK = 64, 128, 2048  # the most index heads, their dim, the most keys of a query
MOST_NUMBERS: Final = 1 << 26  # float32 that torch's scores form at once: 256 MiB
NOTHING: Final = 2**31 - 1


class LightningIndexer:
    """Selects by npu_lightning_indexer what its documentation takes, and by torch all else.

    The operator takes weights in the dtype of the queries, to which they are rounded, and does not
    say which of equal scores it selects. torch's selection is exact in both.
    """

    def __init__(self) -> None:
        self._select = operator("npu_lightning_indexer", INDEXER)

    def __call__(
        self,
        q_index: Tensor,
        weights: Tensor,
        cache: LayerCache,
        view: CacheView,
        cu_seqlens_q: Tensor,
        topk: int,
    ) -> Tensor:
        """Return token slots int32 [T, topk] in the order of their positions, then -1.

        q_index [T, Hi, Di], weights float32 [T, Hi], cu_seqlens_q int32 [B + 1]. Never syncs.
        """
        tokens = q_index.shape[0]
        if not tokens:
            return q_index.new_empty(0, topk, dtype=torch.int32)
        token = torch.arange(tokens, dtype=torch.int32, device=q_index.device)
        request = torch.searchsorted(cu_seqlens_q[1:], token, right=True)
        request.clamp_(max=len(view.seq_lens) - 1)
        if takes(q_index, cache, topk):
            return self._by_operator(q_index, weights, cache, view, cu_seqlens_q, request, topk)
        last = view.seq_lens[request] - (cu_seqlens_q[request + 1] - token)
        return by_torch(q_index, weights, cache, view, request, last, topk)

    def _by_operator(
        self,
        q_index: Tensor,
        weights: Tensor,
        cache: LayerCache,
        view: CacheView,
        cu_seqlens_q: Tensor,
        request: Tensor,
        topk: int,
    ) -> Tensor:
        assert cache.index is not None
        table = split_pages(view.page_table, cache.page_size, PAGE).contiguous()
        positions, _ = self._select(
            query=q_index.contiguous(),
            key=kernel_pages(cache.index, PAGE)[:, :, None],
            weights=weights.to(q_index.dtype).contiguous(),
            actual_seq_lengths_query=cu_seqlens_q[1:].contiguous(),  # sums, for layout TND
            actual_seq_lengths_key=view.seq_lens,  # of each request, for pages
            block_table=table,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=topk,
            sparse_mode=CAUSAL,
        )
        positions = positions[:, 0]
        positions = positions.masked_fill(positions < 0, NOTHING).sort(-1).values
        unused = positions == NOTHING
        positions.masked_fill_(unused, 0)
        pages = table[request].gather(1, (positions // PAGE).long())
        slots: Tensor = pages * PAGE + positions % PAGE
        return slots.masked_fill_(unused, -1)


def takes(q_index: Tensor, cache: LayerCache, topk: int) -> bool:
    """Say whether the operator documents these heads, dim, dtypes and number of keys."""
    _, heads, dim = q_index.shape
    index = cache.index
    stored = index is not None and index.is_contiguous() and index.dtype == q_index.dtype
    plain = q_index.dtype in (torch.float16, torch.bfloat16)
    return stored and plain and heads <= HEADS and dim == DIM and topk <= TOPK


def by_torch(
    q_index: Tensor,
    weights: Tensor,
    cache: LayerCache,
    view: CacheView,
    request: Tensor,
    last: Tensor,
    topk: int,
) -> Tensor:
    """Select by scores in float32, of equal ones the earliest.

    request: int64 [T]. last: int32 [T], the last position that each query sees.
    """
    tokens, heads, dim = q_index.shape
    slots = slot_table(view.page_table, cache.page_size, view.max_seq_len)
    length = slots.shape[1]
    position = torch.arange(length, device=slots.device)
    chosen = torch.full((tokens, topk), -1, dtype=torch.int32, device=slots.device)
    step = max(1, MOST_NUMBERS // max(1, length * max(heads, dim)))
    for first in range(0, tokens, step):
        part = slice(first, min(first + step, tokens))
        request_slots = slots[request[part]]
        keys = read_index(cache, request_slots, torch.float32)
        products = (q_index[part].float() @ keys.mT).relu_()
        scores = (weights[part, None] @ products).squeeze(1)
        scores.masked_fill_(position > last[part, None], -torch.inf)
        top = scores.argsort(dim=-1, descending=True, stable=True)[:, :topk].sort(-1).values
        selected = request_slots.gather(1, top).masked_fill_(top > last[part, None], -1)
        chosen[part, : selected.shape[1]] = selected.int()
    return chosen
