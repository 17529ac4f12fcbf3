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
    UnsupportedError,
    align16,
    contiguous_out,
    copy_to_out,
    refuse_call,
    refuse_layer,
    refuse_unplanned,
    refuse_window,
    workspace,
)
from torch import Tensor

from attn_nvidia.common import workspace_bytes
from attn_nvidia.common.workspace_bytes import multiprocessors
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

PlanKey = tuple[LayerGroup, float]  # and the soft cap, 0 = none


class Plan(NamedTuple):
    """How the layers of one class run in a pass; empty: some query may have no key."""

    run: Callable[..., Any]
    empty: bool
    planned: PlannedWrapper
    table: Table


class Plans(dict[PlanKey, Plan]):
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
        self._classes = {_plan_key(layer) for layer in config.layers}
        self._processors = multiprocessors(config)
        self._bytes = max(
            (self._workspace_bytes(group) for group, _ in self._classes),
            default=workspace_bytes.RECOMMENDED,
        )
        self._fp8 = fp8(config)
        self._ragged = Ragged(config, library, self._processors, self._bytes)

    def _workspace_bytes(self, group: LayerGroup) -> int:
        heads = (group.num_q_heads, group.num_kv_heads)
        nbytes = workspace_bytes.flashinfer(self._processors, *heads, group.v_head_dim)
        return max(nbytes, fixed_bytes(self.config, group) if self.config.deterministic else 0)

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
        queries, scratch = query_lengths(batch), self._workspace()
        for group, cap in self._classes:
            if group.view not in batch.views:
                continue
            key = group.view, group.window, group.causal
            if key not in tables:
                page_size = self.config.page_size
                tables[key] = Table(*key, batch, page_size=page_size, static=captured)
                tables[key].fill(batch, queries)
            table = tables[key]
            shape = self._shape(group, cap, batch, queries, table, scratch if captured else None)
            if captured:
                size = schedule_bytes(group, batch.batch_size, batch.num_tokens, self._processors)
                schedule = torch.empty(size, dtype=torch.uint8, device=scratch.device)
                static = Static(table.device, table.indices, table.mask, schedule)
                planned = PlannedWrapper(self._library, shape, scratch, static)
            else:
                planned = self._pool.lease(shape, scratch, plans)
            self._fill(planned, table, batch)
            empty = not group.causal and (captured or not table.keys.all())
            plans[group, cap] = Plan(planned.run, empty, planned, table)
        if captured:  # the library's first plan has filled the lists as its own are
            for table in tables.values():
                table.upload()
        return plans

    def _fill(self, planned: PlannedWrapper, table: Table, batch: ForwardBatch) -> None:
        planned.plan(table.host, table.device, table.indices, batch.num_tokens, table.mask)

    def _shape(
        self,
        group: LayerGroup,
        cap: float,
        batch: ForwardBatch,
        queries: Lengths,
        table: Table,
        scratch: Tensor | None,
    ) -> Shape:
        """Say what a wrapper is planned for; scratch: the workspace of a captured pass."""
        config, mode, masked = self.config, batch.forward_mode, table.mask is not None
        window_left = -1 if group.window is None else group.window - 1
        if masked and group.window is not None and batch.spec is not None:
            window_left = loose_window(group.window, batch.spec.num_draft_tokens)
        even, split, fixed = mode in EVEN_MODES, True, None
        if config.deterministic:
            fixed = fixed_split(config, group) if even and scratch is None else None
            split = fixed is not None
        elif scratch is not None:
            size = (batch.batch_size, batch.num_tokens, self._processors)
            split = graph_splits(group, *size, scratch.numel())
        return Shape(
            kernel=choose(
                config,
                group,
                mode,
                queries,
                table.keys,
                masked=masked,
                processors=self._processors,
            ),
            num_q_heads=group.num_q_heads,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            v_head_dim=group.v_head_dim,
            page_size=config.page_size,
            causal=group.causal and not masked,
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
        q, result, lse = _outputs(q, layer, out, return_lse=return_lse)
        plan = metadata.get(_plan_key(layer))
        if plan is not None:
            keys, values = cache.k, cache.v
            assert values is not None
            if keys.stride() != values.stride():
                raise UnsupportedError(
                    f"pages of strides {list(keys.stride())}, those of V {list(values.stride())}: "
                    f"{self.config.name} reads V by the strides of K; create the pool with a "
                    "tensor for each of K and V, as KVPool does, or name another backend"
                )
            if cache.layout == "HND":
                keys, values = keys.transpose(1, 2), values.transpose(1, 2)
            k_scale: float | Tensor = layer.scale
            v_scale = None
            if self._fp8:
                k_scale, v_scale = layer.scale * cache.k_scale, cache.v_scale
            # plans have a scale of 1, which k_scale multiplies: layers may differ in theirs
            plan.run(
                q,
                (keys, values),
                k_scale=k_scale,
                v_scale=v_scale,
                out=result,
                lse=lse,
                return_lse=return_lse,
            )
            if lse is not None:
                natural(lse, empty=plan.empty)
        elif batch.num_tokens:
            refuse_unplanned(layer, metadata)
        result = copy_to_out(result, out)
        return result if lse is None else (result, lse)

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
        q, result, lse = _outputs(q, layer, out, return_lse=return_lse)
        if q.shape[0]:
            group = LayerGroup.of(layer, causal=causal)
            run, empty = self._ragged.plan(group, layer, cu_seqlens_q, cu_seqlens_k)
            run(q, align16(k), align16(v), out=result, lse=lse, return_lse=return_lse)
            if lse is not None:
                natural(lse, empty=empty)
        result = copy_to_out(result, out)
        return result if lse is None else (result, lse)


def _plan_key(layer: AttentionLayer) -> PlanKey:
    return layer.group, layer.logit_cap or 0.0


def _outputs(
    q: Tensor, layer: AttentionLayer, out: Tensor | None, *, return_lse: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return q as kernels load it, and what is to be filled: `out` where it is contiguous."""
    q = align16(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    return q, contiguous_out(q, layer.v_head_dim, out), lse
