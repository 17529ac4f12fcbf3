"""intel_amx: one call of the compiled kernels per layer, over the paged cache or without one."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from ctypes import byref
from typing import Final

import torch
from attn_core import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    BatchError,
    CacheView,
    ForwardBatch,
    ForwardMode,
    LayerCache,
    Output,
    UnsupportedError,
    refuse_call,
    refuse_layer,
    refuse_unplanned,
    refuse_window,
)
from torch import Tensor

from attn_intel.cpu.library import Attention, load

TYPES: Final = {  # `type` of the header
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
PLAIN: Final = (torch.float32, torch.float16, torch.bfloat16)  # of q and out


class IntelAMX(AttentionBackend):
    """Prefill, decode, mixed passes, chains and trees of drafts are one call over the page table.

    The lengths are read from the batch's tensors, so nothing is planned. How a request's keys are
    cut depends on this request alone: its bits are the same in any company and with any number of
    threads.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._kernels = load()
        self._level = self._kernels.level
        self._honoured: set[AttentionLayer] = set()
        for layer in config.layers:
            self._honour(layer)
        self._local = threading.local()  # each thread that calls has its own workspace

    def _honour(self, layer: AttentionLayer) -> None:
        refuse_layer(self.config, layer)
        refuse_window(self.config.name, layer)
        self._honoured.add(layer)

    def init_forward_metadata(self, batch: ForwardBatch) -> Mapping[str, CacheView]:
        """Return the batch's views."""
        return batch.views

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Mapping[str, CacheView],
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the cache, which holds the new tokens already; k and v are not read."""
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        view = metadata.get(layer.view)
        if view is None:
            refuse_unplanned(layer, metadata)
        call = Attention()
        call.table, call.table_row = view.page_table.data_ptr(), view.page_table.stride(0)
        call.columns, call.seq_lens = view.page_table.shape[1], view.seq_lens.data_ptr()
        call.page_size = cache.page_size
        call.causal = layer.group.causal
        spec = batch.spec
        if batch.forward_mode is ForwardMode.TARGET_VERIFY and spec is not None:
            tree = spec.tree_mask
            if tree is not None and layer.group.causal:  # an encoder's keys are no drafts
                call.tree, call.drafts = tree.data_ptr(), spec.num_draft_tokens
        keys, values = cache.k, cache.v
        if cache.layout == "HND":
            keys = keys.transpose(1, 2)
            values = None if values is None else values.transpose(1, 2)
        v_scale = cache.k_scale if values is None else cache.v_scale
        call.scale, call.v_scale = layer.scale * float(cache.k_scale), float(v_scale)
        return self._call(call, q, keys, values, layer, batch.cu_seqlens_q, out, return_lse)

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
        """Attend without a cache."""
        refuse_call(self.config, return_lse=return_lse)
        refuse_window(self.config.name, layer, causal=causal)
        call = Attention()
        call.cu_seqlens_k = cu_seqlens_k.data_ptr()
        call.causal = causal
        call.scale, call.v_scale = layer.scale, 1.0
        keys, values = k.unsqueeze(0), v.unsqueeze(0)
        return self._call(call, q, keys, values, layer, cu_seqlens_q, out, return_lse)

    def _call(
        self,
        call: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        cu_seqlens_q: Tensor,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        if layer not in self._honoured:
            self._honour(layer)
        sinks = None if layer.sinks is None else layer.sinks.float()
        self._refuse_tensors(q, k, v, layer, out, sinks)
        filled = out
        if out is None or out.stride(-1) != 1:
            filled = q.new_empty(q.shape[0], layer.num_q_heads, layer.v_head_dim)
        assert filled is not None
        shape = (q.shape[0], layer.num_q_heads)
        lse = q.new_empty(shape, dtype=torch.float32) if return_lse else None
        call.q, (call.q_token, call.q_head, _) = _dense(q), q.stride()
        call.k, (call.k_page, call.k_token, call.k_head, _) = _dense(k), k.stride()
        if v is not None:
            call.v, (call.v_page, call.v_token, call.v_head, _) = _dense(v), v.stride()
        call.out, (call.out_token, call.out_head, _) = filled.data_ptr(), filled.stride()
        call.lse = None if lse is None else lse.data_ptr()
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.cu_seqlens_q = cu_seqlens_q.data_ptr()
        call.requests, call.tokens = cu_seqlens_q.shape[0] - 1, q.shape[0]
        call.pages = k.shape[0] if call.table else k.shape[1]
        call.q_heads, call.kv_heads = layer.num_q_heads, layer.num_kv_heads
        call.head_dim, call.v_head_dim = layer.head_dim, layer.v_head_dim
        call.window = layer.sliding_window or 0
        call.logit_cap = layer.logit_cap or 0.0
        call.q_type, call.kv_type = TYPES[q.dtype], TYPES[k.dtype]
        call.out_type = TYPES[filled.dtype]
        call.level, call.parallel = self._level, self._kernels.parallel
        call.threads = torch.get_num_threads()
        self._attend(call)
        if out is not None and filled is not out:
            filled = out.copy_(filled)
        return filled if lse is None else (filled, lse)

    def _refuse_tensors(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        out: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        """Raise UnsupportedError for tensors that the kernels would read or write past the end."""
        name, heads, kv_heads = self.config.name, layer.num_q_heads, layer.num_kv_heads
        owed: list[tuple[str, Tensor, tuple[int, ...]]] = [
            ("q", q, (q.shape[0], heads, layer.head_dim)),
            ("k", k, (*k.shape[:2], kv_heads, layer.head_dim)),
        ]
        if v is not None:
            owed.append(("v", v, (*k.shape[:2], kv_heads, layer.v_head_dim)))
        if out is not None:
            owed.append(("out", out, (q.shape[0], heads, layer.v_head_dim)))
        if sinks is not None:
            owed.append(("sinks", sinks, (heads,)))
        for what, x, shape in owed:
            types = (k.dtype,) if what == "v" else TYPES if what == "k" else PLAIN
            if x.shape != shape or x.dtype not in types or not x.is_cpu:
                raise UnsupportedError(
                    f"{name}: layer {layer.layer_id} has {what} {list(x.shape)} {x.dtype} on "
                    f"{x.device} (expected {list(shape)} in {', '.join(map(str, types))} on cpu)"
                )

    def _attend(self, call: Attention) -> None:
        """Call the kernels, with as large a workspace as they ask for."""
        while True:
            workspace: Tensor | None = getattr(self._local, "workspace", None)
            if workspace is not None:
                call.workspace, call.workspace_bytes = workspace.data_ptr(), workspace.numel()
            needed: int = self._kernels.attend(byref(call))
            if not needed:
                return
            if needed < 0:
                raise BatchError(
                    f"{self.config.name}: request {-1 - needed} has queries, keys or pages outside "
                    f"of the tensors of this pass: {call.tokens} queries, {call.pages} "
                    f"{'pages' if call.table else 'keys'}, {call.columns} columns of the page "
                    "table; check cu_seqlens, seq_lens and page_table"
                )
            self._local.workspace = torch.empty(needed, dtype=torch.uint8)


def _dense(x: Tensor) -> int:
    """Return the address of x, whose last dimension has to be dense. Raises UnsupportedError."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise UnsupportedError(
            f"intel_amx: a tensor {list(x.shape)} with strides {x.stride()} (its last dimension "
            "has to be dense); call .contiguous() on it"
        )
    return x.data_ptr()
