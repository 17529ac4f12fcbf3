"""EAGLE's draft decode over pages of one token: a request's branches attend as one tree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attn_core.integrations.sglang.backend import AttnCoreBackend
from attn_core.integrations.sglang.drafts import DraftDecodeBackend
from attn_core.integrations.sglang.layers import with_sinks
from attn_core.integrations.sglang.tree_tables import TreeTables, branch_masks, fill_trees
from attn_core.ops.kv import write_kv
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.selection.result import NoBackendError


def decode_backend(runner: Any, topk: int, steps: int) -> DraftDecodeBackend:
    """Create what serves a draft model's decode steps, as trees where a backend takes them.

    On larger pages each branch has pages of its own, and is a row.
    """
    if topk > 1 and runner.page_size == 1:
        with contextlib.suppress(NoBackendError):
            return DraftTreeBackend(AttnCoreBackend(runner, (topk, topk * steps)), topk, steps)
    return DraftDecodeBackend(AttnCoreBackend(runner), topk, steps)


class DraftTreeBackend(DraftDecodeBackend):
    """Serves the decode steps of a draft model; a request's keys are read once for all branches.

    Step i is a verification of topk · (i + 1) drafts: those of the first step of all branches,
    then of the second, and so on. A draft sees the drafts of its own branch. Only the last topk
    queries of a request are asked for. The parameters are those of DraftDecodeBackend; the backend
    was selected for trees.
    """

    mode = ForwardMode.TARGET_VERIFY

    def __init__(self, backend: AttnCoreBackend, topk: int, steps: int) -> None:
        super().__init__(backend, topk, steps)
        self.attn_backends = [TreeStep(part, topk) for part in self.attn_backends]
        device = self.passes.req_to_token.device
        self._masks = branch_masks(backend.passes.req_to_token.shape[0], topk, steps, device)

    def _rows(self, requests: int) -> int:
        return requests

    def _tokens(self, requests: int, step: int) -> int:
        return requests * self.topk * (step + 1)

    def _new_tokens(self) -> int:
        return self.topk * len(self.attn_backends)

    def _create(self, rows: int, pages: int) -> TreeTables:
        device = self.passes.req_to_token.device
        return TreeTables.create(rows, pages, len(self.attn_backends), self.topk, device)

    def _fill_view(self, forward_batch: Any, tables: Any, slot_map: Tensor | None) -> None:
        size = forward_batch.batch_size
        fill_trees(
            self.passes.req_to_token,
            forward_batch.req_pool_indices[:size],
            forward_batch.seq_lens[:size],
            tables,
            slot_map,
        )

    def _lengths(self, forward_batch: Any) -> list[tuple[int, ...] | None]:
        known = self.passes.lengths_host(forward_batch, ForwardMode.DRAFT_DECODE)
        ends = [self.topk * (step + 1) for step in range(len(self.attn_backends))]
        return [None if known is None else tuple(n + end for n in known) for end in ends]

    def _batches(
        self, views: Mapping[str, Any], longest: int, lengths: list[tuple[int, ...] | None]
    ) -> Iterator[ForwardBatch]:
        rows = views["full"].lengths.shape[1]
        device = self.passes.req_to_token.device
        for step, host in enumerate(lengths):
            n = self.topk * (step + 1)
            yield ForwardBatch(
                forward_mode=ForwardMode.TARGET_VERIFY,
                cu_seqlens_q=torch.arange(0, rows * n + 1, n, dtype=torch.int32, device=device),
                positions=views["full"].positions[step][: rows * n],
                max_q_len=n,
                views={
                    name: CacheView(
                        page_table=tables.page_table,
                        seq_lens=tables.lengths[step],
                        out_cache_loc=tables.slots[step],
                        max_seq_len=longest,
                        seq_lens_host=host,
                    )
                    for name, tables in views.items()
                },
                spec=SpecInfo(
                    topk=self.topk, num_draft_tokens=n, tree_mask=self._masks[step][:rows]
                ),
                query_lens_host=(n,) * rows,
            )


class TreeStep(AttnCoreBackend):
    """One step: the queries of a request's branches are the last drafts of its tree.

    backend: that of a draft model, whose layers, pool and dispatcher it takes over.
    """

    def __init__(self, backend: AttnCoreBackend, topk: int) -> None:
        self.__dict__.update(backend.__dict__)
        self.topk = topk

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
    ) -> Tensor:
        """Write the new keys and values, attend; q [B · topk, Hq · D] → [B · topk, Hq · Dv]."""
        tokens, heads = q.shape[0], layer.tp_q_head_num
        out = q.new_empty(tokens, heads * layer.v_head_dim)
        if self._pass is None:
            return out
        batch, metadata = self._pass
        own = self.layers[layer.layer_id]
        if sinks is not None and own.sinks is not sinks:
            own = self.layers[layer.layer_id] = with_sinks(own, sinks)
        assert batch.spec is not None
        size, n = batch.batch_size, batch.spec.num_draft_tokens
        real, first = size * self.topk, n - self.topk
        if k is not None and save_kv_cache:
            values = None if self.pool.is_latent or v is None else v[:real]
            slots = batch.views[own.view].out_cache_loc
            assert slots is not None
            write_kv(self.pool.layer(own.layer_id), k[:real], values, slots)
        queries = q.new_empty(size, n, heads, layer.qk_head_dim)  # of earlier drafts: any
        queries[:, first:].copy_(q[:real].view(size, self.topk, heads, -1))
        result = self.dispatcher.forward(
            queries.flatten(0, 1), None, None, own, batch, metadata, topk_indices=topk_indices
        )
        assert isinstance(result, Tensor)
        out[:real].view(size, self.topk, -1).copy_(result.view(size, n, -1)[:, first:])
        out[real:].zero_()
        return out

    forward_decode = forward_extend
