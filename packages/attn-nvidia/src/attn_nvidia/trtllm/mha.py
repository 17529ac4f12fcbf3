"""trtllm_mha: TensorRT-LLM's kernels through FlashInfer; XQA, or trtllm-gen on sm100."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from attn_core import (
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
    refuse_call,
    refuse_unplanned,
    split_cache,
)
from torch import Tensor

PlanKey = tuple[str, int | None]  # the view and the window of a layer: what a plan is made for
Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What all calls of a layer share: its cache in the kernel's pages, its scales, its window.

    pages: K and V. blocks: the scales of FP4. window_left: keys before the query's own, -1 is all.
    """

    layer: AttentionLayer
    cache: LayerCache
    key: PlanKey
    pages: tuple[Tensor, Tensor]
    blocks: tuple[Tensor, Tensor] | None
    layout: str
    bmm1_scale: float
    bmm2_scale: float
    window_left: int

    @property
    def moved(self) -> bool:
        """Whether the cache's pages lie elsewhere now."""
        of, views = self.cache, (*self.pages, *(self.blocks or ()))
        stores = (of.k, of.v, *(of.block_scales or ()))
        return any(
            store is not None and view.data_ptr() != store.data_ptr()
            for view, store in zip(views, stores, strict=True)
        )

    @property
    def sinks(self) -> Tensor | None:
        """The layer's, in float32. A copy made once would miss weights loaded afterwards."""
        return None if self.layer.sinks is None else self.layer.sinks.float()


@dataclass(frozen=True, slots=True, eq=False)
class RequestTables:
    """The requests of a view as the kernels read them: dense int32, in the kernel's pages.

    own: table and lens are copies, to be filled again where the view changes.
    """

    table: Tensor
    lens: Tensor
    own: bool

    @classmethod
    def of(cls, view: CacheView, parts: int, *, derived: bool = False) -> RequestTables:
        """Take a view whose pool pages are `parts` kernel pages each, without a copy if possible.

        The kernels take an address and no strides. derived: the view's tensors are not the
        batch's, so a graph cannot read them where they lie.
        """
        table, lens = view.page_table, view.seq_lens
        if parts == 1 and table.is_contiguous() and lens.is_contiguous() and not derived:
            return cls(table, lens, own=False)
        rows, columns = table.shape
        copies = cls(table.new_empty(rows, columns * parts), torch.empty_like(lens), own=True)
        copies.fill(view, parts)
        return copies

    def fill(self, view: CacheView, parts: int) -> None:
        """Write the view into the copies, with no new memory."""
        if not self.own:
            return
        self.lens.copy_(view.seq_lens)
        pages = self.table.view(*view.page_table.shape, parts)
        pages.copy_(view.page_table[:, :, None])
        if parts > 1:
            offsets = torch.arange(parts, dtype=torch.int32, device=pages.device)
            pages.mul_(parts).add_(offsets)


class TrtllmMha(AttentionBackend, Generic[Plan]):
    """What XQA and trtllm-gen have in common: a plan per view and window, one call per layer."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        fits = (p for p in config.row.page_sizes if config.page_size % p == 0)
        self._page = max(fits)
        self._parts = config.page_size // self._page
        self._layers: dict[PlanKey, list[AttentionLayer]] = {}
        for layer in config.layers:
            self._layers.setdefault((layer.view, layer.sliding_window), []).append(layer)
        self._prepared: dict[int, Prepared] = {}

    @abstractmethod
    def _plan(self, key: PlanKey, batch: ForwardBatch) -> Plan:
        """Plan one pass over the layers of a view and a window."""

    @abstractmethod
    def _refill(self, plan: Plan, key: PlanKey, batch: ForwardBatch) -> None:
        """Bring the tensors of a plan up to date; a graph has captured them."""

    @abstractmethod
    def _attend(
        self, q: Tensor, prepared: Prepared, batch: ForwardBatch, plan: Plan, out: Tensor, lse: bool
    ) -> Tensor | None:
        """Fill out, dense as q is; return the LSE where it is asked for."""

    def init_forward_metadata(self, batch: ForwardBatch) -> Mapping[PlanKey, Plan]:
        """Plan every view and window of the model; kernels are built here, not in a layer."""
        if not batch.num_tokens:
            return {}
        return {key: self._plan(key, batch) for key in self._layers if key[0] in batch.views}

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Mapping[PlanKey, Plan]
    ) -> None:
        """Refill the tables that are copies; the batch's own are read where they lie."""
        for key, plan in metadata.items():
            self._refill(plan, key, batch)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Mapping[PlanKey, Plan],
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the cache, which holds k and v already."""
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        prepared = self._prepared.get(layer.layer_id)
        if (
            prepared is None
            or prepared.cache is not cache
            or prepared.layer is not layer
            or prepared.moved
        ):
            prepared = self._prepared[layer.layer_id] = self._prepare(layer, cache)
        q = contiguous16(q)
        buffer, lse = contiguous_out(q, layer.v_head_dim, out), None
        if q.shape[0]:
            plan = metadata.get(prepared.key)
            if plan is None:
                refuse_unplanned(layer, metadata)
            lse = self._attend(q, prepared, batch, plan, buffer, return_lse)
        result = copy_to_out(buffer, out)
        if not return_lse:
            return result
        return result, q.new_empty(q.shape[:2], dtype=torch.float32) if lse is None else lse

    def _prepare(self, layer: AttentionLayer, cache: LayerCache) -> Prepared:
        window = layer.sliding_window
        planned = self._layers.get((layer.view, window), ())
        if _shape(layer) not in map(_shape, planned):
            refuse_unplanned(layer, self._layers)  # kernels and scratch are made for shapes
        pages = split_cache(cache, self._page)
        assert pages.v is not None  # rows of kind "mha"
        blocks = pages.block_scales
        quantised = pages.k.element_size() == 1
        return Prepared(
            layer=layer,
            cache=cache,
            key=(layer.view, window),
            pages=(pages.k, pages.v),
            blocks=None if blocks is None or blocks[1] is None else (blocks[0], blocks[1]),
            layout=cache.layout,
            bmm1_scale=float(layer.scale * (cache.k_scale if quantised else 1.0)),
            bmm2_scale=float(cache.v_scale) if quantised else 1.0,
            window_left=-1 if window is None else window - 1,  # it counts the query's own key
        )


def _shape(layer: AttentionLayer) -> tuple[int, ...]:
    return layer.num_q_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim
