"""The AttentionBackend that SGLang calls: one HybridDispatcher behind its interface."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from attn_core.errors import UnsupportedError
from attn_core.integrations.choice import explained
from attn_core.integrations.sglang.dual_chunk import read_dual_chunk
from attn_core.integrations.sglang.encoder import EncoderViews, check_cross_attention
from attn_core.integrations.sglang.layers import layers_of, with_sinks
from attn_core.integrations.sglang.linear_layers import served_layers
from attn_core.integrations.sglang.passes import PassBuilder, StaticTables
from attn_core.integrations.sglang.pool import KV_DTYPE, EnginePool
from attn_core.integrations.sglang.selection import choose, create_dispatcher, publish
from attn_core.integrations.sglang.server import (
    NAME,
    captures,
    check_arguments,
    check_draft_model,
    check_sparse,
    check_tree_masks,
    check_version,
    draft_shape,
    speculation,
    use_short_masks,
)
from attn_core.integrations.sglang.sparse import serve_indexers
from attn_core.integrations.sglang.split_keys import split_keys
from attn_core.integrations.sglang.unfolded import attend, padded, unfold_long_prefixes
from attn_core.runtime.backend import Metadata
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.spec.requirements import LayerRequirements, Requirements

logger = logging.getLogger(__name__)


def create(runner: Any) -> AttnCoreBackend:
    """Create the backend of a model runner; SGLang's registry calls it."""
    check_tree_masks(runner.server_args)
    return AttnCoreBackend(runner)


