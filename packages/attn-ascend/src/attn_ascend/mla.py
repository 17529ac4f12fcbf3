"""ascend over the latent cache of MLA: decode and chains of drafts; prefill before absorption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    kernel_pages,
    refuse_call,
    refuse_layer,
    refuse_mode,
    refuse_unplanned,
    split_pages,
)
from torch import Tensor

from attn_ascend.calls import PAGE
from attn_ascend.fused import Fused
from attn_ascend.library import operator
from attn_ascend.ragged import Ragged

PAGED_MLA: Final = (
    *("query", "key_cache", "num_kv_heads", "num_heads", "scale_value", "block_table"),
    *("context_lens", "mla_vheadsize", "out"),
)
MOST_REQUESTS: Final = 8192  # of a call


@dataclass(frozen=True, eq=False)
class Plan:
    """Every query as a request of its own, with the tokens up to itself.

    table: int32 [queries, pages]. lengths: int32 [queries], on the host, where ATB reads them.
    """

    table: Tensor
    lengths: Tensor


class AscendMLA(AttentionBackend):
    """Decode reads latent and rope side by side, as the pool has them, by ATB's paged attention.

    The fused operator wants them apart and would need a copy of the cache. It runs the heads before
    absorption (192/128), without a cache.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
        if config.row.absorbed:
            self._decode = operator("_npu_paged_attention_mla", PAGED_MLA)
        else:
            self._ragged = Ragged(Fused())
        self._views = {x.view for x in config.layers}
        self._caches: dict[int, tuple[LayerCache, Tensor]] = {}

    def init_forward_metadata(self, batch: ForwardBatch) -> Mapping[str, Plan] | None:
        """Give every query its row of the page table and its length."""
        if not self.config.row.absorbed:
            return None  # all that it runs is ragged
        if not batch.num_tokens:
            return {}
        query_lens = batch.query_lens_host
        if query_lens is None:
            query_lens = tuple(batch.cu_seqlens_q.diff().tolist())
        views = {name: batch.views[name] for name in self._views if name in batch.views}
        return {name: self._plan(query_lens, view) for name, view in views.items()}

    def _plan(self, query_lens: Sequence[int], view: CacheView) -> Plan:
        table = split_pages(view.page_table, self.config.page_size, PAGE)
        key_lens = view.seq_lens_host
        if key_lens is None:
            key_lens = tuple(view.seq_lens.tolist())
        if max(query_lens) > 1 or min(query_lens) < 1:
            requests = [b for b, n in enumerate(query_lens) for _ in range(n)]
            table = table[torch.tensor(requests, device=table.device)]
        lengths = [
            end - later
            for n, end in zip(query_lens, key_lens, strict=True)
            for later in range(n - 1, -1, -1)
        ]
        return Plan(table.contiguous(), torch.tensor(lengths, dtype=torch.int32, device="cpu"))

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Mapping[str, Plan] | None,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the latent cache, which holds the new tokens already; k is not read."""
        if metadata is None:
            refuse_mode(self.config, batch.forward_mode)
            metadata = {}
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        dense = out is not None and out.is_contiguous()
        result = out if out is not None and dense else q.new_empty(*q.shape[:2], layer.v_head_dim)
        plan = metadata.get(layer.view)
        if plan is not None:
            # tokens behind the last request pad the batch: they are in no plan
            pages, planned = self._pages(layer, cache), plan.lengths.shape[0]
            result[planned:] = 0
            for first in range(0, planned, MOST_REQUESTS):
                part = slice(first, min(first + MOST_REQUESTS, planned))
                self._decode(
                    query=q[part].contiguous(),
                    key_cache=pages,
                    num_kv_heads=1,
                    num_heads=layer.num_q_heads,
                    scale_value=layer.scale,
                    block_table=plan.table[part],
                    context_lens=plan.lengths[part],
                    mla_vheadsize=layer.v_head_dim,
                    out=result[part],
                )
        elif batch.num_tokens:
            refuse_unplanned(layer, metadata)
        return result if out is None or dense else out.copy_(result)

    def _pages(self, layer: AttentionLayer, cache: LayerCache) -> Tensor:
        """View a layer's latents as pages of the operator, [P, 128, 1, 576]; made once."""
        views = self._caches.get(layer.layer_id)
        if views is None or views[0] is not cache or views[1].data_ptr() != cache.k.data_ptr():
            views = cache, kernel_pages(cache.k, PAGE, dense=True)
            self._caches[layer.layer_id] = views
        return views[1]

    def forward_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        causal: bool,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Output:
        """Attend without a cache, heads of 192/128."""
        refuse_call(self.config, return_lse=return_lse)
        lengths = (cu_seqlens_q, cu_seqlens_k)
        return self._ragged(q, k, v, layer, *lengths, causal=causal, out=out, return_lse=return_lse)
