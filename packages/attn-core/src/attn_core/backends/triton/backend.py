"""triton: our own kernels, portable over NVIDIA and AMD GPUs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attn_core.backends.triton.bindings import run
from attn_core.backends.triton.kernel import Call, Pass
from attn_core.backends.triton.latent_prompts import in_chunks
from attn_core.backends.triton.schedule import Schedule
from attn_core.backends.triton.scheduler import Scheduler
from attn_core.backends.triton.shared_keys import shared_keys
from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import BatchError, UsageError
from attn_core.ops.triton.vertical_slash import KERNELS
from attn_core.runtime.backend import AttentionBackend, BackendConfig, Metadata, Output
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.contract_checks import (
    refuse_call,
    refuse_layer,
    refuse_unplanned,
    refuse_window,
)
from attn_core.runtime.kernel_tensors import empty_attention
from attn_core.runtime.layer import AttentionLayer, LayerGroup
from attn_core.runtime.operands import readable
from attn_core.runtime.shared_keys import SharedKeys
from attn_core.runtime.sparse_prompts import SparsePrompts, attend_sparse, plan_sparse

Schedules = Mapping[LayerGroup, Schedule]


class Triton(AttentionBackend):
    """Requests with many queries use tiled attention; those with few use split-KV.

    Lengths stay on the device: a plan is one small launch per group of layers and kind of requests.
    Over an FP8 store bf16 queries are multiplied in fp16, each row by a power of two first.
    An instance is not safe for concurrent streams: the split-KV scratch, the tile counter and the
    LSE that nobody reads are shared.
    """

    casts_output = True

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
            refuse_window(config.name, layer)
        self._groups = {layer.group for layer in config.layers}
        self._scheduler = Scheduler(config)
        self._graph_buffers: dict[LayerGroup, Tensor] = {}
        self._graph_requests = 0  # that fit the buffers

    def init_forward_metadata(self, batch: ForwardBatch) -> Metadata:
        """Plan every group of layers of the model, without asking the device for a length.

        A pass that may have sparse prompts and has no lengths on the host asks for them.
        """
        return plan_sparse(self.config.layers, batch, lambda dense: self._plan(dense, {}))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create the buffers that the plans of captured passes fill."""
        self._graph_requests = max_bs
        for group in self._groups:
            self._graph_buffers[group] = self._scheduler.buffer(max_bs)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> Schedules:
        """Plan into the static buffers; a graph serves lengths up to max_seq_len of its views.

        Without init_cuda_graph_state each plan has buffers of its own. Raises BatchError for more
        requests than the buffers are for.
        """
        if self._graph_buffers and batch.batch_size > self._graph_requests:
            raise BatchError(
                f"a captured pass of {batch.batch_size} requests, and static buffers for "
                f"{self._graph_requests}; call init_cuda_graph_state with a larger max_bs first"
            )
        buffers = self._graph_buffers or {
            group: self._scheduler.buffer(batch.batch_size) for group in self._groups
        }
        schedules = self._plan(batch, buffers)
        for schedule in schedules.values():
            schedule.new = None  # replays may bring requests with a prefix
        return schedules

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Schedules
    ) -> None:
        """Plan again for the lengths of a replay: one small launch per group of layers.

        Raises BatchError for another number of requests, or longer ones, than were captured.
        """
        for group, schedule in metadata.items():
            if batch.batch_size != schedule.inputs.size:
                raise BatchError(
                    f"a batch of {batch.batch_size} requests in a graph that was captured for "
                    f"{schedule.inputs.size}; fill the rows of the captured batch, with padding "
                    "where requests are missing"
                )
            longest = batch.views[group.view].max_seq_len
            if longest > schedule.longest:
                raise BatchError(
                    f"view {group.view!r}: a request of {longest} tokens in a graph that was "
                    f"captured for {schedule.longest}; capture with a larger max_seq_len"
                )
            self._scheduler.fill(schedule, group, batch)

    def shared_keys(self, metadata: Metadata) -> SharedKeys | None:
        """Count what the plan's groups read together."""
        if isinstance(metadata, SparsePrompts):  # of prompts, which share nothing
            return None
        return shared_keys(
            self.config.name, (layer.group for layer in self.config.layers), metadata
        )

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
        metadata: Metadata,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the cache, in which k and v lie already."""
        if return_lse or topk_indices is not None:
            refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        if out is not None:
            _refuse_spread(out)
        if not batch.num_tokens:
            return empty_attention(q, layer, out, return_lse)
        if isinstance(metadata, SparsePrompts):
            return attend_sparse(
                self, metadata, q, layer, cache, batch, KERNELS, out=out, return_lse=return_lse
            )
        schedule = metadata.get(layer.group)
        if schedule is None:
            refuse_unplanned(layer, metadata)
        inputs, lse = schedule.inputs, schedule.unread_lse
        if inputs.batch is not batch:  # planned for another with the same lengths
            inputs = Pass.of(layer.group, batch)
            split, table = schedule.split, schedule.inputs.requests.page_table
            shares = split is not None and split.cuts.sharing is not None
            if shares and inputs.requests.page_table is not table:  # its groups share other pages
                schedule = self._scheduler.plan(layer.group, batch, None)
                inputs = schedule.inputs
            elif schedule.chunk:
                pages = -(-schedule.longest // self.config.page_size)
                inputs = in_chunks(inputs, schedule.chunk, pages)
        if return_lse or inputs is not schedule.inputs:
            lse = _lse(inputs, layer)
        new = schedule.new
        if new is not None and k is not None and inputs is schedule.inputs:
            [choice] = new[1].choices
            call = choice.kernel.call(q, k, v, layer, cache, new[0], out, lse, choice.launch)
            if call is not None:
                run(call, new[1])
                return (call.out, lse) if return_lse else call.out
        call = Call(q, layer, cache, inputs, out, lse)
        split, tiles = schedule.split, schedule.tiles
        if split is not None:
            run(call, split)
        if tiles is not None:
            run(call, tiles)
        return (call.out, lse) if return_lse else call.out

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
        if out is not None:
            _refuse_spread(out)
        if not q.shape[0]:
            return empty_attention(q, layer, out, return_lse)
        k, v = readable(k), readable(v)
        tokens = LayerCache(k=k.unsqueeze(0), v=v.unsqueeze(0))  # one page of all tokens
        starts = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
        group = LayerGroup.of(layer, causal=causal)
        inputs, tiles = self._scheduler.plan_ragged(group, q, *starts, max_k)
        call = Call(q, layer, tokens, inputs, out, _lse(inputs, layer))
        run(call, tiles)
        return (call.out, call.lse) if return_lse else call.out


def _refuse_spread(out: Tensor) -> None:
    if out.stride(-1) != 1:
        raise UsageError(
            f"out with stride {out.stride(-1)} in its last dimension (supports 1); give a "
            "contiguous tensor"
        )


def _lse(inputs: Pass, layer: AttentionLayer) -> Tensor:
    return inputs.positions.new_empty(inputs.tokens, layer.num_q_heads, dtype=torch.float32)
