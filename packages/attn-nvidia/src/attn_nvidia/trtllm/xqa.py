"""XQA: TensorRT-LLM's decode kernels of sm90 and sm120, compiled by FlashInfer at first use."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from attn_core import (
    TORCH_DTYPES,
    AttentionLayer,
    BackendConfig,
    CacheView,
    ForwardBatch,
    ForwardMode,
    LayerCache,
    workspace,
)
from torch import Tensor

from attn_nvidia.common import workspace_bytes
from attn_nvidia.common.jit_log import building
from attn_nvidia.common.tensors import request_of_token
from attn_nvidia.common.workspace_bytes import multiprocessors
from attn_nvidia.rows_mha import HOPPER
from attn_nvidia.trtllm.mha import PlanKey, Prepared, RequestTables, TrtllmMha


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What the kernel calls requests: rows of q_len queries each.

    of_token: the request of each token, where every token is a row of its own. mask: uint16
    [rows, q_len, words], bit j of row i: query i sees draft j; None for one query a row. scratch:
    of the workspace, semaphores and then partials.
    """

    requests: RequestTables
    q_len: int
    mask: Tensor | None
    of_token: Tensor | None
    scratch: Tensor
    semaphores: Tensor
    partials: Tensor


class Xqa(TrtllmMha[Rows]):
    """One query a row, or a chain of drafts; no log-sum-exp.

    Ragged queries, and drafts in a window, run as rows of one token: the kernel takes one length
    for all rows, and leaves a window's first tile unmasked where a row has several queries.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        decode: Any = importlib.import_module("flashinfer.decode")
        xqa: Any = importlib.import_module("flashinfer.xqa")
        self._decode = decode.trtllm_batch_decode_with_kv_cache
        self._module = xqa.get_xqa_module
        self._processors = multiprocessors(config)
        self._dtype, self._store = TORCH_DTYPES[config.dtype], TORCH_DTYPES[config.kv_cache_dtype]
        self._exact = config.row.archs == HOPPER and config.kv_cache_dtype == "fp8_e4m3"
        # what a kernel is compiled for, apart from what is the same for all layers
        self._shapes = {
            key: {(x.head_dim, x.num_q_heads // x.num_kv_heads) for x in layers}
            for key, layers in self._layers.items()
        }
        self._built: dict[tuple[int, int, bool, int], Any] = {}
        self._masks: dict[int, Tensor] = {}

    def _prepare(self, layer: AttentionLayer, cache: LayerCache) -> Prepared:
        prepared = super()._prepare(layer, cache)
        if prepared.layout == "NHD":
            return prepared
        k, v = prepared.pages  # the kernels go by strides
        blocks = None
        if prepared.blocks is not None:
            blocks = (prepared.blocks[0].transpose(1, 2), prepared.blocks[1].transpose(1, 2))
        pages = (k.transpose(1, 2), v.transpose(1, 2))
        return replace(prepared, pages=pages, blocks=blocks, layout="NHD")

    def _plan(self, key: PlanKey, batch: ForwardBatch) -> Rows:
        view, window = batch.views[key[0]], key[1]
        spec = batch.spec if batch.forward_mode is ForwardMode.TARGET_VERIFY else None
        mask = of_token = None
        q_len = 1
        if batch.num_tokens == batch.batch_size and batch.max_q_len == 1:
            requests = RequestTables.of(view, self._parts)
        elif spec is not None and window is None:
            requests = RequestTables.of(view, self._parts)
            q_len = spec.num_draft_tokens
            mask = self._mask(q_len, batch.batch_size)
        else:
            of_token = request_of_token(batch.cu_seqlens_q, batch.num_tokens)
            tables = _each_token(view, batch, of_token)
            requests = RequestTables.of(tables, self._parts, derived=True)
        self._build(key, q_len)
        need = max(
            workspace_bytes.xqa(self._processors, group, dim, q_len)
            for dim, group in self._shapes[key]
        )
        scratch = workspace(view.seq_lens.device, "xqa", need)
        cut = workspace_bytes.SEMAPHORES  # as xqa_batch_decode_with_kv_cache of flashinfer.decode
        return Rows(requests, q_len, mask, of_token, scratch, scratch[:cut], scratch[cut:])

    def _refill(self, plan: Rows, key: PlanKey, batch: ForwardBatch) -> None:
        view = batch.views[key[0]]
        if plan.of_token is not None:
            view = _each_token(view, batch, plan.of_token)
        plan.requests.fill(view, self._parts)

    def _mask(self, drafts: int, rows: int) -> Tensor:
        mask = self._masks.get(drafts)
        if mask is None or mask.shape[0] < rows:
            mask = chain_mask(drafts, max(rows, self.config.max_bs), self.config.device)
            self._masks[drafts] = mask
        return mask[:rows]

    def _build(self, key: PlanKey, q_len: int) -> None:
        """Let FlashInfer compile, or load, the kernels of these layers, once."""
        window = key[1] is not None
        for dim, group in self._shapes[key]:
            kind = (dim, group, window, q_len)
            if kind in self._built:
                continue
            label = f"head dim {dim}, group {group}, page {self._page}, {q_len} queries"
            with building(f"XQA ({label}{', window' * window}, {self._store})"):
                self._built[kind] = self._module(
                    self._dtype, self._store, self._page, dim, group, window, self._dtype, q_len
                )

    def _attend(
        self, q: Tensor, prepared: Prepared, batch: ForwardBatch, plan: Rows, out: Tensor, lse: bool
    ) -> None:
        if self._exact:
            self._attend_exactly(q, prepared, plan, out)
            return
        self._decode(
            q,
            prepared.pages,
            plan.scratch,
            plan.requests.table,
            plan.requests.lens,
            0,  # the longest request: XQA takes what the table has room for
            prepared.bmm1_scale,
            prepared.bmm2_scale,
            prepared.window_left,
            out,
            sinks=prepared.sinks,
            kv_layout=prepared.layout,
            enable_pdl=True,  # asked of the device in every call otherwise; sm90 and up have it
            backend="xqa",
            q_len_per_req=plan.q_len,
            mask=plan.mask,
            kv_cache_sf=prepared.blocks,
        )

    def _attend_exactly(self, q: Tensor, prepared: Prepared, plan: Rows, out: Tensor) -> None:
        """Read an FP8 cache on Hopper with the kernel that computes in 16 bits.

        xqa() takes csrc/xqa/mha_sm90.cu there, which rounds queries and probabilities to e4m3;
        the module it calls offers both. It takes the addresses of q, out, lengths and sinks only.
        """
        layer, table, window = prepared.layer, plan.requests.table, prepared.window_left + 1
        heads, dim = layer.num_kv_heads, layer.head_dim
        self._built[dim, layer.num_q_heads // heads, window > 0, plan.q_len].xqa(
            False,  # run_sm90_fp8_mha
            self._processors,
            heads,
            window,
            prepared.bmm1_scale / prepared.bmm2_scale * dim**0.5,  # it divides by this root itself
            out,
            1.0,
            q,
            prepared.sinks,
            *prepared.pages,
            None,
            None,
            table,
            table.shape[1] * self._page,
            plan.requests.lens,
            table.shape[0],
            prepared.bmm2_scale,  # of K too, hence the quotient above
            plan.semaphores,
            plan.partials,
            True,
            plan.q_len,
            plan.mask,
        )


def chain_mask(drafts: int, rows: int, device: torch.device) -> Tensor:
    """Return the packed mask of chains, uint16 [rows, drafts, 2 · ceil(drafts / 32)].

    Bit j of row i is set where j <= i: the layout of SpecDecParams in csrc/xqa/specDec.h, 32 bits
    a word, the low half first.
    """
    num_words = -(-drafts // 32)
    column = torch.arange(32 * num_words, device=device)
    visible = column <= torch.arange(drafts, device=device)[:, None]
    bits = visible.view(drafts, num_words, 32).long() << torch.arange(32, device=device)
    packed = bits.sum(-1).to(torch.int32).view(torch.uint16)
    return packed.expand(rows, -1, -1).contiguous()


def _each_token(view: CacheView, batch: ForwardBatch, of_token: Tensor) -> CacheView:
    """Return a view in which every token is a request that ends with it."""
    ends = batch.cu_seqlens_q[1:].index_select(0, of_token)
    lens = view.seq_lens.index_select(0, of_token)
    num_later = ends - torch.arange(1, of_token.shape[0] + 1, dtype=torch.int32, device=ends.device)
    return CacheView(
        page_table=view.page_table.index_select(0, of_token),
        seq_lens=lens - num_later.clamp(min=0),
        out_cache_loc=view.out_cache_loc,
        max_seq_len=view.max_seq_len,
    )
