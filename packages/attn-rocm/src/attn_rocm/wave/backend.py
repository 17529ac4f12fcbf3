"""wave: decode and extend over lists of single tokens, for pages of any size."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from attn_core import (
    DECODE_MODES,
    TORCH_DTYPES,
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    CacheView,
    ForwardBatch,
    LayerCache,
    Output,
    contiguous16,
    contiguous_out,
    copy_to_out,
    kernel_pages,
    refuse_call,
    refuse_layer,
    refuse_unplanned,
)
from torch import Tensor

from attn_rocm.page_list import PageList, num_pages
from attn_rocm.wave.kernels import SHORT, SPLITS, LayerShape, decode_kernels, extend_kernel

Heads = tuple[int, int]  # query heads and their values' head dim


class Partials(NamedTuple):
    """What decode's parts leave: outputs and log-sum-exps to base 2, float32 [SPLITS, B, …]."""

    outputs: Tensor
    sums: Tensor


@dataclass(eq=False)
class Plan:
    """What the layers of one view share in a pass.

    tokens: the slots of all keys in decode, else of those before the new tokens. partials: decode's
    scratch, by the heads of a layer; None in an extend.
    """

    batch: ForwardBatch
    view: CacheView
    page_size: int
    tokens: PageList
    partials: Mapping[Heads, Partials] | None

    @cached_property
    def new_slots(self) -> Tensor:
        """The slots of the new tokens, int64 [T], for layers that share another's K and V."""
        batch, size = self.batch, self.page_size
        token = torch.arange(batch.num_tokens, dtype=torch.int32, device=batch.positions.device)
        request = torch.searchsorted(batch.cu_seqlens_q[1:], token, right=True)
        request = request.clamp_(max=batch.batch_size - 1)
        page = self.view.page_table[request, batch.positions // size]
        return page.long() * size + batch.positions % size


class Wave(AttentionBackend):
    """A decode pass is two kernels, any other pass one; new K and V are read where they are."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
        importlib.import_module("wave_lang")  # its kernels are compiled by the first passes
        self._dtype = TORCH_DTYPES[config.dtype]
        self._shapes = {layer: self._shape(layer) for layer in config.layers}
        self._heads = {(layer.num_q_heads, layer.v_head_dim) for layer in config.layers}
        self._views = {layer.view for layer in config.layers}
        self._caches: dict[int, tuple[LayerCache, Tensor, Tensor]] = {}

    def _shape(self, layer: AttentionLayer) -> LayerShape:
        return LayerShape(
            num_q_heads=layer.num_q_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            dtype=self._dtype,
            scale=layer.scale,
            logit_cap=layer.logit_cap or 0.0,
        )

    def init_forward_metadata(self, batch: ForwardBatch) -> Mapping[str, Plan]:
        """List the tokens of every view on the device."""
        return self._plans(batch, captured=False)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> Mapping[str, Plan]:
        """List the tokens in tensors that the replays refill."""
        return self._plans(batch, captured=True)

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Mapping[str, Plan]
    ) -> None:
        """Refill the lists of a capture, which is of a decode pass."""
        for plan in metadata.values():
            plan.tokens.refill(plan.view, self.config.page_size, 1)

    def _plans(self, batch: ForwardBatch, *, captured: bool) -> Mapping[str, Plan]:
        if not batch.num_tokens:
            return {}
        views = {name: batch.views[name] for name in self._views if name in batch.views}
        return {name: self._plan(batch, view, captured) for name, view in views.items()}

    def _plan(self, batch: ForwardBatch, view: CacheView, captured: bool) -> Plan:
        size, b, partials = self.config.page_size, batch.batch_size, None
        listed = view
        if batch.forward_mode in DECODE_MODES:
            device, dtype = self.config.device, torch.float32
            partials = {
                (heads, dim): Partials(
                    torch.empty(SPLITS, b, heads, dim, dtype=dtype, device=device),
                    torch.empty(SPLITS, b, heads, dtype=dtype, device=device),
                )
                for heads, dim in self._heads
            }
        else:
            listed = replace(view, seq_lens=view.seq_lens - batch.cu_seqlens_q.diff())
        entries = max(num_pages(view, 1, captured=captured), 1)
        return Plan(batch, view, size, PageList.of(listed, size, 1, entries), partials)

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
        """Attend to the cache; an extend reads the new tokens from k and v."""
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        result = contiguous_out(q, layer.v_head_dim, out)
        plan = metadata.get(layer.view)
        if plan is None:
            if batch.num_tokens:
                refuse_unplanned(layer, metadata)
            return copy_to_out(result, out)
        shape = self._shapes.get(layer)
        if shape is None:  # a layer that the config does not list
            self._shapes[layer] = shape = self._shape(layer)
        keys, values = self._tokens(layer, cache)
        indptr, indices = plan.tokens.indptr, plan.tokens.indices
        if plan.partials is not None:
            parts, merge = decode_kernels(shape)
            heads = (layer.num_q_heads, layer.v_head_dim)
            if heads not in plan.partials:
                refuse_unplanned(layer, plan.partials)
            outputs, sums = plan.partials[heads]
            parts(contiguous16(q), keys, values, indptr, indices, outputs, sums)
            merge(outputs, sums, indptr, result)
            return copy_to_out(result, out)
        if k is None or v is None:
            k, v = keys[plan.new_slots], values[plan.new_slots]
        longest = batch.max_q_len
        extend = extend_kernel(shape, SHORT if longest <= SHORT else 2 * SHORT)
        extend(
            contiguous16(q), contiguous16(k), contiguous16(v), keys, values,
            batch.cu_seqlens_q, indptr, indices, longest, result,
        )  # fmt: skip
        return copy_to_out(result, out)

    def _tokens(self, layer: AttentionLayer, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """View a layer's pages as single tokens; made once per layer."""
        assert cache.v is not None
        views = self._caches.get(layer.layer_id)
        lies = [cache.k.data_ptr(), cache.v.data_ptr()]
        if views is None or views[0] is not cache or [x.data_ptr() for x in views[1:]] != lies:
            k, v = (kernel_pages(x, 1, dense=True).squeeze(1) for x in (cache.k, cache.v))
            views = cache, k, v
            self._caches[layer.layer_id] = views
        return views[1:]