class AttnCoreBackend(AttentionBackend):
    """Serves the attention of one model runner; memory, tables and graphs stay SGLang's.

    runner: SGLang's ModelRunner with its model loaded and its pools created. Raises
    UnsupportedError for what is not served and NoBackendError where nothing fits, before the
    engine takes a request.
    tree: (topk, tokens) of the trees that a draft model's decode steps attend as; None: its
    branches are rows.
    """

    # models ask for these; SGLang sets them on a target's backend alone
    prefill_attention_backend_str = NAME
    decode_attention_backend_str = NAME

    def __init__(self, runner: Any, tree: tuple[int, int] | None = None) -> None:
        super().__init__()
        args = runner.server_args
        check_version(args)
        check_arguments(args)
        self.is_draft_model = bool(runner.is_draft_worker)
        if self.is_draft_model:
            check_draft_model(args)
        self.token_to_kv_pool = runner.token_to_kv_pool  # SGLang's models read these two names
        self.req_to_token_pool = runner.req_to_token_pool
        self.pool = EnginePool(
            runner.token_to_kv_pool, runner.page_size, torch.device(runner.device)
        )
        topk, drafts = draft_shape(args)
        rows = runner.req_to_token_pool.size
        if self.is_draft_model and tree is None:  # a branch is a row of its own
            rows, topk = rows * topk, 1
        index_topk = None
        if self.pool.is_sparse:
            index_topk = check_sparse(args, runner.model_config.hf_config)
        self._chunks = read_dual_chunk(runner)
        own, self._unfolded = layers_of(runner.model, self.pool, index_topk, self._chunks)
        linear = {layer.requirements for layer in served_layers(runner).values()}
        self._split = split_keys(runner, own, self.pool, bool(linear))
        self.layers = own if self._split is None else self._split.wide
        needs = {*LayerRequirements.counted(self.layers.values(), self.pool.kind), *linear}
        needs |= {LayerRequirements.of(x, self.pool.kind) for x in own.values()}  # before a split
        requirements = Requirements(
            layers=tuple(sorted(needs, key=repr)),  # alike on all ranks
            dtype=KV_DTYPE[runner.dtype],
            kv_cache_dtype=self.pool.kv_cache_dtype,
            page_size=self.pool.page_size,
            speculation=speculation(args, topk, None if tree is None else tree[1]),
            lse=self._split is not None,
            deterministic=bool(args.enable_deterministic_inference),
            finite_padding=not getattr(args, "enable_memory_saver", False),
            graphs=captures(args, self.pool.device.type),
        )
        locked = not self.is_draft_model  # which is another model than the lock's
        self.selection, self.registry = choose(requirements, self.pool.device, locked=locked)
        whose = " of the draft model" * self.is_draft_model
        logger.info("attn_core serves attention%s\n%s", whose, explained(self.selection))
        if not self.is_draft_model:
            publish(self.selection, args)
        chosen = self.selection.roles.values()
        self.needs_cpu_seq_lens = host_lengths = any(x.row.needs_host_lengths for x in chosen)
        self.passes = (PassBuilder if self._split is None else self._split.passes)(
            runner.req_to_token_pool.req_to_token,
            self.pool.page_size,
            slot_map=self.pool.window_slots,
            topk=topk,
            drafts=drafts,
            host_lengths=host_lengths,
        )
        self._encoder: EncoderViews | None = None
        if check_cross_attention(own.values(), self.pool.page_size, drafts > 0):
            self._encoder = EncoderViews(self.passes.req_to_token, host_lengths=host_lengths)
        self.max_context_len = self.passes.max_context_len  # EAGLE's worker reads this name
        use_short_masks(args)
        self._create_dispatcher = partial(
            create_dispatcher,
            runner,
            self.selection,
            self.registry,
            tuple(self.layers.values()),
            self.pool,
            rows,
            self.max_context_len,
        )
        self.dispatcher = self._create_dispatcher()
        if self.pool.is_sparse:
            serve_indexers(runner.model)
        elif self._unfolded and self.selection.roles["prefill"].row.chunked_prefix:
            unfold_long_prefixes()
        self._static: StaticTables | None = None
        self._captured: dict[tuple[ForwardMode, int], tuple[ForwardBatch, Metadata]] = {}
        self._pass: tuple[ForwardBatch, Metadata] | None = None

    def another(self) -> AttnCoreBackend:
        """Return a backend of the same layers and choice, with plans and buffers of its own."""
        other = copy.copy(self)
        other.dispatcher = self._create_dispatcher()
        other._captured, other._pass = {}, None
        return other

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a pass that no graph replays."""
        mode = self.passes.mode(forward_batch)
        if mode is ForwardMode.IDLE or not forward_batch.batch_size:
            self._pass = None
            return
        batch = self.passes.eager(forward_batch, mode, self._static)
        if self._encoder is not None:
            batch = self._encoder.add(forward_batch, batch, captured=False)
        self.plan(batch)

    def plan(self, batch: ForwardBatch) -> None:
        """Plan a batch that no graph replays."""
        self._pass = (batch, self.dispatcher.init_forward_metadata(batch))

    @property
    def planned(self) -> tuple[ForwardBatch, Metadata] | None:
        """The pass that runs now, without padded tokens; None if it has no others."""
        return self._pass

    def capture(self, batch: ForwardBatch) -> None:
        """Plan a batch in static memory, which a graph is about to capture."""
        metadata = self.dispatcher.init_forward_metadata_capture_cuda_graph(batch)
        self._captured[batch.forward_mode, batch.batch_size] = self._pass = (batch, metadata)

    def captured(
        self, mode: ForwardMode, size: int, lengths: tuple[int, ...] | None
    ) -> ForwardBatch:
        """Return a captured batch with a replay's lengths, for rows that plan on the host."""
        batch, _metadata = self._captured[mode, size]
        if not self.passes.host_lengths:
            return batch
        views = {name: replace(x, seq_lens_host=lengths) for name, x in batch.views.items()}
        return replace(batch, views=views)

    def replay(self, batch: ForwardBatch) -> None:
        """Plan a captured batch again, whose static memory holds another pass now."""
        _batch, metadata = self._captured[batch.forward_mode, batch.batch_size]
        self.dispatcher.init_forward_metadata_replay_cuda_graph(batch, metadata)
        self._pass = (batch, metadata)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create the buffers of captured passes."""
        self._static = self.passes.static(max_bs, max_num_tokens)
        if self._encoder is not None:
            self._encoder.create_static(max_bs)
        self.dispatcher.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan a pass to be captured, or refill what the captured one points at."""
        mode = self.passes.mode(forward_batch)
        if mode is ForwardMode.IDLE:
            self._pass = None
            return
        if not self.passes.queries_per_request(mode):
            raise UnsupportedError(
                f"a captured {mode.value} pass on attn_core, whose requests have different lengths "
                "(captures decode and verification); choose --cuda-graph-backend-prefill breakable "
                "or disabled"
            )
        assert self._static is not None  # SGLang calls init_cuda_graph_state first
        if in_capture:
            batch = self.passes.captured(forward_batch, mode, self._static)
            if self._encoder is not None:
                batch = self._encoder.add(forward_batch, batch, captured=True)
            self.capture(batch)
            return
        lengths = self.passes.lengths_host(forward_batch, mode)
        batch = self.captured(mode, forward_batch.batch_size, lengths)
        self.passes.refill(forward_batch, mode, self._static)
        if self._encoder is not None:
            batch = self._encoder.refill(forward_batch, batch)
        self.replay(batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of padded rows, which holds the queries of a draft extend pass."""
        length = self.dispatcher.get_cuda_graph_seq_len_fill_value()
        return max(length, self.passes.drafts) if self.is_draft_model else length

    def get_verify_buffers_to_fill_after_draft(self) -> list[Tensor | None]:
        """Return the tree mask that SGLang's tree kernel fills in place, and no positions."""
        mask = None if self._static is None else self._static.tree_mask
        return [None if mask is None else mask.view(-1), None]

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Do nothing: no plan is derived from the mask."""

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        topk_indices: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Write the new keys and values, attend; q [T, Hq · D] → [T, Hq · Dv].

        topk_indices: what `select` returned.
        Unfolded MLA over a prefix returns [T, Hq, Dv] and its log-sum-exp, [T, Hq].
        """
        tokens = q.shape[0]
        out = getattr(forward_batch, "_attn_output", None)  # of a prefill between graph segments
        if out is None:
            out = q.new_empty(tokens, layer.tp_q_head_num * layer.v_head_dim)
        if self._pass is None:
            return out
        batch, metadata = self._pass
        real = batch.num_tokens
        filled = out.view(tokens, layer.tp_q_head_num, layer.v_head_dim)
        if real < tokens:
            filled[real:].zero_()  # padding of data parallelism
        if self._chunks is None:
            heads = q.view(tokens, layer.tp_q_head_num, layer.qk_head_dim)[:real]
        else:
            heads = self._chunks.queries(q, self.layers[layer.layer_id], forward_batch, batch)
        own = self.layers.get(layer.layer_id)
        if own is None or own.head_dim != layer.qk_head_dim:
            assert k is not None
            assert v is not None
            unfolded = self._unfolded[id(layer)]
            lse = attend(
                self.dispatcher, heads, k, v, unfolded, forward_batch, batch, filled[:real]
            )
            return out if lse is None else (filled, padded(lse, tokens))
        if sinks is not None and own.sinks is not sinks:
            own = self.layers[layer.layer_id] = with_sinks(own, sinks)
        if self._split is not None:
            keys, plan = (k, v) if save_kv_cache else (None, None), (batch, metadata)
            self._split.forward(
                self.dispatcher, heads, *keys, own.layer_id, forward_batch, *plan, filled[:real]
            )
            return out
        if k is None or not save_kv_cache:
            k = v = None
        else:
            new = len(k) if own.is_cross else real  # an encoder's keys are no tokens of the pass
            k = k[:new]
            v = None if self.pool.is_latent or v is None else v[:new]
        self.dispatcher.forward(
            heads, k, v, own, batch, metadata, out=filled[:real], topk_indices=topk_indices
        )
        return out

    forward_decode = forward_extend
