"""dual_chunk_flash_attn: the dual chunk attention of Qwen2.5-1M, over FlashAttention-3."""

from __future__ import annotations

from typing import Any, ClassVar

from attn_core import (
    AttentionLayer,
    ForwardBatch,
    LayerCache,
    Metadata,
    Output,
    SparsePrompts,
    attend_sparse,
    cut_at_chunks,
    kernels_on,
    plan_sparse,
    refuse_call,
)
from torch import Tensor

from attn_nvidia.fa3.backend import FA3
from attn_nvidia.fa3.plan import Call, CallGroup, Plan, Planner


class ChunkPlanner(Planner):
    """Plans a call for the keys of the queries' own chunk, of the chunk before and of all others.

    Lengths and page tables are cut on the device. A pass whose requests all fit into one chunk, or
    into two, has as many calls.
    """

    def plan(self, kind: CallGroup, batch: ForwardBatch, captured: Plan | None = None) -> Plan:
        """Return the calls of one kind of layers, the first with the intra queries."""
        chunks, view = kind.layer.dual_chunk, batch.views[kind.layer.view]
        if chunks is None:
            return super().plan(kind, batch, captured)
        size, longest = self.config.page_size, view.max_seq_len
        if captured is not None:  # as many calls as the capture, whose longest request is a bound
            longest = len(captured) * chunks.chunk_len
        cut = cut_at_chunks(
            batch.cu_seqlens_q,
            batch.max_q_len,
            view.seq_lens,
            view.page_table,
            max_seq_len=longest,
            chunk_len=chunks.chunk_len,
            page_size=size,
        )
        queries = (cut.cu_seqlens_q, cut.max_q_len)
        return tuple(
            Call(self._call(kind, *queries, keys.seq_lens, keys.page_table, size, causal=causal), i)
            for i, (keys, causal) in enumerate(zip(cut.keys, (True, False, False), strict=False))
        )


class DualChunkFlashAttn(FA3):
    """At most three calls of flash_attn_with_kvcache a layer, merged by their log-sum-exp."""

    planner: ClassVar[type[Planner]] = ChunkPlanner

    def init_forward_metadata(self, batch: ForwardBatch) -> Metadata:
        """Plan as fa3 does; sparse prompts are planned apart, by their lengths on the host."""
        return plan_sparse(self.config.layers, batch, super().init_forward_metadata)

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
        """Attend to the cache, sparse prompts by attn-core's own kernel over lists of keys."""
        if isinstance(metadata, SparsePrompts):
            refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
            kernels = kernels_on(q.device)
            return attend_sparse(
                self, metadata, q, layer, cache, batch, kernels, out=out, return_lse=return_lse
            )
        return super().forward(
            q, k, v, layer, cache, batch, metadata,
            out=out, return_lse=return_lse, topk_indices=topk_indices,
        )  # fmt: skip

    def _run(
        self,
        call: Call,
        arguments: dict[str, Any],
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        out: Tensor | None,
        return_lse: bool,
    ) -> Any:
        rotated_q = q.select(1, call.rotation)
        return super()._run(call, arguments, rotated_q, layer, cache, out, return_lse)
