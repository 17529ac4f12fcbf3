"""fa4 in prefill over an FP4 cache: the pages of a pass are dequantised, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from attn_core import AttentionLayer, CacheView, ForwardBatch, LayerCache, Output, read_pages
from torch import Tensor

from attn_nvidia.fa4 import FA4, Plans


class Pages(NamedTuple):
    """What a layer dequantises: pages int64 [P] of the cache, and the plans over just these."""

    plans: Plans
    of_view: Mapping[str, Tensor]


class FA4OverFP4(FA4):
    """FA4 has no FP4 kernel, so that each layer's pages of the pass become a cache of 16 bits.

    It holds (D + Dv) · Hkv · 2 bytes a KV token, and lives as long as the call.
    """

    def init_forward_metadata(self, batch: ForwardBatch) -> Pages:  # type: ignore[override]
        """Number the pages of each view in the order in which they are dequantised."""
        views, pages = {}, {}
        for name, view in batch.views.items():
            views[name], pages[name] = self._numbered(view)
        return Pages(super().init_forward_metadata(replace(batch, views=views)), pages)

    def _numbered(self, view: CacheView) -> tuple[CacheView, Tensor]:
        """Return a view of pages that lie one after another, and which pages they are."""
        assert view.seq_lens_host is not None  # the row needs them
        counts = [-(-n // self.config.page_size) for n in view.seq_lens_host]
        table, width = view.page_table, max(counts, default=0)
        used = torch.arange(width) < torch.tensor(counts)[:, None]
        begins = torch.tensor([0, *accumulate(counts)][:-1], dtype=torch.int32)
        numbers = (begins[:, None] + torch.arange(width, dtype=torch.int32)) * used
        rows, columns = used.nonzero().T.to(table.device)
        pages = table[rows, columns].long()
        return replace(view, page_table=numbers.int().to(table.device)), pages

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Pages,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Dequantise the layer's pages of the pass, then attend to them."""
        pages = metadata.of_view.get(layer.view)
        if pages is not None:
            keys, values = read_pages(cache, pages, q.dtype)
            cache = LayerCache(k=keys, v=values)
        return super().forward(
            q,
            k,
            v,
            layer,
            cache,
            batch,
            metadata.plans,
            out=out,
            return_lse=return_lse,
            topk_indices=topk_indices,
        )
