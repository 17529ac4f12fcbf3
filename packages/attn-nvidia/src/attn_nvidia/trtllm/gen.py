"""trtllm-gen: TensorRT-LLM's prefill and decode kernels for sm100, cubins that FlashInfer loads."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from attn_core import (
    EVEN_MODES,
    BackendConfig,
    CacheView,
    ForwardBatch,
    read_pages,
    workspace,
)
from torch import Tensor

from attn_nvidia.common import workspace_bytes
from attn_nvidia.common.jit_log import building
from attn_nvidia.common.workspace_bytes import multiprocessors
from attn_nvidia.flashinfer.lse import natural
from attn_nvidia.trtllm.mha import PlanKey, Prepared, RequestTables, TrtllmMha


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One view of a pass.

    ends: cumulative KV lengths int32 [B + 1] of the context kernel, None where the decode kernel
    runs. use, scratch: of the workspace; with_lse: its bytes where the LSE is asked for.
    """

    requests: RequestTables
    q_len: int
    longest: int
    ends: Tensor | None
    use: str
    scratch: Tensor
    with_lse: int


class TrtllmGen(TrtllmMha[Pass]):
    """Ragged queries run on the context kernel, drafts of equal number on the decode kernel."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        decode: Any = importlib.import_module("flashinfer.decode")
        prefill: Any = importlib.import_module("flashinfer.prefill")
        self._decode = decode.trtllm_batch_decode_with_kv_cache
        self._context = prefill.trtllm_batch_context_with_kv_cache
        self._processors = multiprocessors(config)
        with building("trtllm-gen's launcher"):
            decode.get_trtllm_gen_fmha_module()

    def _plan(self, key: PlanKey, batch: ForwardBatch) -> Pass:
        view = batch.views[key[0]]
        layer = max(self._layers[key], key=lambda x: x.num_q_heads * x.v_head_dim)
        heads, dim = layer.num_q_heads, layer.v_head_dim
        lse_rows = batch.batch_size * -(-batch.max_q_len // 256) * 256
        need = workspace_bytes.trtllm_gen(self._processors, heads, dim)
        use, ends = "trtllm_gen decode", None
        if batch.forward_mode not in EVEN_MODES:
            # it lays its LSE where the decode kernel keeps counters that must stay 0
            use, ends = "trtllm_gen context", view.seq_lens.new_zeros(batch.batch_size + 1)
        plan = Pass(
            requests=RequestTables.of(view, self._parts),
            q_len=batch.max_q_len,
            longest=view.max_seq_len,
            ends=ends,
            use=use,
            scratch=workspace(view.seq_lens.device, use, need),
            with_lse=workspace_bytes.trtllm_gen(self._processors, heads, dim, lse_rows),
        )
        _fill_ends(plan, view)
        return plan

    def _refill(self, plan: Pass, key: PlanKey, batch: ForwardBatch) -> None:
        view = batch.views[key[0]]
        plan.requests.fill(view, self._parts)
        _fill_ends(plan, view)

    def _attend(
        self, q: Tensor, prepared: Prepared, batch: ForwardBatch, plan: Pass, out: Tensor, lse: bool
    ) -> Tensor | None:
        scratch = plan.scratch
        sums = None
        if lse:
            scratch = workspace(q.device, plan.use, plan.with_lse)
            sums = q.new_empty(q.shape[:2], dtype=torch.float32)
        if plan.ends is None:
            self._decode(
                q,
                prepared.pages,
                scratch,
                plan.requests.table,
                plan.requests.lens,
                plan.longest,
                prepared.bmm1_scale,
                prepared.bmm2_scale,
                prepared.window_left,
                out,
                sinks=prepared.sinks,
                kv_layout=prepared.layout,
                enable_pdl=True,
                backend="trtllm-gen",
                q_len_per_req=plan.q_len,
                lse=sums,
            )
        else:
            table = plan.requests.table
            if prepared.pages[0].element_size() == 1:
                prepared, table = _dequantised(prepared, table, q.dtype)
            self._context(
                q,
                prepared.pages,
                scratch,
                table,
                plan.requests.lens,
                plan.q_len,
                plan.longest,
                prepared.bmm1_scale,
                prepared.bmm2_scale,
                batch.batch_size,
                batch.cu_seqlens_q,
                plan.ends,
                prepared.window_left,
                out,
                kv_layout=prepared.layout,
                enable_pdl=True,
                sinks=prepared.sinks,
                lse=sums,
            )
        return None if sums is None else natural(sums)


def _fill_ends(plan: Pass, view: CacheView) -> None:
    if plan.ends is not None:
        torch.cumsum(view.seq_lens, 0, dtype=torch.int32, out=plan.ends[1:])


def _dequantised(prepared: Prepared, table: Tensor, dtype: torch.dtype) -> tuple[Prepared, Tensor]:
    """Copy the pages of a table out of an FP8 cache, in `dtype`, and number the copies.

    The context kernel takes queries and cache in one dtype, and queries in e4m3 are another model.
    """
    cache = replace(prepared.cache, k=prepared.pages[0], v=prepared.pages[1])
    k, v = read_pages(cache, table, dtype)
    assert v is not None
    copies = torch.arange(table.numel(), dtype=torch.int32, device=table.device)
    plain = replace(
        prepared,
        pages=(k.flatten(0, 1), v.flatten(0, 1)),
        layout="NHD",
        bmm1_scale=float(prepared.layer.scale),
        bmm2_scale=1.0,
    )
    return plain, copies.view_as(table)
