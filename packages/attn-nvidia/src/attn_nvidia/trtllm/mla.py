"""trtllm_mla: TensorRT-LLM's latent decode and ragged prefill on sm100, the rest FlashInfer's."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from attn_core import (
    EVEN_MODES,
    AttentionLayer,
    BackendConfig,
    ForwardBatch,
    ForwardMode,
    LayerGroup,
    Output,
    align16,
    contiguous16,
    contiguous_out,
    copy_to_out,
    empty_attention,
    refuse_call,
    to_e4m3_saturating,
    workspace,
)
from torch import Tensor

from attn_nvidia.common import workspace_bytes
from attn_nvidia.common.jit_log import building
from attn_nvidia.common.tensors import request_of_token
from attn_nvidia.common.workspace_bytes import multiprocessors
from attn_nvidia.flashinfer.lse import natural
from attn_nvidia.flashinfer.mla import LATENT, ROPE
from attn_nvidia.flashinfer.mla_plan import PerPassCache
from attn_nvidia.mla.decode import DecodePlan, MlaDecode

NOPE = 128  # of a head before absorption
LEAST = 150 * workspace_bytes.MIB  # what the documented system gives it


class TrtllmMLA(MlaDecode):
    """Decode and chains by trtllm-gen over pages of 32 or 64; ragged prefill by its own kernel.

    Absorbed extend over a prefix is FlashInfer's, as in the documented system. FlashInfer has none
    over an FP8 cache on sm100: there prefill is ragged alone, and what drafts extend by, in ragged
    numbers, is trtllm-gen's too. Its queries are rounded to e4m3: it takes no others.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        mla: Any = importlib.import_module("flashinfer.mla")
        prefill: Any = importlib.import_module("flashinfer.prefill")
        self._decode = mla.trtllm_batch_decode_with_kv_cache_mla
        self._ragged = prefill.trtllm_ragged_attention_deepseek
        self.page = 64 if config.page_size % 64 == 0 else 32
        self.columns = 128 // self.page  # it loads 128 keys at a time
        self._fp8 = config.kv_cache_dtype == "fp8_e4m3"
        if self._fp8:
            self.modes = EVEN_MODES | {ForwardMode.DRAFT_EXTEND}
        self._processors = multiprocessors(config)
        self._lengths: PerPassCache[tuple[Tensor, Tensor | None]] = PerPassCache()
        self._called: set[str] = set()

    def init_forward_metadata(self, batch: ForwardBatch) -> Any:
        """Plan a pass; nothing of it is read on the host unless FlashInfer runs it."""
        self._lengths.clear()
        return super().init_forward_metadata(batch)

    def plan(self, group: LayerGroup, table: Tensor, seq_lens: Tensor, queries: int) -> Tensor:
        """Return the scratch, with room for the LSE."""
        return self._scratch(group.num_q_heads, LATENT, table.shape[0], queries)

    def _scratch(self, heads: int, v_dim: int, requests: int, queries: int) -> Tensor:
        rows = requests * (-(-queries // 256) * 256)
        need = workspace_bytes.trtllm_gen(self._processors, heads, v_dim, rows)
        # trtllm_mha's: the counters at its front are left 0 by all kernels of generation
        return workspace(self.config.device, "trtllm_gen decode", max(need, LEAST))

    def attend(
        self,
        q: Tensor,
        pages: Tensor,
        layer: AttentionLayer,
        plan: DecodePlan,
        k_scale: float | Tensor,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        """Call the kernel, whose LSE is log2, [T, H]; ragged queries have none."""
        tokens, heads, dim = q.shape
        result = contiguous_out(q, LATENT, out)
        q = to_e4m3_saturating(q) if self._fp8 else align16(q)
        shape: tuple[int, ...] = (-1, plan.queries, heads)
        scale = k_scale if self._fp8 else 1.0
        options: dict[str, Any] = {"return_lse": return_lse}
        if plan.cu_queries is not None:
            shape = (tokens, heads)
            options = {"cum_seq_lens_q": plan.cu_queries, "max_q_len": min(plan.queries, tokens)}

        def call() -> Any:
            return self._decode(
                q.view(*shape, dim),
                pages.squeeze(2),
                plan.extra,
                NOPE,
                LATENT,
                ROPE,
                plan.table,
                plan.seq_lens,
                plan.longest,
                out=result.view(*shape, LATENT),
                bmm1_scale=layer.scale * scale,
                bmm2_scale=scale,
                backend="trtllm-gen",
                **options,
            )

        returned = self._first("decode", call)
        result = copy_to_out(result, out)
        return (result, natural(returned[1])) if return_lse else result

    def _first(self, label: str, call: Any) -> Any:
        """Call a kernel; the first call may build or fetch it."""
        if label in self._called:
            return call()
        with building(f"trtllm-gen's {label} kernels"):
            result = call()
        self._called.add(label)
        return result

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
        """Attend without a cache, heads of 192/128; no length is read on the host."""
        refuse_call(self.config, return_lse=return_lse)
        if not q.shape[0] or not k.shape[0]:
            return empty_attention(q, layer, out, return_lse)
        key = (cu_seqlens_q, cu_seqlens_k)
        lengths, rows_without_keys = self._lengths.get(
            key, (q.shape[0], causal), lambda: _lengths(*key, q, causal)
        )
        result = contiguous_out(q, v.shape[-1], out)

        def call() -> Any:
            return self._ragged(
                contiguous16(q),  # it takes strides of keys and values alone
                align16(k),
                align16(v),
                self._scratch(q.shape[1], v.shape[-1], lengths.shape[0], max_q),
                lengths,
                max_q,
                max_k,
                layer.scale,
                1.0,
                -1.0,
                lengths.shape[0],
                -1,
                *key,
                None,
                causal,
                return_lse,
                out=result,
            )

        returned = self._first("prefill", call)
        if rows_without_keys is not None:
            result.masked_fill_(rows_without_keys[:, None, None], 0.0)
        result = copy_to_out(result, out)
        if not return_lse:
            return result
        lse = natural(returned[1])
        if rows_without_keys is not None:
            lse.masked_fill_(rows_without_keys[:, None], -torch.inf)
        return result, lse


def _lengths(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the KV lengths int32 [B], and which queries see no key, bool [T], None for none.

    The kernel leaves the rows of requests without keys unwritten: those whose prefix has no more
    chunks. In causal order a request with fewer keys than queries has such rows too. Equal lengths
    have none: the new tokens are the keys.
    """
    lengths = cu_seqlens_k.diff()
    if causal and cu_seqlens_q is cu_seqlens_k:
        return lengths, None
    tokens = q.shape[0]
    requests = request_of_token(cu_seqlens_q, tokens)
    keys = lengths.index_select(0, requests)
    if causal:  # a query does not see the keys of those that follow it
        ends = cu_seqlens_q[1:].index_select(0, requests)
        keys = keys - ends + torch.arange(1, tokens + 1, dtype=torch.int32, device=q.device)
    return lengths, keys <= 0
