"""A decode kernel of latent attention beside FlashInfer's prefill: which pass goes where."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from attn_core import (
    EVEN_MODES,
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    CacheView,
    ForwardBatch,
    LayerCache,
    LayerGroup,
    Output,
    kernel_pages,
    refuse_call,
    refuse_mode,
    refuse_unplanned,
    split_pages,
)
from torch import Tensor

from attn_nvidia.flashinfer.mla import LATENT, ROPE, FlashInferMLA


class DecodePlan(NamedTuple):
    """What the layers of one class share: the kernel's pages, int32 [B, M], and its schedule.

    queries: of every request or, where they differ, of the longest; cu_queries, int32 [B + 1], is
    None where they do not. longest: seq_lens, int32 [B], are at most that. extra: the kernel's own.
    """

    table: Tensor
    seq_lens: Tensor
    queries: int
    cu_queries: Tensor | None
    longest: int
    extra: Any


@dataclass(frozen=True, eq=False)
class DecodePlans:
    """The metadata of a pass that the decode kernel runs."""

    of: Mapping[LayerGroup, DecodePlan]


class MlaDecode(AttentionBackend):
    """Passes of `modes` run on a kernel of their own, all others on FlashInfer's MLA.

    Subclasses give the kernel: its page size, of how many columns its page table is a multiple,
    whether it reads dense pages alone, what it plans and how it is called. Modes beyond EVEN_MODES
    have ragged queries.
    """

    modes = EVEN_MODES
    page = 64
    columns = 1
    dense = False

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self.prefill = FlashInferMLA(config)
        absorbed = [x for x in config.layers if x.head_dim == LATENT + ROPE]
        self._classes = tuple(dict.fromkeys(LayerGroup.of(x) for x in absorbed))

    def plan(self, group: LayerGroup, table: Tensor, seq_lens: Tensor, queries: int) -> Any:
        """Plan what depends on the pass and not on the layer."""

    def refill(self, group: LayerGroup, plan: DecodePlan) -> None:
        """Plan again for the lengths of a replay, into the tensors of `plan`."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        pages: Tensor,
        layer: AttentionLayer,
        plan: DecodePlan,
        k_scale: float | Tensor,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        """Call the kernel: q [T, H, 576], pages [pages, page, 1, 576] of value / k_scale."""

    def init_forward_metadata(self, batch: ForwardBatch) -> Any:
        """Plan a pass of the decode kernel on the device, any other as FlashInfer's."""
        if not self.config.row.absorbed:
            return None  # all that it runs is ragged
        if batch.forward_mode in self.modes and batch.num_tokens:
            return self._planned(batch)
        return self.prefill.init_forward_metadata(batch)

    def _planned(self, batch: ForwardBatch) -> DecodePlans:
        plans: dict[LayerGroup, DecodePlan] = {}
        tables: dict[str, Tensor] = {}
        queries, cu_queries = batch.num_tokens // batch.batch_size, None
        if batch.forward_mode not in EVEN_MODES:
            queries, cu_queries = batch.max_q_len, batch.cu_seqlens_q
        for group in self._classes:
            view = batch.views.get(group.view)
            if view is None:
                continue
            if group.view not in tables:
                tables[group.view] = self._table(view)
            table = tables[group.view]
            extra = self.plan(group, table, view.seq_lens, queries)
            plans[group] = DecodePlan(
                table, view.seq_lens, queries, cu_queries, view.max_seq_len, extra
            )
        return DecodePlans(plans)

    def _table(self, view: CacheView) -> Tensor:
        """Return the table of the kernel's pages; the batch's own where that is the same."""
        table = split_pages(view.page_table, self.config.page_size, self.page)
        missing = -table.shape[1] % self.columns
        if missing:
            return torch.nn.functional.pad(table, (0, missing))  # page 0, never read
        return table.contiguous()

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Any,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the latent cache, which holds the new tokens already; k is not read."""
        if not isinstance(metadata, DecodePlans):
            refuse_mode(self.config, batch.forward_mode)
            return self.prefill.forward(
                q, k, v, layer, cache, batch, metadata,
                out=out, return_lse=return_lse, topk_indices=topk_indices,
            )  # fmt: skip
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        plan = metadata.of.get(layer.group)
        if plan is None:
            refuse_unplanned(layer, metadata.of)
        pages = kernel_pages(cache.k, self.page, dense=self.dense)
        return self.attend(q, pages, layer, plan, cache.k_scale, out, return_lse)

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
        """Attend without a cache, heads of 192/128, as FlashInfer does."""
        lengths = (cu_seqlens_q, cu_seqlens_k, max_q, max_k)
        return self.prefill.forward_ragged(
            q, k, v, layer, *lengths, causal=causal, out=out, return_lse=return_lse
        )

    # CUDA graphs: the kernel reads the batch's own tensors where it can, else static ones.
    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> Any:
        """Plan into tensors that the replays refill."""
        if batch.forward_mode in self.modes:
            return self._planned(batch)
        return self.prefill.init_forward_metadata_capture_cuda_graph(batch)

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch, metadata: Any) -> None:
        """Refill the page table, unless it is the batch's own, and plan again."""
        if not isinstance(metadata, DecodePlans):
            self.prefill.init_forward_metadata_replay_cuda_graph(batch, metadata)
            return
        filled: set[int] = set()
        for group, plan in metadata.of.items():
            view = batch.views[group.view]
            if plan.table is not view.page_table and id(plan.table) not in filled:
                plan.table.copy_(self._table(view))
                filled.add(id(plan.table))
            self.refill(group, plan)
