"""aiter's unified attention, a Triton kernel: windows, sinks, FP8 caches, any pass in one call."""

from __future__ import annotations

from collections.abc import Mapping
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
    ScaleTensors,
    kernel_pages,
    refuse_call,
    refuse_layer,
    refuse_unplanned,
    split_pages,
)
from torch import Tensor

from attn_rocm.aiter.library import triton_function

NO_WINDOW: Final = (-1, -1)
TILE: Final = 64  # keys of a tile, whose pages are looked up without a bound
UNIFIED: Final = (
    *("q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k"),
    *("softmax_scale", "causal", "window_size", "block_table", "softcap", "q_descale"),
    *("k_descale", "v_descale", "sinks"),
)


def window_of(window: int | None) -> tuple[int, int]:
    """Return a window of W tokens as the kernel has it: how many before a token are seen."""
    return NO_WINDOW if window is None else (window - 1, 0)


@dataclass(frozen=True, eq=False)
class Plan:
    """The pages of one view; table: the batch's own where it has the kernel's pages and tiles."""

    view: CacheView
    table: Tensor


class AiterUnified(AttentionBackend):
    """Prefill, decode, mixed passes and chains of drafts are the same call over the page table.

    An FP8 cache is dequantised in the kernel, by the type of its tensor, so that e4m3 is right on
    gfx942 too, whose own FP8 instructions have another bias.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
        self._attend = triton_function("unified_attention", UNIFIED)
        # the largest of the kernel's pages that divides the pool's
        self._page = max(p for p in config.row.page_sizes if config.page_size % p == 0)
        self._views = {layer.view for layer in config.layers}
        self._fp8 = config.kv_cache_dtype.startswith("fp8")
        self._scales = ScaleTensors(config.device)
        self._caches: dict[int, tuple[LayerCache, Tensor, Tensor]] = {}

    def init_forward_metadata(self, batch: ForwardBatch) -> Mapping[str, Plan]:
        """Bring the page table of every view into the kernel's pages and whole tiles."""
        if not batch.num_tokens:
            return {}
        views = {name: batch.views[name] for name in self._views if name in batch.views}
        return {name: Plan(view, self._table(view)) for name, view in views.items()}

    def _table(self, view: CacheView) -> Tensor:
        table = split_pages(view.page_table, self.config.page_size, self._page)
        missing = -table.shape[1] % (TILE // self._page)
        return torch.nn.functional.pad(table, (0, missing)) if missing else table

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Mapping[str, Plan]
    ) -> None:
        """Refill the tables that are not the batch's own."""
        for plan in metadata.values():
            if plan.table is not plan.view.page_table:
                plan.table.copy_(self._table(plan.view))

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Mapping[str, Plan],
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the cache, which holds the new tokens already; k and v are not read."""
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        out = q.new_empty(q.shape) if out is None else out
        plan = metadata.get(layer.view)
        if plan is None:
            if batch.num_tokens:
                refuse_unplanned(layer, metadata)
            return out
        keys, values = self._paged(layer, cache)
        k_scale = v_scale = None
        if self._fp8:
            k_scale, v_scale = self._scales.of(cache.k_scale), self._scales.of(cache.v_scale)
        self._attend(
            q=q,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=batch.max_q_len,
            seqused_k=plan.view.seq_lens,
            max_seqlen_k=plan.view.max_seq_len,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window_of(layer.sliding_window),
            block_table=plan.table,
            softcap=layer.logit_cap or 0.0,
            q_descale=None,
            k_descale=k_scale,
            v_descale=v_scale,
            sinks=layer.sinks,
        )
        return out

    def _paged(self, layer: AttentionLayer, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """View a layer's pages as the kernel's; made once per layer."""
        assert cache.v is not None
        views = self._caches.get(layer.layer_id)
        lies = [cache.k.data_ptr(), cache.v.data_ptr()]
        if views is None or views[0] is not cache or [x.data_ptr() for x in views[1:]] != lies:
            views = cache, kernel_pages(cache.k, self._page), kernel_pages(cache.v, self._page)
            self._caches[layer.layer_id] = views
        return views[1:]
