"""triton: our own kernels, portable over NVIDIA and AMD GPUs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attn_core.backends.triton.bindings import first_binding
from attn_core.backends.triton.kernel import Call, Pass
from attn_core.backends.triton.schedule import Schedule
from attn_core.backends.triton.scheduler import Scheduler
from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import BatchError, UsageError
from attn_core.runtime.backend import AttentionBackend, BackendConfig, Output
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.contract_checks import (
    refuse_call,
    refuse_layer,
    refuse_unplanned,
    refuse_window,
)
from attn_core.runtime.layer import AttentionLayer, LayerGroup

Schedules = Mapping[LayerGroup, Schedule]


class Triton(AttentionBackend):
    """Requests with many queries use tiled attention; those with few use split-KV.

    Lengths stay on the device: a plan is one small launch per group of layers and kind of requests.
    An instance is not safe for concurrent streams: the split-KV scratch, the tile counter and the
    LSE that nobody asked for are shared.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
            refuse_window(config.name, layer)
        self._groups = {layer.group for layer in config.layers}
        self._scheduler = Scheduler(config)
        self._graph_buffers: dict[LayerGroup, Tensor] = {}
        empty = torch.empty(0, 0, dtype=torch.float32, device=config.device)
        self._unread_lse = (0, 0), empty

    def init_forward_metadata(self, batch: ForwardBatch) -> Schedules:
        """Plan every group of layers of the model, without asking the device for a length."""
        return self._plan(batch, {})

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create the buffers that the plans of captured passes fill."""
        for group in self._groups:
            self._graph_buffers[group] = self._scheduler.buffer(max_bs)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> Schedules:
        """Plan into the static buffers; a graph serves lengths up to max_seq_len of its views."""
        return self._plan(batch, self._graph_buffers)

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Schedules
    ) -> None:
        """Plan again for the lengths of a replay: one small launch per group of layers."""
        for group, schedule in metadata.items():
            longest = batch.views[group.view].max_seq_len
            if longest > schedule.longest:
                raise BatchError(
                    f"view {group.view!r}: a request of {longest} tokens in a graph that was "
                    f"captured for {schedule.longest}; capture with a larger max_seq_len"
                )
            self._scheduler.fill(schedule, group, batch)

    def _plan(self, batch: ForwardBatch, buffers: Mapping[LayerGroup, Tensor]) -> Schedules:
        if not batch.num_tokens:
            return {}
        return {
            group: self._scheduler.plan(group, batch, buffers.get(group))
            for group in self._groups
            if group.view in batch.views
        }

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Schedules,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the cache, in which k and v lie already."""
        if return_lse or topk_indices is not None:
            refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        q, out, lse = self._outputs(q, layer, out, return_lse=return_lse)
        if batch.num_tokens:
            schedule = metadata.get(layer.group)
            if schedule is None:
                refuse_unplanned(layer, metadata)
            inputs = schedule.inputs
            if inputs.batch is not batch:  # planned for another with the same lengths
                inputs = Pass.of(layer.group, batch)
            call = Call(q, layer, cache, inputs, out, lse)
            split, tiles = schedule.split, schedule.tiles
            if split is not None:
                decode, kept = first_binding(split.cuts.choices, layer, cache, q.dtype)
                decode.kernel.launch(call, kept, decode.launch, split)
            if tiles is not None:
                prefill, kept = first_binding(tiles.choices, layer, cache, q.dtype)
                prefill.kernel.launch(call, kept, prefill.launch, tiles)
        return (out, lse) if return_lse else out

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
        refuse_window(self.config.name, layer, causal=causal)
        q, out, lse = self._outputs(q, layer, out, return_lse=return_lse)
        if q.shape[0]:
            k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
            tokens = LayerCache(k=k.unsqueeze(0), v=v.unsqueeze(0))  # one page of all tokens
            starts = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
            group = LayerGroup.of(layer, causal=causal)
            inputs, tiles = self._scheduler.plan_ragged(group, q, *starts, max_k)
            call = Call(q, layer, tokens, inputs, out, lse)
            choice, kept = first_binding(tiles.choices, layer, tokens, q.dtype)
            choice.kernel.launch(call, kept, choice.launch, tiles)
        return (out, lse) if return_lse else out

    def _outputs(
        self, q: Tensor, layer: AttentionLayer, out: Tensor | None, *, return_lse: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q with adjacent columns, and what is to be filled."""
        q = q if q.stride()[-1] == 1 else q.contiguous()
        tokens, heads = q.shape[0], layer.num_q_heads
        if out is None:
            out = q.new_empty(tokens, heads, layer.v_head_dim)
        elif out.stride(-1) != 1:
            raise UsageError(
                f"out with stride {out.stride(-1)} in its last dimension (supports 1); give a "
                "contiguous tensor"
            )
        keeps = not return_lse and not _is_captured(q)  # a graph has memory of its own
        if keeps and self._unread_lse[0] == (tokens, heads):
            return q, out, self._unread_lse[1]
        lse = q.new_empty(tokens, heads, dtype=torch.float32)
        if keeps:
            self._unread_lse = (tokens, heads), lse
        return q, out, lse


def _is_captured(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()
