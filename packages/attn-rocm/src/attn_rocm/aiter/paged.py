"""aiter over pages of any size: Composable Kernel's batch prefill, paged decode, draft trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from attn_core import (
    DECODE_MODES,
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    CacheView,
    ForwardBatch,
    LayerCache,
    Output,
    ScaleTensors,
    align16,
    contiguous_out,
    copy_to_out,
    kernel_pages,
    refuse_call,
    refuse_layer,
    refuse_unplanned,
    workspace,
)
from torch import Tensor

from attn_rocm.aiter.library import function, triton_function
from attn_rocm.aiter.ragged import Ragged
from attn_rocm.aiter.tree import TreePlan
from attn_rocm.page_list import CapturedLists, PageList, num_pages
from attn_rocm.tensors import dense_heads, refuse_other_strides

PARTITION: Final = 256  # keys of one workgroup of the decode kernel
_LARGEST = 32  # tokens of its largest page
LOOK_AHEAD: Final = 256  # entries that batch prefill may load past those of a request
PREFILL: Final = (
    *("q", "k", "v", "cu_seqlens_q", "kv_indptr", "kv_page_indices", "max_seqlen_q"),
    *("max_seqlen_k", "softmax_scale", "logits_soft_cap", "causal", "return_lse", "out"),
)
DECODE: Final = (
    *("out", "workspace_buffer", "query", "key_cache", "value_cache", "scale", "kv_indptr"),
    *("kv_page_indices", "kv_last_page_lens", "block_size", "max_num_partitions", "alibi_slopes"),
    *("kv_cache_dtype", "kv_cache_layout", "logits_soft_cap", "k_scale", "v_scale"),
    "partition_size",
)
TREE: Final = (
    *("q_extend", "k_extend", "v_extend", "o_extend", "k_buffer", "v_buffer", "qo_indptr"),
    *("kv_indptr", "kv_indices", "custom_mask", "is_causal", "mask_indptr", "max_len_extend"),
    *("sm_scale", "logit_cap", "skip_prefix_custom_mask"),
)


@dataclass(eq=False)
class Plan:
    """How the layers of one view run in a pass: paged decode, a tree of drafts, or prefill.

    size: the entries of a list of its tokens. workspace: the partial results of decode, uint8.
    """

    batch: ForwardBatch
    view: CacheView
    page_size: int
    size: int
    pages: PageList | None = None
    workspace: Tensor | None = None
    partitions: int = 0
    tree: TreePlan | None = None

    @cached_property
    def tokens(self) -> PageList:
        """The slots of all tokens; a decode pass lists them only for a log-sum-exp."""
        return PageList.of(self.view, self.page_size, 1, self.size, spare=LOOK_AHEAD)

    @cached_property
    def cu_queries(self) -> Tensor:
        """Where the queries of those requests begin, int32 [2 · B + 1]: spare ones have none."""
        return self.batch.cu_seqlens_q.repeat_interleave(2)[1:]

    def refill(self, batch: ForwardBatch, kernel_page: int) -> None:
        """Plan a replay into the tensors of its capture."""
        if self.pages is not None:
            self.pages.refill(self.view, self.page_size, kernel_page)
        if "tokens" in vars(self):
            self.tokens.refill(self.view, self.page_size, 1, spare=LOOK_AHEAD)
            self.cu_queries.copy_(batch.cu_seqlens_q.repeat_interleave(2)[1:])
        if self.tree is not None:
            self.tree.refill(batch, self.view, self.page_size)


class AiterPaged(AttentionBackend):
    """Prefill reads single tokens, decode pages of up to 32; both by lists, made once per pass.

    The log-sum-exp is batch prefill's, in decode too: the decode kernel returns none.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
        self._prefill = function("mha_batch_prefill_func", PREFILL)
        self._decode = function("paged_attention_ragged", DECODE)
        self._ragged = Ragged()
        if config.row.max_verify_topk > 1:
            self._extend = triton_function("extend_attention", TREE)
        # the largest power of two that divides the pool's page
        self._page = min(config.page_size & -config.page_size, _LARGEST)
        self._views = {layer.view for layer in config.layers}
        self._columns = max((x.num_q_heads * (x.head_dim + 4) for x in config.layers), default=0)
        self._one = ScaleTensors(config.device).of(1.0)  # the kernel has no other default
        self._captured = CapturedLists()
        self._caches: dict[tuple[int, int], tuple[LayerCache, Tensor, Tensor]] = {}

    def init_forward_metadata(self, batch: ForwardBatch) -> Mapping[str, Plan]:
        """List the pages of every view on the device."""
        return self._plans(batch, captured=False)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> Mapping[str, Plan]:
        """List the pages in tensors that the replays refill."""
        return self._plans(batch, captured=True)

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Mapping[str, Plan]
    ) -> None:
        """Refill the lists and the masks of a capture."""
        for plan in metadata.values():
            plan.refill(batch, self._page)

    def _plans(self, batch: ForwardBatch, *, captured: bool) -> Mapping[str, Plan]:
        if not batch.num_tokens:
            return {}
        views = {name: batch.views[name] for name in self._views if name in batch.views}
        return {name: self._plan(batch, name, view, captured) for name, view in views.items()}

    def _plan(self, batch: ForwardBatch, name: str, view: CacheView, captured: bool) -> Plan:
        size = self.config.page_size
        tokens = num_pages(view, 1, captured=captured) + LOOK_AHEAD * batch.batch_size
        plan = Plan(batch, view, size, tokens)
        if batch.forward_mode in DECODE_MODES:
            entries = num_pages(view, self._page, captured=captured)
            plan.pages = PageList.of(view, size, self._page, entries)
            if captured:
                plan.pages = self._captured.place(plan.pages, name, batch)
            plan.partitions = -(-view.max_seq_len // PARTITION)
            # per head and partition: its sum and its maximum, float32, and a partial output
            nbytes = 2 * self._columns * batch.batch_size * plan.partitions
            plan.workspace = workspace(self.config.device, "aiter decode", nbytes)
        elif batch.spec is not None and batch.spec.tree_mask is not None:
            plan.tree = TreePlan.of(batch, view, size, captured=captured)
        elif captured:
            _ = plan.tokens, plan.cu_queries  # outside the graph
        return plan

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
        plan = metadata.get(layer.view)
        if plan is None:
            if batch.num_tokens:
                refuse_unplanned(layer, metadata)
            out = q.new_empty(q.shape) if out is None else out
            return (out, q.new_empty(q.shape[:2], dtype=torch.float32)) if return_lse else out
        if plan.pages is not None and not return_lse:
            return self._decoded(plan, plan.pages, q, layer, cache, out)
        if plan.tree is not None and layer.group.causal:  # others see every draft
            return self._verified(plan.tree, q, layer, cache, batch, out)
        keys, values = self._paged(layer, cache, 1)
        result: Any = self._prefill(
            q=align16(q),
            k=keys,
            v=values,
            cu_seqlens_q=plan.cu_queries,
            kv_indptr=plan.tokens.indptr,
            kv_page_indices=plan.tokens.indices,
            max_seqlen_q=batch.max_q_len,
            max_seqlen_k=plan.view.max_seq_len,
            softmax_scale=layer.scale,
            logits_soft_cap=layer.logit_cap or 0.0,
            causal=layer.is_causal,
            return_lse=return_lse,
            out=q.new_empty(q.shape) if out is None else out,
        )
        return (result[0], result[1].T) if return_lse else result  # the LSE is [Hq, T]

    def _paged(self, layer: AttentionLayer, cache: LayerCache, page: int) -> tuple[Tensor, Tensor]:
        """View a layer's pages as the kernel's, tokens where page is 1; made once per layer."""
        assert cache.v is not None
        views = self._caches.get((layer.layer_id, page))
        lies = [cache.k.data_ptr(), cache.v.data_ptr()]
        if views is None or views[0] is not cache or [x.data_ptr() for x in views[1:]] != lies:
            k, v = (kernel_pages(x, page) for x in (cache.k, cache.v))
            views = (cache, k, v) if page > 1 else (cache, k.squeeze(1), v.squeeze(1))
            self._caches[layer.layer_id, page] = views
        return views[1:]

    def _decoded(
        self,
        plan: Plan,
        pages: PageList,
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        out: Tensor | None,
    ) -> Tensor:
        if layer.num_q_heads * (layer.head_dim + 4) > self._columns:
            refuse_unplanned(layer, self._views)  # more than the scratch has room for
        keys, values = self._paged(layer, cache, self._page)
        refuse_other_strides(self.config.name, keys, values)
        if self._page == 1:
            keys, values = keys[:, None], values[:, None]
        result = contiguous_out(q, layer.v_head_dim, out)
        self._decode(
            out=result,
            workspace_buffer=plan.workspace,
            query=dense_heads(q),
            key_cache=keys,
            value_cache=values,
            scale=layer.scale,
            kv_indptr=pages.indptr,
            kv_page_indices=pages.indices,
            kv_last_page_lens=pages.last_page_len,
            block_size=self._page,
            max_num_partitions=plan.partitions,
            alibi_slopes=None,
            kv_cache_dtype="auto",
            kv_cache_layout="NHD",
            logits_soft_cap=layer.logit_cap or 0.0,
            k_scale=self._one,
            v_scale=self._one,
            partition_size=PARTITION,
        )
        return copy_to_out(result, out)

    def _verified(
        self,
        tree: TreePlan,
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        out: Tensor | None,
    ) -> Tensor:
        keys, values = self._paged(layer, cache, 1)
        out = q.new_empty(q.shape) if out is None else out
        self._extend(
            q_extend=q,
            k_extend=keys[tree.drafts],
            v_extend=values[tree.drafts],
            o_extend=out,
            k_buffer=keys,
            v_buffer=values,
            qo_indptr=batch.cu_seqlens_q,
            kv_indptr=tree.prefix.indptr,
            kv_indices=tree.prefix.indices,
            custom_mask=tree.mask,
            is_causal=False,  # a draft may come before its parent
            mask_indptr=tree.mask_indptr,
            max_len_extend=batch.max_q_len,
            sm_scale=layer.scale,
            logit_cap=layer.logit_cap or 0.0,
            skip_prefix_custom_mask=True,
        )
        return out

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
        """Attend without a cache; no length is read on the host."""
        refuse_call(self.config, return_lse=return_lse)
        lengths = (cu_seqlens_q, cu_seqlens_k, max_q, max_k)
        return self._ragged(q, k, v, layer, *lengths, causal=causal, out=out, return_lse=return_lse)
