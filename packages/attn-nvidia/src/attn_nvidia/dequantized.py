"""Backends over caches that their kernels do not read: the pages of a pass are dequantised first.

Each layer copies them in the dtype of the queries, and the backend runs over the copies. They take
(D + Dv) · Hkv · 2 bytes a KV token of the pass, 1,152 for latents, and live as long as the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from attn_core import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    CacheView,
    ForwardBatch,
    LayerCache,
    Output,
    read_pages,
)
from torch import Tensor

from attn_nvidia.fa4 import FA4
from attn_nvidia.flashinfer.csr import key_lengths
from attn_nvidia.flashinfer.mla import FlashInferMLA
from attn_nvidia.mla.cutlass_mla import CutlassMLA
from attn_nvidia.mla.flashmla import FlashMLA
from attn_nvidia.trtllm.mla import TrtllmMLA


class Copies(NamedTuple):
    """A pass over copies of its pages: its batch, and the backend's plan of that.

    pages: view → int32 [P], the pages of the cache in the order in which they are copied.
    """

    batch: ForwardBatch
    plan: Any
    pages: Mapping[str, Tensor]


class Dequantized(AttentionBackend):
    """A backend over copies of a pass's pages, which each layer makes anew."""

    def __init__(self, backend: type[AttentionBackend], config: BackendConfig) -> None:
        super().__init__(config)
        self._backend = backend(replace(config, kv_cache_dtype=config.dtype))

    def init_forward_metadata(self, batch: ForwardBatch) -> Copies:
        """Number the pages of each view in the order in which they are copied."""
        numbered = {name: self._numbered(view) for name, view in batch.views.items()}
        batch = replace(batch, views={name: view for name, (view, _) in numbered.items()})
        plan = self._backend.init_forward_metadata(batch)
        return Copies(batch, plan, {name: pages for name, (_, pages) in numbered.items()})

    def _numbered(self, view: CacheView) -> tuple[CacheView, Tensor]:
        """Return a view of the copies, and which pages these are of; one at least a request.

        A table without columns has requests without keys alone: they are given page 0.
        """
        pages = view.page_table
        if not pages.shape[1]:
            pages = pages.new_zeros(pages.shape[0], 1)
        counts = np.maximum(-(-key_lengths(view) // self.config.page_size), 1)
        valid = np.arange(counts.max(initial=1)) < counts[:, None]
        numbers = (valid.cumsum() - 1).reshape(valid.shape) * valid
        host = np.concatenate([numbers, valid.nonzero()], None, dtype=np.int32)
        packed = torch.from_numpy(host).to(pages.device)
        sizes = [valid.size, *[int(counts.sum())] * 2]
        table, rows, columns = packed.split_with_sizes(sizes)
        return replace(view, page_table=table.view(valid.shape)), pages[rows, columns]

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Copies,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Copy the layer's pages of the pass, then attend to the copies."""
        pages = metadata.pages.get(layer.view)
        if pages is not None:
            keys, values = read_pages(cache, pages, q.dtype)
            cache = LayerCache(k=keys, v=values)
        return self._backend.forward(
            q,
            k,
            v,
            layer,
            cache,
            metadata.batch,
            metadata.plan,
            out=out,
            return_lse=return_lse,
            topk_indices=topk_indices,
        )

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
        """Attend without a cache, as the backend does."""
        lengths = (cu_seqlens_q, cu_seqlens_k, max_q, max_k)
        return self._backend.forward_ragged(
            q, k, v, layer, *lengths, causal=causal, out=out, return_lse=return_lse
        )


# what rows name as `create`
fa4: Final = partial(Dequantized, FA4)
flashinfer_mla: Final = partial(Dequantized, FlashInferMLA)
flashmla: Final = partial(Dequantized, FlashMLA)
cutlass_mla: Final = partial(Dequantized, CutlassMLA)
trtllm_mla: Final = partial(Dequantized, TrtllmMLA)
