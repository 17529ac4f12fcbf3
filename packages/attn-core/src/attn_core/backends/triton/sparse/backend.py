"""triton, sparse MLA: our own kernels select keys and attend to them; dense passes are MLA's."""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from attn_core.backends.triton.backend import Triton
from attn_core.backends.triton.sparse import gather, launch, selecting
from attn_core.backends.triton.sparse.passes import SparsePass, SparsePlan, View, stored
from attn_core.backends.triton.tuning import is_hopper
from attn_core.backends.triton.variants import has_gluon
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.forms import same_form
from attn_core.ops.new_tensor import new_tensor
from attn_core.ops.triton.launcher import alike
from attn_core.runtime.backend import AttentionBackend, BackendConfig, Output
from attn_core.runtime.batch import DECODE_MODES, ForwardBatch
from attn_core.runtime.contract_checks import refuse_call
from attn_core.runtime.kernel_tensors import empty_attention
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.sparse import dense_pass, every_slot

MOST_DECODED = 1 << 20  # FP8 latents that are decoded at once: 1.1 GiB


class TritonSparse(AttentionBackend):
    """Nothing is read to the host and lengths stay on the device, so that graphs serve them all.

    A plan is not safe for concurrent streams: the layers of its pass share their scratch.
    """

    casts_output = True

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._dense = Triton(config)
        self._fp8 = config.kv_cache_dtype == "fp8_e4m3"
        self._heads = max((x.num_q_heads for x in config.layers), default=0)
        self._launchers: dict[Any, Any] = {}  # of kernels that read no cache
        self._hopper: Any = None
        if is_hopper(config.arch) and config.device.type != "cpu" and has_gluon():
            self._hopper = importlib.import_module("attn_core.backends.triton.sparse.hopper")

    def init_forward_metadata(self, batch: ForwardBatch) -> SparsePlan:
        """Plan the pass; attention to all keys only where one of the layers may do so."""
        layers = [x for x in self.config.layers if x.view in batch.views]
        dense = any(x.index_topk is None or dense_pass(x, batch) for x in layers)
        dense = dense and not self._fp8
        tokens, device = batch.num_tokens, batch.positions.device
        requests = torch.arange(tokens, dtype=torch.int32, device=device)
        if batch.forward_mode not in DECODE_MODES:
            ends = batch.cu_seqlens_q[1:]
            requests = torch.searchsorted(ends, requests, right=True, out_int32=True)
            requests = requests.clamp_(max=max(0, batch.batch_size - 1))
        return SparsePlan(
            dense=self._dense.init_forward_metadata(batch) if dense else None,
            requests=requests,
            unread_lse=torch.empty(tokens, self._heads, dtype=torch.float32, device=device),
        )

    def _view(self, layer: AttentionLayer, batch: ForwardBatch, plan: SparsePlan) -> View:
        """Return what layers of this one's view share in a pass."""
        view = plan.views.get(layer.view)
        if view is None or view.batch is not batch:
            inputs = SparsePass(
                *(batch.views[layer.view], batch.cu_seqlens_q, plan.requests),
                queries=batch.max_q_len,
                launchers=self._launchers,
                keep_launches=not plan.captured,
            )
            view = plan.views[layer.view] = View(batch, inputs)
        return view

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create what plans of captured passes fill."""
        self._dense.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> SparsePlan:
        """Plan a captured pass; all requests have as many queries, so that tokens keep theirs."""
        layers = [x for x in self.config.layers if x.view in batch.views]
        plan, dense = self.init_forward_metadata(batch), None
        if any(x.index_topk is None for x in layers) and not self._fp8:
            dense = self._dense.init_forward_metadata_capture_cuda_graph(batch)
        return replace(plan, dense=dense, captured=True)

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
            self._view(layer, batch, metadata).inputs,
            layer.index_topk,
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
        selecting.select(
            *(scores, first, scores.shape[0], self._view(layer, batch, metadata).inputs),
            *(chosen, selecting.selecting(batch.max_q_len)),
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
            topk_indices = self._every_slot(layer, cache, batch, metadata)
        inputs, like, last = cast(SparsePass | None, None), None, None
        if topk_indices is not None and not return_lse:
            view = metadata.views.get(layer.view)
            if view is None or view.batch is not batch:
                view = self._view(layer, batch, metadata)
            inputs, q_ptr = view.inputs, q.data_ptr()
            q_ptr |= topk_indices.data_ptr() | (0 if out is None else out.data_ptr())
            if not q_ptr % 16:
                like = (layer.form, layer.scale, stored(cache), out is None)
                last = inputs.last.get(like)
            if last is not None:
                fits, (attention, shape, lse) = last
                if fits(q, topk_indices) if out is None else fits(q, topk_indices, out):
                    if out is None:
                        _, heads, dim = shape
                        out = new_tensor(q, shape, (heads * dim, dim, 1), q.dtype)
                    attention.run(q, cache, topk_indices, out, lse)
                    return out
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
        shape = tokens, heads, _ = q.shape
        caller_out, of_out = out, cast(Hashable, None)
        if out is None:
            out = q.new_empty(tokens, heads, layer.v_head_dim)
        else:
            of_out = (out.stride(), alike(out))
        lse = metadata.unread_lse
        if return_lse or lse.shape != (tokens, heads):
            lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        inputs = self._view(layer, batch, metadata).inputs if inputs is None else inputs
        key = (
            "attend", shape, q.stride(), alike(q), of_out, stored(cache), topk_indices.shape,
            topk_indices.stride(0), alike(topk_indices), layer.scale, layer.v_head_dim,
        )  # fmt: skip
        attention = inputs.kept.get(key)
        if attention is None:
            arguments = (q, layer, cache, batch, topk_indices, out, lse)
            attention = self._attention(*arguments)
            inputs.keep(key, attention, attention.nbytes)
        elif like is not None and lse is metadata.unread_lse:
            fits = same_form(*(x for x in (q, topk_indices, caller_out) if x is not None))
            inputs.last[like] = (fits, (attention, (*out.shape,), lse))
        attention.run(q, cache, topk_indices, out, lse)
        return (out, lse) if return_lse else out

    def _every_slot(
        self, layer: AttentionLayer, cache: LayerCache, batch: ForwardBatch, plan: SparsePlan
    ) -> Tensor:
        """Select all keys, once for the layers of a view; a graph does it in each replay."""
        if plan.captured:
            return every_slot(layer, batch, cache.page_size)
        view = self._view(layer, batch, plan)
        if view.every is None:
            view.every = every_slot(layer, batch, cache.page_size)
        return view.every

    def _attention(
        self,
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        topk_indices: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> Any:
        """Return how tensors like these attend in a pass.

        Hopper's kernel reads latents in the dtype of q. FP8 latents are decoded: those that were
        selected, or the pages of a pass if they are fewer; where there are too many, the portable
        kernel reads them. Of one query a request, each is selected at most once: decoding those is
        one launch.
        """
        config = self.config
        processors = 0 if config.deterministic else config.multiprocessors or 1
        options: Any = {"processors": processors, "launchers": self._launchers}
        hopper, slots = self._hopper, topk_indices
        if hopper is not None and hopper.takes(q, layer, cache):
            if not self._fp8:
                source = gather.Source(slots, self._launchers)
                return hopper.Attention.of(q, layer, source, cache.k, slots, out, lse, **options)
            view, chosen = batch.views[layer.view], slots.numel()
            pages = view.page_table.shape[0] * -(-view.max_seq_len // cache.page_size)
            capacity = pages * cache.page_size
            if min(capacity, chosen) <= MOST_DECODED:
                decoded: gather.Pages | gather.Selected
                if capacity <= chosen and (batch.max_q_len > 1 or chosen > MOST_DECODED):
                    decoded = gather.Pages(slots, self._launchers, view, cache, q.dtype)
                else:
                    decoded = gather.Selected(slots, self._launchers, cache, q.dtype)
                latents, slots = decoded.latents, decoded.slots
                attention = hopper.Attention.of(
                    q, layer, decoded, latents, slots, out, lse, **options
                )
                return attention
        options["arch"] = config.arch
        return launch.Attention.of(q, layer, cache, slots, out, lse, **options)

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
