"""nsa: sparse MLA (DSA) on Hopper, over FlashMLA's sparse kernels and FlashAttention-3."""

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
    every_slot,
    gather_pages,
    kernel_pages,
    load_plugins,
    refuse_layer,
)
from torch import Tensor

from attn_nvidia.dsa import Store, SubBackends, flashmla_auto, sub_backends
from attn_nvidia.fa3.mla import FA3MLA
from attn_nvidia.fa3.plan import NO_WINDOW, Call, CallGroup, Plans
from attn_nvidia.indexer import DeepGemmIndexer
from attn_nvidia.mla.flashmla import SPARSE_HEADS, load, padded

_PAGE: Final = 64  # flashmla_kv's; slots are the same in larger ones


class NSAPlan(NamedTuple):
    """The plan of a pass: which kernel attends to a selection, and what the others planned.

    cu_seqlens_q: int32 [T + 1], every token a request of its own; None where fa3 is not the kernel.
    dense: None over FP8 latents and for rows with sinks, where a pass without a selection selects
    all.
    schedules: flashmla_kv's, by query heads and keys; the first layer of each makes it.
    scored: what DeepGEMM's scores of all layers read.
    """

    kernel: str
    cu_seqlens_q: Tensor | None
    dense: Plans | None
    indexer: Any
    schedules: dict[tuple[int, int], Any]
    scored: dict[Any, Any]


