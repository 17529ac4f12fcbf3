"""nsa on Blackwell by its kernel trtllm: TensorRT-LLM's sparse MLA, as FlashInfer has it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any, Final

import torch
from attn_core import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    ForwardBatch,
    LayerCache,
    Output,
    align16,
    contiguous_out,
    copy_to_out,
    create_backend,
    empty_attention,
    every_slot,
    kernel_pages,
    load_plugins,
    refuse_call,
    refuse_layer,
    workspace,
)
from torch import Tensor

from attn_nvidia.common import workspace_bytes
from attn_nvidia.common.jit_log import building
from attn_nvidia.flashinfer.mla import LATENT, ROPE
from attn_nvidia.mla.flashmla import SPARSE_KEYS
from attn_nvidia.trtllm.mla import LEAST, NOPE


class TrtllmSparse(AttentionBackend):
    """Every query is a request of one token whose table holds slots; triton selects the keys.

    A pass without a selection selects every key that a query sees.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
        self._page: Final = 64 if config.page_size % 64 == 0 else 32
        mla: Any = importlib.import_module("flashinfer.mla")
        self._decode = mla.trtllm_batch_decode_with_kv_cache_mla
        self._called = False
        triton = load_plugins().get("triton")
        row = next(r for r in triton.capabilities if r.kind == "dsa" and r.device == "cuda")
        # without layers it plans no attention
        self._indexer: Any = create_backend(
            triton, replace(config, name=triton.name, row=row, layers=())
        )

    def init_forward_metadata(self, batch: ForwardBatch) -> Any:
        """Plan the selection; attention reads all that it needs from one."""
        return self._indexer.init_forward_metadata(batch)

    def index_topk(
        self,
        q_index: Tensor,
        weights: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Any,
    ) -> Tensor:
        """Choose the keys of each query; ties go to the earliest key."""
        chosen: Tensor = self._indexer.index_topk(q_index, weights, layer, cache, batch, metadata)
        return chosen

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Any,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the selected slots or, without a selection, to all keys.

        It reads as many slots of a row as there are; that of a query without any is slot 0's, and
        its output is then zeroed.
        """
        if return_lse:
            refuse_call(self.config, return_lse=return_lse)
        tokens, heads, dim = q.shape
        if not tokens:
            return empty_attention(q, layer, out, return_lse)
        if topk_indices is None:
            topk_indices = every_slot(layer, batch, self.config.page_size)
        counts = topk_indices.ge(0).sum(1, dtype=torch.int32)
        slots = torch.nn.functional.pad(
            topk_indices.clamp(min=0), (0, -topk_indices.shape[1] % SPARSE_KEYS)
        )
        result = contiguous_out(q, LATENT, out)

        def call() -> None:
            self._decode(
                align16(q).view(tokens, 1, heads, dim),
                kernel_pages(cache.k, self._page).squeeze(2),
                self._scratch(heads),
                NOPE,
                LATENT,
                ROPE,
                slots[:, None],
                counts.clamp(min=1),
                slots.shape[1],
                slots.shape[1],
                out=result.view(tokens, 1, heads, LATENT),
                bmm1_scale=layer.scale,
                bmm2_scale=1.0,
                backend="trtllm-gen",
            )

        if self._called:
            call()
        else:
            with building("trtllm-gen's sparse kernels"):
                call()
            self._called = True
        result.masked_fill_((counts == 0)[:, None, None], 0.0)
        return copy_to_out(result, out)

    def _scratch(self, heads: int) -> Tensor:
        processors = workspace_bytes.multiprocessors(self.config)
        need = workspace_bytes.trtllm_gen(processors, heads, LATENT)
        # trtllm_mha's: the counters at its front are left 0 by all kernels of generation
        return workspace(self.config.device, "trtllm_gen decode", max(need, LEAST))

    # CUDA graphs: a selection is read on the device, so that nothing else is planned again.
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create what the plans of captured passes fill."""
        self._indexer.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> Any:
        """Plan a captured pass."""
        return self._indexer.init_forward_metadata_capture_cuda_graph(batch)

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch, metadata: Any) -> None:
        """Plan again for the lengths of a replay."""
        self._indexer.init_forward_metadata_replay_cuda_graph(batch, metadata)
