"""aiter over the latent cache of MLA: assembly kernels for decode, chains and prefill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from attn_core import (
    EVEN_MODES,
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    CacheView,
    ForwardBatch,
    LayerCache,
    Output,
    ScaleTensors,
    contiguous16,
    contiguous_out,
    copy_to_out,
    kernel_pages,
    refuse_call,
    refuse_layer,
    refuse_mode,
    refuse_unplanned,
    to_e4m3_saturating,
)
from torch import Tensor

from attn_rocm.aiter.library import function
from attn_rocm.aiter.ragged import Ragged
from attn_rocm.page_list import CapturedLists, PageList, num_pages

MOST_QUERIES: Final = 4  # per request, of the decode kernels
SHARED: Final = (
    *("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens"),
    *("max_seqlen_q", "sm_scale"),
)


@dataclass(frozen=True, eq=False)
class Plan:
    """What a pass over one view reads: its tokens as pages of one.

    one_each: every query is a request of its own. cu_queries int32 [requests + 1], of at most
    `queries` each. decodes: by the decode kernel. splits: what the library keeps of it, see
    _splits.
    """

    one_each: bool
    tokens: PageList
    cu_queries: Tensor
    queries: int
    decodes: bool
    splits: Any


class AiterMLA(AttentionBackend):
    """Passes of up to four queries per request run on the decode kernels, others on prefill's.

    Prefill reads no FP8 cache: there, each query becomes a request of its own.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
        module = "aiter.mla"
        self._fp8 = config.kv_cache_dtype == "fp8_e4m3"
        if config.row.absorbed:
            scales = ("q_scale", "kv_scale") if self._fp8 else ()
            self._decode = function("mla_decode_fwd", (*SHARED, *scales), module)
            self._prefill = function("mla_prefill_fwd", SHARED, module)
            splits = ("num_kv_splits", "bs", "total_kv", "nhead", "max_seqlen_q", "dtype")
            self._get_meta_param = function("get_meta_param", splits, module)
        if not self._fp8 or not config.row.absorbed:
            self._ragged = Ragged()
        self._views = {x.view for x in config.layers}
        self._heads = {x.num_q_heads for x in config.layers}
        self._scales = ScaleTensors(config.device)
        self._captured = CapturedLists()
        self._caches: dict[int, tuple[LayerCache, Tensor]] = {}

    def init_forward_metadata(self, batch: ForwardBatch) -> Mapping[str, Plan] | None:
        """List the tokens of every view on the device."""
        return self._plans(batch, captured=False)

    def init_forward_metadata_capture_cuda_graph(
        self, batch: ForwardBatch
    ) -> Mapping[str, Plan] | None:
        """List the tokens in tensors that the replays refill."""
        return self._plans(batch, captured=True)

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Mapping[str, Plan]
    ) -> None:
        """Refill the lists of a capture."""
        for name, plan in metadata.items():
            view = batch.views[name]
            view = _one_query_each(view, batch) if plan.one_each else view
            plan.tokens.refill(view, self.config.page_size, 1)

    def _plans(self, batch: ForwardBatch, *, captured: bool) -> Mapping[str, Plan] | None:
        if not self.config.row.absorbed:
            return None  # all that it runs is ragged
        if not batch.num_tokens:
            return {}
        views = {name: batch.views[name] for name in self._views if name in batch.views}
        return {name: self._plan(batch, name, view, captured) for name, view in views.items()}

    def _plan(self, batch: ForwardBatch, name: str, view: CacheView, captured: bool) -> Plan:
        cu_queries, queries = batch.cu_seqlens_q, batch.max_q_len
        decodes = batch.forward_mode in EVEN_MODES and queries <= MOST_QUERIES
        one_each = self._fp8 and not decodes
        if one_each:
            view, queries, decodes = _one_query_each(view, batch), 1, True
            cu_queries = torch.arange(
                batch.num_tokens + 1, dtype=torch.int32, device=cu_queries.device
            )
        size = num_pages(view, 1, captured=captured)
        tokens = PageList.of(view, self.config.page_size, 1, size)
        if captured:
            tokens = self._captured.place(tokens, name, batch)
        splits = self._splits(len(view.seq_lens), size, queries) if decodes else None
        return Plan(one_each, tokens, cu_queries, queries, decodes, splits)

    def _splits(self, requests: int, tokens: int, queries: int) -> Any:
        """Return what decode asks for on every call, a tensor of the library's own cache.

        amd-aiter 0.1.7 keeps the last one alone. A graph goes on reading it, so its plan keeps it.
        """
        dtype = torch.float8_e4m3fn if self._fp8 else torch.bfloat16
        # by position, as the library asks: its cache tells the two ways apart
        return [
            self._get_meta_param(None, requests, tokens, h, queries, dtype) for h in self._heads
        ]

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
        result = contiguous_out(q, layer.v_head_dim, out)
        plan = metadata.get(layer.view)
        if plan is None:
            if batch.num_tokens:
                refuse_unplanned(layer, metadata)
            return copy_to_out(result, out)
        scales = {}
        if self._fp8:
            scales = {"q_scale": self._scales.of(1.0), "kv_scale": self._scales.of(cache.k_scale)}
        attend = self._decode if plan.decodes else self._prefill
        attend(
            q=to_e4m3_saturating(q) if self._fp8 else contiguous16(q),
            kv_buffer=self._tokens(layer, cache),
            o=result,
            qo_indptr=plan.cu_queries,
            kv_indptr=plan.tokens.indptr,
            kv_indices=plan.tokens.indices,
            kv_last_page_lens=plan.tokens.last_page_len,
            max_seqlen_q=plan.queries,
            sm_scale=layer.scale,
            **scales,
        )
        return copy_to_out(result, out)

    def _tokens(self, layer: AttentionLayer, cache: LayerCache) -> Tensor:
        """View a layer's latents as pages of one token; made once per layer."""
        views = self._caches.get(layer.layer_id)
        if views is None or views[0] is not cache or views[1].data_ptr() != cache.k.data_ptr():
            views = cache, kernel_pages(cache.k, 1)
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
        lengths = (cu_seqlens_q, cu_seqlens_k, max_q, max_k)
        return self._ragged(q, k, v, layer, *lengths, causal=causal, out=out, return_lse=return_lse)


def _one_query_each(view: CacheView, batch: ForwardBatch) -> CacheView:
    """Return a view in which every query is a request, with the tokens up to its own."""
    tokens = torch.arange(batch.num_tokens, dtype=torch.int32, device=view.seq_lens.device)
    request = torch.searchsorted(batch.cu_seqlens_q[1:], tokens, right=True)
    request = request.clamp_(max=batch.batch_size - 1)
    num_later = batch.cu_seqlens_q[request + 1] - 1 - tokens  # the queries of its request after it
    lengths = (view.seq_lens[request] - num_later.clamp_(min=0)).int()
    return replace(
        view, page_table=view.page_table[request], seq_lens=lengths, out_cache_loc=None,
        seq_lens_host=None,
    )  # fmt: skip
