"""Standard attention by FlashInfer: fa2, fa3 and CUDA-core decode over one paged cache."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from attn_core import (
    EVEN_MODES,
    TORCH_DTYPES,
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    ForwardBatch,
    LayerCache,
    LayerGroup,
    Output,
    refuse_call,
    refuse_layer,
    refuse_unplanned,
    refuse_window,
)
from torch import Tensor

from attn_nvidia.common import workspace_bytes
from attn_nvidia.common.tensors import aligned, as_asked, dense
from attn_nvidia.common.workspace import multiprocessors, workspace
from attn_nvidia.flashinfer.csr import query_lengths
from attn_nvidia.flashinfer.kernels import (
    Lengths,
    choose,
    fixed_bytes,
    fixed_split,
    fp8,
    graph_splits,
    schedule_bytes,
)
from attn_nvidia.flashinfer.lse import natural
from attn_nvidia.flashinfer.paged_inputs import Table
from attn_nvidia.flashinfer.ragged import Ragged
from attn_nvidia.flashinfer.tree import loose_window
from attn_nvidia.flashinfer.wrappers import PlannedWrapper, Shape, Static, WrapperPool

Class = tuple[LayerGroup, float]  # and the soft cap, 0 = none


class Plan(NamedTuple):
    """How the layers of one class run in a pass; empty: some query may have no key."""

    run: Callable[..., Any]
    empty: bool
    planned: PlannedWrapper
    table: Table


class Plans(dict[Class, Plan]):
    """The plan of a pass, per class of layers; while it lives, its wrappers are its own."""


class FlashInfer(AttentionBackend):
    """Plans each class of layers on the host, once per pass; then one kernel call per layer."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
            refuse_window(config.name, layer)
        library: Any = importlib.import_module("flashinfer")
        self._library, self._pool = library, WrapperPool(library)
        self._classes = {_class_of(layer) for layer in config.layers}
        self._processors = multiprocessors(config)
        self._bytes = max(
            (self._workspace_bytes(which) for which, _ in self._classes),
            default=workspace_bytes.RECOMMENDED,
        )
        self._fp8 = fp8(config)
        self._ragged = Ragged(config, library, self._processors, self._bytes)

    def _workspace_bytes(self, which: LayerGroup) -> int:
        heads = (which.num_q_heads, which.num_kv_heads)
        room = workspace_bytes.flashinfer(self._processors, *heads, which.v_head_dim)
        return max(room, fixed_bytes(self.config, which) if self.config.deterministic else 0)

    def _workspace(self) -> Tensor:
        return workspace(self.config.device, "flashinfer", self._bytes)

    def init_forward_metadata(self, batch: ForwardBatch) -> Plans:
        """Plan every class of layers; asks the device for lengths that the batch lacks."""
        return self._plan(batch, captured=False)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> Plans:
        """Plan into buffers of this capture's own."""
        return self._plan(batch, captured=True)

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch, metadata: Plans) -> None:
        """Refill the buffers of a capture and schedule the lengths of a replay."""
        queries = query_lengths(batch)
        for table in {id(plan.table): plan.table for plan in metadata.values()}.values():
            table.fill(batch, queries)
        for plan in metadata.values():
            self._fill(plan.planned, plan.table, batch)

    def _plan(self, batch: ForwardBatch, *, captured: bool) -> Plans:
        plans, tables = Plans(), dict[tuple[str, int | None, bool], Table]()
        if not batch.num_tokens:
            return plans
        queries, room = query_lengths(batch), self._workspace()
        for which, cap in self._classes:
            if which.view not in batch.views:
                continue
            at = which.view, which.window, which.causal
            if at not in tables:
                page_size = self.config.page_size
                tables[at] = Table(*at, batch, page_size=page_size, static=captured)
                tables[at].fill(batch, queries)
            table = tables[at]
            shape = self._shape(which, cap, batch, queries, table, room if captured else None)
            if captured:
                size = schedule_bytes(which, batch.batch_size, batch.num_tokens, self._processors)
                schedule = torch.empty(size, dtype=torch.uint8, device=room.device)
                static = Static(table.device, table.indices, table.mask, schedule)
                planned = PlannedWrapper(self._library, shape, room, static)
            else:
                planned = self._pool.lease(shape, room, plans)
            self._fill(planned, table, batch)
            empty = not which.causal and (captured or not table.keys.all())
            plans[which, cap] = Plan(planned.run, empty, planned, table)
        if captured:  # the library's first plan has filled the lists as its own are
            for table in tables.values():
                table.upload()
        return plans

    def _fill(self, planned: PlannedWrapper, table: Table, batch: ForwardBatch) -> None:
        planned.plan(table.host, table.device, table.indices, batch.num_tokens, table.mask)

    def _shape(
        self,
        which: LayerGroup,
        cap: float,
        batch: ForwardBatch,
        queries: Lengths,
        table: Table,
        room: Tensor | None,
    ) -> Shape:
        """Say what a wrapper is planned for; room: the workspace of a captured pass."""
        config, mode, masked = self.config, batch.forward_mode, table.mask is not None
        window_left = -1 if which.window is None else which.window - 1
        if masked and which.window is not None and batch.spec is not None:
            window_left = loose_window(which.window, batch.spec.num_draft_tokens)
        even, split, fixed = mode in EVEN_MODES, True, None
        if config.deterministic:
            fixed = fixed_split(config, which) if even and room is None else None
            split = fixed is not None
        elif room is not None:
            size = (batch.batch_size, batch.num_tokens, self._processors)
            split = graph_splits(which, *size, room.numel())
        return Shape(
            kernel=choose(
                config,
                which,
                mode,
                queries,
                table.keys,
                masked=masked,
                processors=self._processors,
            ),
            num_q_heads=which.num_q_heads,
            num_kv_heads=which.num_kv_heads,
            head_dim=which.head_dim,
            v_head_dim=which.v_head_dim,
            page_size=config.page_size,
            causal=which.causal and not masked,
            window_left=window_left,
            logit_cap=cap,
            masked=masked,
            fixed_split=fixed,
            split=split,
            q_dtype=TORCH_DTYPES[config.dtype],
            kv_dtype=TORCH_DTYPES[config.kv_cache_dtype],
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Plans,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the cache, which holds the new tokens already; k and v are not read."""
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        q, mine, lse = _outputs(q, layer, out, return_lse=return_lse)
        plan = metadata.get(_class_of(layer))
        if plan is not None:
            keys, values = cache.k, cache.v
            assert values is not None
            if cache.layout == "HND":
                keys, values = keys.transpose(1, 2), values.transpose(1, 2)
            scale, v_scale = layer.scale, None
            if self._fp8:
                scale, v_scale = scale * cache.k_scale, cache.v_scale
            # plans have a scale of 1, which k_scale multiplies: layers may differ in theirs
            plan.run(
                q,
                (keys, values),
                k_scale=scale,
                v_scale=v_scale,
                out=mine,
                lse=lse,
                return_lse=return_lse,
            )
            if lse is not None:
                natural(lse, empty=plan.empty)
        elif batch.num_tokens:
            refuse_unplanned(layer, metadata)
        mine = as_asked(mine, out)
        return mine if lse is None else (mine, lse)

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
        """Attend without a cache; plans where the lengths are new, so it reads them on the host."""
        refuse_call(self.config, return_lse=return_lse)
        refuse_window(self.config.name, layer, causal=causal)
        q, mine, lse = _outputs(q, layer, out, return_lse=return_lse)
        if q.shape[0]:
            which = LayerGroup.of(layer, causal=causal)
            run, empty = self._ragged.plan(which, layer, cu_seqlens_q, cu_seqlens_k)
            run(q, aligned(k), aligned(v), out=mine, lse=lse, return_lse=return_lse)
            if lse is not None:
                natural(lse, empty=empty)
        mine = as_asked(mine, out)
        return mine if lse is None else (mine, lse)


def _class_of(layer: AttentionLayer) -> Class:
    return LayerGroup.of(layer), layer.logit_cap or 0.0


def _outputs(
    q: Tensor, layer: AttentionLayer, out: Tensor | None, *, return_lse: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return q as kernels load it, and what is to be filled: `out` where it is contiguous."""
    q = aligned(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    return q, dense(q, layer.v_head_dim, out), lse
