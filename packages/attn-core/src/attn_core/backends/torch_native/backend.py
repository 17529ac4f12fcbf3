"""torch_native: attention with torch alone, the embedded default on any device."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from attn_core.backends.plain_precision import plain_precision
from attn_core.backends.torch_native.blocks import paged, ragged
from attn_core.backends.torch_native.gather import Buffers, KeyValues, aligned
from attn_core.backends.torch_native.kernels import attend
from attn_core.backends.torch_native.limits import Limits, limits_of
from attn_core.backends.torch_native.plan import Piece, Planner
from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache, Scale
from attn_core.ops.dual_chunk import cut_at_chunks
from attn_core.ops.merge import merge_states
from attn_core.ops.vertical_slash import TORCH
from attn_core.runtime.backend import AttentionBackend, BackendConfig, Metadata, Output
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.contract_checks import refuse_call, refuse_unplanned, refuse_window
from attn_core.runtime.layer import AttentionLayer, LayerGroup
from attn_core.runtime.operands import readable
from attn_core.runtime.sparse_prompts import SparsePrompts, attend_sparse, plan_sparse

Pieces = tuple[Piece, ...]
Plans = Mapping[LayerGroup, tuple[Pieces, ...]]  # of one rotation of the queries or of three
States = list[tuple[Tensor, Tensor | None]]  # an output and its LSE per tile

_MOST_STATES = 8  # partial results of many queries that are kept before they are merged


class TorchNative(AttentionBackend):
    """Scaled dot product attention per bucket of equal lengths, over tiles of gathered pages.

    Each tile of keys is gathered, attended and merged into the result by its log-sum-exp. Threads
    may share an instance, concurrent streams of one thread may not.
    """

    casts_output = True

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_window(config.name, layer)
        self._dtype = TORCH_DTYPES[config.dtype]
        self._local = threading.local()  # each thread that calls gathers into its own buffers
        classes = {layer.group for layer in config.layers}
        self._limits = {c: limits_of(config, c, config.page_size, config.device) for c in classes}

    def init_forward_metadata(self, batch: ForwardBatch) -> Metadata:
        """Plan every layer class of the model; without host lengths it asks the device."""
        return plan_sparse(self.config.layers, batch, self._plan)

    def _plan(self, batch: ForwardBatch) -> Plans:
        device = batch.positions.device
        query_lens = batch.query_lens_host
        if query_lens is None:
            query_lens = tuple(batch.cu_seqlens_q.diff().tolist())
        spec = batch.spec if batch.forward_mode is ForwardMode.TARGET_VERIFY else None
        planner = Planner(query_lens, self._dtype, device, spec)
        key_lens: dict[str, Sequence[int]] = {}
        for name, view in batch.views.items():
            host_lens = view.seq_lens_host
            key_lens[name] = view.seq_lens.tolist() if host_lens is None else host_lens
        plans: dict[LayerGroup, tuple[Pieces, ...]] = {}
        for group, limits in self._limits.items():
            if group.view not in batch.views:
                continue
            table, split = batch.views[group.view].page_table, self.config.page_size // limits.block
            lengths = key_lens[group.view]
            if group.dual_chunk is not None:
                plans[group] = self._in_chunks(group, query_lens, lengths, table, limits)
            else:
                plans[group] = (planner.plan(group, lengths, paged(table, split), limits),)
        return plans

    def _in_chunks(
        self,
        group: LayerGroup,
        query_lens: Sequence[int],
        key_lens: Sequence[int],
        table: Tensor,
        limits: Limits,
    ) -> tuple[Pieces, ...]:
        """Plan attention to a query's own chunk, to the one before and to all earlier ones."""
        assert group.dual_chunk is not None
        cut = cut_at_chunks(
            torch.tensor([0, *query_lens], device=table.device).cumsum(0, dtype=torch.int32),
            max(query_lens, default=0),
            torch.tensor(key_lens, dtype=torch.int32, device=table.device),
            table,
            max_seq_len=max(key_lens, default=0),
            chunk_len=group.dual_chunk.chunk_len,
            page_size=self.config.page_size,
        )
        planner = Planner(cut.cu_seqlens_q.diff().tolist(), self._dtype, table.device)
        split = self.config.page_size // limits.block
        return tuple(
            planner.plan(
                group._replace(causal=i == 0),
                keys.seq_lens.tolist(),
                paged(keys.page_table, split),
                limits,
            )
            for i, keys in enumerate(cut.keys)
        )

    @plain_precision
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
        """Attend to the cache, which holds the new tokens already; k and v are not read."""
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        if isinstance(metadata, SparsePrompts):
            return attend_sparse(
                self, metadata, q, layer, cache, batch, TORCH, out=out, return_lse=return_lse
            )
        group = layer.group
        plan = metadata.get(group)
        if plan is None:
            refuse_unplanned(layer, metadata)
        block = self._limits[group].block
        if len(plan) == 1:
            first_query = q if group.dual_chunk is None else q[:, 0]
            return self._attend(first_query, layer, cache, plan[0], block, out, return_lse)
        parts = [
            self._attend(q[:, i], layer, cache, pieces, block, None, True)
            for i, pieces in enumerate(plan)
        ]
        states = [torch.stack(x) for x in zip(*parts, strict=True)]
        if not self.config.deterministic:
            merged, lse = merge_states(*states)
        else:  # each request alone: where a row stands may change its bits on a CPU
            merged, lse = torch.empty_like(states[0][0]), torch.empty_like(states[1][0])
            for piece in plan[0]:
                rows = [x[:, piece.rows] for x in states]
                merged[piece.rows], lse[piece.rows] = merge_states(*rows)
        out = merged if out is None else out.copy_(merged)
        return (out, lse) if return_lse else out

    @plain_precision
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
        """Attend without a cache; plans on every call, so it reads the lengths on the host."""
        refuse_window(self.config.name, layer, causal=causal)
        query_lens = cu_seqlens_q.diff().tolist()
        starts = cu_seqlens_k.tolist()
        key_lens = [b - a for a, b in pairwise(starts)]
        planner = Planner(query_lens, q.dtype, q.device)
        group = LayerGroup.of(layer, causal=causal)
        limits = limits_of(self.config, group, 1, q.device)
        pieces = planner.plan(group, key_lens, ragged(starts, q.device), limits)
        tokens = LayerCache(k=k.unsqueeze(1), v=v.unsqueeze(1))  # a pool of pages of one token
        return self._attend(q, layer, tokens, pieces, 1, out, return_lse)

    def _attend(
        self,
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        pieces: Sequence[Piece],
        block: int,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        tokens, heads, v_dim = q.shape[0], layer.num_q_heads, layer.v_head_dim
        out = q.new_empty(tokens, heads, v_dim) if out is None else out
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        v_scale = cache.k_scale if cache.v is None else cache.v_scale
        sinks = None if layer.sinks is None else layer.sinks.detach().float()
        buffers: Buffers = self._local.__dict__.setdefault("buffers", {})
        key_values = KeyValues(cache, q.dtype, block, buffers)

        def finish(piece: Piece, part: Tensor, total: Tensor | None) -> None:
            part = _unfold(part, piece, heads)
            total = None if total is None else _unfold(total, piece, heads)
            if isinstance(v_scale, Tensor) or v_scale != 1.0:
                part = part * v_scale
            if sinks is not None and total is not None:
                with_sink = torch.logaddexp(total, sinks)
                base = with_sink.masked_fill(with_sink == -torch.inf, 0.0)  # no key and no sink
                part, total = part * (total - base).exp()[..., None], with_sink
            out[piece.rows] = part.to(out.dtype)
            if return_lse and total is not None:
                lse[piece.rows] = total

        # A merge of a few rows is all overhead, so pieces that look alike are merged at once. Not
        # in deterministic mode: there a request is merged alone too.
        by_shape: dict[tuple[int, ...], list[tuple[Piece, States]]] = {}
        for piece in pieces:
            if not piece.tiles:
                out[piece.rows] = 0
                lse[piece.rows] = -torch.inf if sinks is None else sinks
                continue
            states = self._states(q, layer, cache.k_scale, key_values, piece, return_lse)
            if piece.parts == 1:
                finish(piece, *states[0])
            elif piece.few and not self.config.deterministic:
                key = (piece.requests, piece.queries, piece.parts)
                by_shape.setdefault(key, []).append((piece, states))
            else:
                merged = _merge(states, 1, piece.requests)
                finish(piece, merged[0][0], merged[1][0])
        for (requests, _, _), group in by_shape.items():
            merged = _merge(
                [state for _, states in group for state in states], len(group), requests
            )
            for (piece, _), part, total in zip(group, *merged, strict=True):
                finish(piece, part, total)
        return (out, lse) if return_lse else out

    def _states(
        self,
        q: Tensor,
        layer: AttentionLayer,
        k_scale: Scale,
        key_values: KeyValues,
        piece: Piece,
        return_lse: bool,
    ) -> States:
        """Attend to each tile of a piece."""
        r, n, heads, kv_heads = piece.requests, piece.queries, layer.num_q_heads, layer.num_kv_heads
        query = readable(q[piece.rows]).view(r, n, heads, -1)
        if piece.fold:
            query = query.view(r, n, kv_heads, heads // kv_heads, -1).transpose(1, 2).flatten(2, 3)
        else:
            query = query.transpose(1, 2).contiguous()
        if self.config.deterministic:  # neither where they lie nor their strides may matter
            query = query.clone(memory_format=torch.contiguous_format)
        need_lse = return_lse or layer.sinks is not None or piece.parts > 1
        scale = layer.scale * k_scale
        states: States = []
        for tile in piece.tiles:
            k, v = key_values.read(tile, r)
            if self.config.deterministic:
                k, v = aligned(k), None if v is None else aligned(v)
            state = attend(
                query.expand(tile.splits, -1, -1, -1) if tile.splits > 1 else query,
                k,
                v,
                tile,
                v_dim=layer.v_head_dim,
                scale=scale,
                logit_cap=layer.logit_cap,
                need_lse=need_lse,
            )
            states.append(state)
            if not piece.few and len(states) == _MOST_STATES:
                out, lse = _merge(states, 1, r)
                states = [(out[0], lse[0])]
        return states


def _unfold(x: Tensor, piece: Piece, heads: int) -> Tensor:
    """[R, Hkv, n · group, …] or [R, Hq, n, …] → [R · n, Hq, …]."""
    r, n = piece.requests, piece.queries
    if piece.fold:
        x = x.view(r, x.shape[1], n, -1, *x.shape[3:])
    return x.transpose(1, 2).reshape(r * n, heads, *x.shape[4 if piece.fold else 3 :])


def _merge(states: States, pieces: int, requests: int) -> tuple[Tensor, Tensor]:
    """Merge states, [P · R, H, rows, …] of each of N pieces in turn, to [N, R, H, rows, …]."""
    out = torch.cat([out for out, _ in states])
    lse = torch.cat([lse for _, lse in states if lse is not None])
    shape = (pieces, -1, requests)
    out, lse = out.view(*shape, *out.shape[1:]), lse.view(*shape, *lse.shape[1:])
    return merge_states(out.transpose(0, 1), lse.transpose(0, 1))
