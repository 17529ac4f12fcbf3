"""triton, sparse MLA: our own kernels select keys and attend to them; dense passes are MLA's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_core.backends.triton.backend import Schedules, Triton
from attn_core.backends.triton.sparse import launch
from attn_core.cache.layer_cache import LayerCache
from attn_core.runtime.backend import AttentionBackend, BackendConfig, Output
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.contract_checks import refuse_call
from attn_core.runtime.kernel_tensors import empty_attention
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.sparse import dense_pass, every_slot


@dataclass(frozen=True, kw_only=True, eq=False)
class SparsePlan:
    """The plan of a dense pass, None of others, and the request of each token, int32 [T].

    FP8 latents have no dense pass: there every slot is selected.
    """

    dense: Schedules | None
    requests: Tensor


class TritonSparse(AttentionBackend):
    """Nothing is read to the host and lengths stay on the device, so that graphs serve them all."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._dense = Triton(config)
        self._fp8 = config.kv_cache_dtype == "fp8_e4m3"

    def init_forward_metadata(self, batch: ForwardBatch) -> SparsePlan:
        """Plan the pass; attention to all keys only where one of the layers may do so."""
        layers = [x for x in self.config.layers if x.view in batch.views]
        dense = any(x.index_topk is None or dense_pass(x, batch) for x in layers)
        dense = dense and not self._fp8
        token = torch.arange(batch.num_tokens, dtype=torch.int32, device=batch.positions.device)
        requests = torch.searchsorted(
            batch.cu_seqlens_q[1:], token, right=True, out_int32=True
        ).clamp_(max=max(0, batch.batch_size - 1))
        return SparsePlan(
            dense=self._dense.init_forward_metadata(batch) if dense else None, requests=requests
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create what plans of captured passes fill."""
        self._dense.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> SparsePlan:
        """Plan a captured pass; all requests have as many queries, so that tokens keep theirs."""
        layers = [x for x in self.config.layers if x.view in batch.views]
        plan, dense = self.init_forward_metadata(batch), None
        if any(x.index_topk is None for x in layers) and not self._fp8:
            dense = self._dense.init_forward_metadata_capture_cuda_graph(batch)
        return SparsePlan(dense=dense, requests=plan.requests)

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: SparsePlan
    ) -> None:
        """Plan a dense part again; a selection reads the lengths on the device."""
        if metadata.dense is not None:
            self._dense.init_forward_metadata_replay_cuda_graph(batch, metadata.dense)

    def index_topk(
        self,
        q_index: Tensor,
        weights: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: SparsePlan,
    ) -> Tensor:
        """Choose the keys of each query by two launches, more where scores would fill memory."""
        assert layer.index_topk is not None  # checked by the dispatcher
        return launch.index_topk(
            q_index,
            weights.contiguous(),
            cache,
            batch.views[layer.view],
            batch.cu_seqlens_q,
            metadata.requests,
            layer.index_topk,
            queries=batch.max_q_len,
            arch=self.config.arch,
        )

    def select(
        self,
        scores: Tensor,
        first: int,
        chosen: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: SparsePlan,
    ) -> None:
        """Select by scores float32 [n, L] that were computed elsewhere, for queries from `first`.

        Writes token slots into chosen int32 [T, K].
        """
        launch.select(
            *(scores, first, scores.shape[0], batch.views[layer.view], batch.cu_seqlens_q),
            *(metadata.requests, chosen),
            page_size=cache.page_size,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: SparsePlan,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the selected slots or, without a selection, to all keys."""
        if topk_indices is None and self._fp8:
            topk_indices = every_slot(layer, batch, cache.page_size)
        if topk_indices is None:
            dense = metadata.dense
            if dense is None:  # a pass of few keys, by a mode that selects
                dense = self._dense.init_forward_metadata(batch)
            return self._dense.forward(
                q, k, v, layer, cache, batch, dense, out=out, return_lse=return_lse
            )
        if return_lse:
            refuse_call(self.config, return_lse=return_lse, sparse=True)
        if not batch.num_tokens:
            return empty_attention(q, layer, out, return_lse)
        tokens, heads = q.shape[:2]
        out = q.new_empty(tokens, heads, layer.v_head_dim) if out is None else out
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        processors = 0 if self.config.deterministic else self.config.multiprocessors or 1
        launch.attend(
            *(q, layer, cache, topk_indices, out, lse),
            processors=processors,
            arch=self.config.arch,
        )
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
        """Attend without a cache, as MLA does."""
        lengths = (cu_seqlens_q, cu_seqlens_k, max_q, max_k)
        return self._dense.forward_ragged(
            q, k, v, layer, *lengths, causal=causal, out=out, return_lse=return_lse
        )
