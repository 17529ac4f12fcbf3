"""ascend over sparse MLA (DSA): attention to selected latents, which are gathered before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from attn_core import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    CacheView,
    ForwardBatch,
    LayerCache,
    Output,
    contiguous_out,
    copy_to_out,
    empty_attention,
    every_slot,
    kernel_pages,
    num_pages_for,
    refuse_call,
    refuse_layer,
)
from torch import Tensor

from attn_ascend.indexer import LightningIndexer
from attn_ascend.library import operator

SPARSE: Final = (
    *("query", "key", "value", "sparse_indices", "scale_value", "query_rope", "key_rope"),
    *("actual_seq_lengths_query", "actual_seq_lengths_kv", "sparse_block_size"),
    *("layout_query", "layout_kv", "sparse_mode", "attention_mode"),
)
NO_MASK, ABSORBED = 0, 2  # of sparse_mode and attention_mode
MOST_GATHERED: Final = 1 << 17  # tokens that exist twice at once: 151 MB


class AscendSparse(AttentionBackend):
    """npu_sparse_flash_attention takes latents and rope in two dense tensors; the pool has one.

    So they are gathered apart: the pages of the pass, or the selected tokens of each query, of
    which there may be fewer. Whatever is gathered is one sequence, in which all queries select.
    Nothing is read to the host and no plan is kept, so that graphs serve every length.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
        self._attend = operator("npu_sparse_flash_attention", SPARSE)
        self._indexer = LightningIndexer()

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan nothing: every layer reads the batch on the device."""
        return

    def index_topk(
        self,
        q_index: Tensor,
        weights: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: None,
    ) -> Tensor:
        """Choose the keys of each query. See LightningIndexer for what its operator leaves open."""
        assert layer.index_topk is not None  # checked by the dispatcher
        view = batch.views[layer.view]
        return self._indexer(q_index, weights, cache, view, batch.cu_seqlens_q, layer.index_topk)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: None,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the selected slots or, without a selection, to all keys."""
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        if not batch.num_tokens:
            return empty_attention(q, layer, out, return_lse)
        if topk_indices is None:
            topk_indices = every_slot(layer, batch, cache.page_size)
        result, dim = contiguous_out(q, layer.v_head_dim, out), layer.v_head_dim
        for part, latents, rope, indices in _gathered(
            cache, batch.views[layer.view], topk_indices, dim
        ):
            tokens, query = indices.shape[0], q[part]
            attended, *_ = self._attend(
                query=query[..., :dim].contiguous(),
                key=latents,
                value=latents,
                sparse_indices=indices[:, None],
                scale_value=layer.scale,
                query_rope=query[..., dim:].contiguous(),
                key_rope=rope,
                # sums of the lengths up to each request, of which there is one
                actual_seq_lengths_query=indices.new_full((1,), tokens),
                actual_seq_lengths_kv=indices.new_full((1,), latents.shape[0]),
                sparse_block_size=1,
                layout_query="TND",
                layout_kv="TND",
                sparse_mode=NO_MASK,
                attention_mode=ABSORBED,
            )
            result[part] = attended
        return copy_to_out(result, out)


def _gathered(
    cache: LayerCache, view: CacheView, slots: Tensor, v_dim: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield some queries, the latents [S, 1, 512] and ropes [S, 1, 64] that they need, and indices.

    slots: int32 [T, K], the valid ones first, then -1. The indices int32 [n, K] are of S.
    The shapes alone decide what is gathered.
    """
    tokens, topk = slots.shape
    pages = view.page_table[:, : num_pages_for(view.max_seq_len, cache.page_size)].flatten()
    if pages.numel() * cache.page_size <= tokens * topk:
        yield slice(0, tokens), *_pages(cache, pages, v_dim), _in_pages(cache, pages, slots)
        return
    flat, step = kernel_pages(cache.k, 1).flatten(1), max(1, MOST_GATHERED // topk)
    for first in range(0, tokens, step):
        part = slice(first, min(first + step, tokens))
        part_slots = slots[part]
        order = torch.arange(part_slots.numel(), dtype=torch.int32, device=slots.device)
        # beside the valid ones lies the first again: what it holds is the request's own
        filled = torch.where(part_slots < 0, part_slots[:, :1].clamp(min=0), part_slots).flatten()
        latents, rope = (
            x.index_select(0, filled)[:, None] for x in (flat[:, :v_dim], flat[:, v_dim:])
        )
        yield part, latents, rope, torch.where(part_slots < 0, -1, order.view_as(part_slots))


def _pages(cache: LayerCache, pages: Tensor, v_dim: int) -> tuple[Tensor, Tensor]:
    """Copy the latents [S, 1, 512] and ropes [S, 1, 64] of pages."""
    k = cache.k
    return tuple(x.index_select(0, pages).flatten(0, 1) for x in (k[..., :v_dim], k[..., v_dim:]))  # type: ignore[return-value]  # two of them


def _in_pages(cache: LayerCache, pages: Tensor, slots: Tensor) -> Tensor:
    """Return where slots lie among the tokens of pages; of a page that is there twice, either."""
    size = cache.page_size
    place = torch.zeros(cache.num_pages, dtype=torch.int32, device=slots.device)
    place[pages.long()] = torch.arange(len(pages), dtype=torch.int32, device=slots.device)
    page_slots = place[(slots.clamp(min=0) // size).long()] * size + slots % size
    return torch.where(slots < 0, -1, page_slots)
