"""nsa: sparse MLA (DSA) on Hopper, over FlashMLA's sparse prefill and FlashAttention-3."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from attn_core import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    Device,
    ForwardBatch,
    LayerCache,
    Output,
    align16,
    copy_to_out,
    create_backend,
    empty_attention,
    load_plugins,
    refuse_layer,
    slot_table,
)
from torch import Tensor

from attn_nvidia.common.tensors import request_of_token
from attn_nvidia.dsa import sub_backends
from attn_nvidia.fa3.mla import FA3MLA
from attn_nvidia.fa3.plan import NO_WINDOW, Call, CallGroup, Plans
from attn_nvidia.mla.flashmla import load

_HEADS: Final = 64  # flash_mla_sparse_fwd has 64 query heads or 128
_KEYS: Final = 128  # it takes the keys of a query in steps of so many


class NSAPlan(NamedTuple):
    """The plan of a pass: which kernel attends to a selection, and what the others planned.

    cu_seqlens_q: int32 [T + 1], every token a request of its own; None where fa3 is not the kernel.
    """

    kernel: str
    cu_seqlens_q: Tensor | None
    dense: Plans
    indexer: Any


class NSA(AttentionBackend):
    """The documented kernels of a bf16 cache: flashmla_sparse in prefill, fa3 in decode.

    With learnable sinks flashmla_sparse attends in both. Keys are selected by triton's indexer, and
    passes without a selection are FlashAttention-3's absorbed MLA.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
        sinks = any(layer.sinks is not None for layer in config.layers)
        self._kernels = sub_backends(Device("cuda", config.arch), "bf16", sinks=sinks)
        self._fa3 = FA3MLA(config)
        self._flashmla, self._build = load(config.name, config.row.requires[1])
        self._lse_unit = 1.0 if self._build else math.log(2.0)
        self._sinks: dict[AttentionLayer, Tensor] = {}
        triton = load_plugins().get("triton")
        row = next(r for r in triton.capabilities if r.kind == "dsa" and r.device == "cuda")
        # without layers it plans no attention
        indexer = replace(config, name=triton.name, row=row, layers=())
        self._indexer = create_backend(triton, indexer)

    def init_forward_metadata(self, batch: ForwardBatch) -> NSAPlan:
        """Plan the pass; nothing is read to the host."""
        return self._plan(batch, self._indexer.init_forward_metadata(batch))

    def _plan(self, batch: ForwardBatch, indexer: Any) -> NSAPlan:
        kernel, cu_seqlens_q = self._kernels.of(batch.forward_mode), None
        if kernel == "fa3":
            device = batch.positions.device
            cu_seqlens_q = torch.arange(batch.num_tokens + 1, dtype=torch.int32, device=device)
        return NSAPlan(kernel, cu_seqlens_q, self._fa3.init_forward_metadata(batch), indexer)

    def index_topk(
        self,
        q_index: Tensor,
        weights: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: NSAPlan,
    ) -> Tensor:
        """Choose the keys of each query by triton's indexer, whose ties go to the earliest key."""
        return self._indexer.index_topk(q_index, weights, layer, cache, batch, metadata.indexer)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: NSAPlan,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the selected slots or, without a selection, to all keys."""
        if not batch.num_tokens:
            return empty_attention(q, layer, out, return_lse)
        plans = metadata.dense
        if topk_indices is None and layer.sinks is not None:
            topk_indices = self._every_slot(layer, batch)
        if topk_indices is not None:
            if metadata.cu_seqlens_q is None:
                return self._flashmla_sparse(q, layer, cache, topk_indices, out, return_lse)
            plans = self._selected(layer, topk_indices, metadata.cu_seqlens_q)
        return self._fa3.forward(
            q, k, v, layer, cache, batch, plans, out=out, return_lse=return_lse
        )

    def _selected(self, layer: AttentionLayer, topk_indices: Tensor, cu_seqlens_q: Tensor) -> Plans:
        """Return fa3's plan of a selection: the page table of each token, in pages of one token.

        fa3 knows no -1: only so many entries of a row are read as there are slots.
        """
        arguments = {
            "cache_seqlens": topk_indices.ge(0).sum(1, dtype=torch.int32),
            "page_table": topk_indices,
            "cu_seqlens_q": cu_seqlens_q,
            "max_seqlen_q": 1,
            "causal": False,
            "window_size": NO_WINDOW,
            "num_splits": 1 if self.config.deterministic else 0,
            "scheduler_metadata": None,
        }
        return {CallGroup(layer.group, capped=False): (Call(arguments, tokens=True),)}

    def _flashmla_sparse(
        self,
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        topk_indices: Tensor,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        """Call flash_mla_sparse_fwd over the slots of the whole cache; it reads no slot for -1.

        The LSE of sglang-kernel is to base 2, that of sgl-flash-mla natural. Both leave the sinks
        out and are +inf for a query without keys.
        """
        heads, topk = q.shape[1], topk_indices.shape[1]
        if heads % _HEADS:
            q = torch.nn.functional.pad(q, (0, 0, 0, -heads % _HEADS))
        if topk % _KEYS:
            topk_indices = torch.nn.functional.pad(topk_indices, (0, -topk % _KEYS), value=-1)
        result, _, lse = self._flashmla.flash_mla_sparse_fwd(
            align16(q),
            cache.k.view(-1, 1, layer.head_dim),
            topk_indices[:, None],
            layer.scale,
            layer.v_head_dim,
            attn_sink=None if layer.sinks is None else self._padded_sinks(layer),
            **self._build,
        )
        result = copy_to_out(result[:, :heads], out)
        if not return_lse:
            return result
        lse = lse[:, :heads] * self._lse_unit
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        return result, lse if layer.sinks is None else lse.logaddexp(layer.sinks.float())

    def _padded_sinks(self, layer: AttentionLayer) -> Tensor:
        """Return the sinks of a layer as the kernel reads them, float32 of its heads; made once."""
        padded = self._sinks.get(layer)
        if padded is None:
            assert layer.sinks is not None
            heads = layer.num_q_heads
            padded = torch.nn.functional.pad(layer.sinks.float(), (0, -heads % _HEADS))
            self._sinks[layer] = padded
        return padded

    def _every_slot(self, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        """Select every key that a query sees, int32 [T, L], L the longest request.

        fa3's absorbed kernel takes no sinks, so that a dense pass with them is a selection as well.
        """
        view = batch.views[layer.view]
        slots = slot_table(view.page_table, self.config.page_size, view.max_seq_len)
        request = request_of_token(batch.cu_seqlens_q, batch.num_tokens)
        token = torch.arange(batch.num_tokens, device=slots.device)
        behind = batch.cu_seqlens_q[request + 1] - token
        position = torch.arange(slots.shape[1], device=slots.device)
        seen = position <= (view.seq_lens[request] - behind)[:, None]
        return torch.where(seen, slots[request], -1).int()

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
        """Attend without a cache, heads of 192/128, as FlashAttention-3 does."""
        lengths = (cu_seqlens_q, cu_seqlens_k, max_q, max_k)
        return self._fa3.forward_ragged(
            q, k, v, layer, *lengths, causal=causal, out=out, return_lse=return_lse
        )

    # CUDA graphs: a selection is read on the device, so that only the others plan again.
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create what the plans of captured passes fill."""
        self._fa3.init_cuda_graph_state(max_bs, max_num_tokens)
        self._indexer.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> NSAPlan:
        """Plan a captured pass."""
        return self._plan(batch, self._indexer.init_forward_metadata_capture_cuda_graph(batch))

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: NSAPlan
    ) -> None:
        """Plan again for the lengths of a replay, into the tensors of the capture."""
        self._fa3.init_forward_metadata_replay_cuda_graph(batch, metadata.dense)
        self._indexer.init_forward_metadata_replay_cuda_graph(batch, metadata.indexer)