class NSA(AttentionBackend):
    """The kernel that the row names, or the documented ones of the cache and the phase.

    Those are flashmla_sparse in prefill and fa3 in decode over bf16 latents, flashmla_kv over FP8
    ones; with learnable sinks, which need bf16, flashmla_sparse. Keys are selected by triton's
    indexer, from DeepGEMM's scores where it is installed and the queries are FP8. Passes over bf16
    latents without a selection are FlashAttention-3's absorbed MLA.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
        sinks = any(layer.sinks is not None for layer in config.layers)
        self._store: Store = "fp8_e4m3" if config.kv_cache_dtype == "fp8_e4m3" else "bf16"
        self._device = Device("cuda", config.arch)
        self._kernels = sub_backends(self._device, self._store, sinks=sinks)
        if sub_backend := config.row.sub_backend:
            self._kernels = SubBackends(sub_backend, sub_backend)
        self._fa3 = FA3MLA(config)
        self._flashmla, self._build = load(config.name, config.row.requires[1])
        self._lse_unit = 1.0 if self._build else math.log(2.0)
        triton = load_plugins().get("triton")
        row = next(r for r in triton.capabilities if r.kind == "dsa" and r.device == "cuda")
        # without layers it plans no attention
        indexer = replace(config, name=triton.name, row=row, layers=())
        self._indexer: Any = create_backend(triton, indexer)
        self._deep_gemm = DeepGemmIndexer.load(self._indexer, config.multiprocessors)

    def init_forward_metadata(self, batch: ForwardBatch) -> NSAPlan:
        """Plan the pass; nothing is read to the host."""
        return self._plan(batch, self._indexer.init_forward_metadata(batch))

    def _plan(self, batch: ForwardBatch, indexer: Any) -> NSAPlan:
        kernel, cu_seqlens_q, dense = self._kernels.of(batch.forward_mode), None, None
        if kernel == "flashmla_auto":
            lengths = next(iter(batch.views.values())).seq_lens_host or ()
            counts = (sum(lengths), batch.num_tokens)  # read on Blackwell alone
            kernel = flashmla_auto(self._device, self._store, batch.forward_mode, *counts)
        if kernel == "fa3":
            device = batch.positions.device
            cu_seqlens_q = torch.arange(batch.num_tokens + 1, dtype=torch.int32, device=device)
        if self.config.row.requires_finite_padding:  # as fa3's whole tiles do
            dense = self._fa3.init_forward_metadata(batch)
        return NSAPlan(kernel, cu_seqlens_q, dense, indexer, {}, {})

    def index_topk(
        self,
        q_index: Tensor,
        weights: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: NSAPlan,
    ) -> Tensor:
        """Choose the keys of each query; ties go to the earliest key. See DeepGemmIndexer."""
        indexer, longest = self._deep_gemm, batch.views[layer.view].max_seq_len
        arguments = (q_index, weights, layer, cache, batch, metadata.indexer)
        if indexer is not None and indexer.takes(q_index, layer, cache, longest):
            return indexer.index_topk(*arguments, metadata.scored)
        chosen: Tensor = self._indexer.index_topk(*arguments)
        return chosen

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
        if topk_indices is None and plans is None:
            topk_indices = every_slot(layer, batch, self.config.page_size)
        if topk_indices is not None:
            if metadata.kernel == "flashmla_kv":
                schedules = metadata.schedules
                return self._flashmla_kv(q, layer, cache, topk_indices, schedules, out, return_lse)
            if metadata.cu_seqlens_q is None:
                latents = cache.k
                if self._store == "fp8_e4m3":
                    latents, topk_indices = gather_pages(
                        layer, cache, batch, topk_indices, torch.bfloat16
                    )
                return self._flashmla_sparse(q, layer, latents, topk_indices, out, return_lse)
            plans = self._selected(layer, topk_indices, metadata.cu_seqlens_q)
        assert plans is not None  # without one there is a selection
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
        latents: Tensor,
        topk_indices: Tensor,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        """Call flash_mla_sparse_fwd over bf16 latents; it reads no slot for -1.

        The LSE of sglang-kernel is to base 2, that of sgl-flash-mla natural. Both leave the sinks
        out and are +inf for a query without keys.
        """
        heads = q.shape[1]
        q, topk_indices = padded(q, topk_indices)
        result, _, lse = self._flashmla.flash_mla_sparse_fwd(
            align16(q),
            kernel_pages(latents, 1).squeeze(1),
            topk_indices[:, None],
            layer.scale,
            layer.v_head_dim,
            attn_sink=_padded_sinks(layer),
            **self._build,
        )
        result = copy_to_out(result[:, :heads], out)
        if not return_lse:
            return result
        lse = lse[:, :heads] * self._lse_unit
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        return result, lse if layer.sinks is None else lse.logaddexp(layer.sinks.float())

    def _flashmla_kv(
        self,
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        topk_indices: Tensor,
        schedules: dict[tuple[int, int], Any],
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        """Call flash_mla_with_kvcache over FP8 latents, each query a request of one token.

        It reads no slot for -1. Its LSE is natural, [T, H, 1], and +inf for a query without keys.
        """
        heads = q.shape[1]
        q, topk_indices = padded(q, topk_indices)
        key = (q.shape[1], topk_indices.shape[1])
        if key not in schedules:
            schedules[key], _ = self._flashmla.get_mla_metadata()  # the first call fills it
        latents = cache.k.view(torch.float8_e4m3fn)  # those of a page have to be dense
        pages = kernel_pages(latents, _PAGE, dense=latents.stride(1) != latents.shape[-1])
        result, lse = self._flashmla.flash_mla_with_kvcache(
            align16(q)[:, None],
            pages,
            None,
            None,
            layer.v_head_dim,
            schedules[key],
            softmax_scale=layer.scale,
            is_fp8_kvcache=True,
            indices=topk_indices[:, None],
            **self._build,
        )
        result = copy_to_out(result[:, 0, :heads], out)
        if not return_lse:
            return result
        lse = lse[:, :heads, 0]
        return result, lse.masked_fill(lse == torch.inf, -torch.inf)

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
        if metadata.dense is not None:
            self._fa3.init_forward_metadata_replay_cuda_graph(batch, metadata.dense)
        self._indexer.init_forward_metadata_replay_cuda_graph(batch, metadata.indexer)


def _padded_sinks(layer: AttentionLayer) -> Tensor | None:
    """Return the sinks of a layer as the kernel reads them, float32 of its heads."""
    if layer.sinks is None:
        return None
    return torch.nn.functional.pad(layer.sinks.float(), (0, -layer.num_q_heads % SPARSE_HEADS))
