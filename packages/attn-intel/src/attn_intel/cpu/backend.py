"""intel_amx: one call of the compiled kernels per layer, over the paged cache or without one."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
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

from attn_intel.cpu.library import LEVELS, Attention, load
from attn_intel.cpu.linear import ROWS, LinearOfFewRows

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

    def linear_class(self) -> type[torch.nn.Linear] | None:
        """Return LinearOfFewRows where it is faster than torch at this CPU's level."""
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(self.config.dtype)
        return LinearOfFewRows if (LEVELS[self._level], dtype) in ROWS else None

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
        lies = (cache.k.data_ptr(), None if cache.v is None else cache.v.data_ptr())
        bound = cache.launchers.get((IntelAMX, layer))
        if bound is None or layer not in self._honoured or (bound.k, bound.v) != lies:
            bound = cache.launchers[IntelAMX, layer] = self._bind(layer, cache)
        call = Attention.from_buffer_copy(bound)
        call.table, call.table_row = view.page_table.data_ptr(), view.page_table.stride(0)
        call.columns, call.seq_lens = view.page_table.shape[1], view.seq_lens.data_ptr()
        spec = batch.spec
        if batch.forward_mode is ForwardMode.TARGET_VERIFY and spec is not None:
            tree = spec.tree_mask
            if tree is not None and layer.group.causal:  # an encoder's keys are no drafts
                call.tree, call.drafts = tree.data_ptr(), spec.num_draft_tokens
        v_scale = cache.k_scale if cache.v is None else cache.v_scale
        call.scale, call.v_scale = layer.scale * float(cache.k_scale), float(v_scale)
        return self._call(call, q, layer, batch.cu_seqlens_q, out, return_lse)

    def _bind(self, layer: AttentionLayer, cache: LayerCache) -> Attention:
        """Return what all calls of a layer over its cache have in common; it is kept with it."""
        keys, values = cache.k, cache.v
        if cache.layout == "HND":
            keys = keys.transpose(1, 2)
            values = None if values is None else values.transpose(1, 2)
        call = self._describe(layer, keys, values)
        call.page_size, call.pages = cache.page_size, keys.shape[0]
        call.causal = layer.group.causal
        return call

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
        call = self._describe(layer, k.unsqueeze(0), v.unsqueeze(0))
        call.cu_seqlens_k, call.pages = cu_seqlens_k.data_ptr(), k.shape[0]
        call.causal = causal
        call.scale, call.v_scale = layer.scale, 1.0
        return self._call(call, q, layer, cu_seqlens_q, out, return_lse)

    def _describe(self, layer: AttentionLayer, k: Tensor, v: Tensor | None) -> Attention:
        """Return a call with what it says of a layer, and of its keys and values [A, B, Hkv, D]."""
        if layer not in self._honoured:
            self._honour(layer)
        self._refuse(layer, "k", k, (*k.shape[:2], layer.num_kv_heads, layer.head_dim), TYPES)
        call = Attention()
        call.k, (call.k_page, call.k_token, call.k_head, _) = _dense(k), k.stride()
        if v is not None:
            shape = (*k.shape[:2], layer.num_kv_heads, layer.v_head_dim)
            self._refuse(layer, "v", v, shape, (k.dtype,))
            call.v, (call.v_page, call.v_token, call.v_head, _) = _dense(v), v.stride()
        call.kv_type = TYPES[k.dtype]
        call.q_heads, call.kv_heads = layer.num_q_heads, layer.num_kv_heads
        call.head_dim, call.v_head_dim = layer.head_dim, layer.v_head_dim
        call.window = layer.sliding_window or 0
        call.logit_cap = layer.logit_cap or 0.0
        return call

    def _call(
        self,
        call: Attention,
        q: Tensor,
        layer: AttentionLayer,
        cu_seqlens_q: Tensor,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        tokens, heads = q.shape[0], layer.num_q_heads
        self._refuse(layer, "q", q, (tokens, heads, layer.head_dim), PLAIN)
        if out is not None:
            self._refuse(layer, "out", out, (tokens, heads, layer.v_head_dim), PLAIN)
        sinks = None if layer.sinks is None else layer.sinks.float()
        if sinks is not None:
            self._refuse(layer, "sinks", sinks, (heads,), PLAIN)
            call.sinks = sinks.data_ptr()
        filled = out
        if out is None or out.stride(-1) != 1:
            filled = q.new_empty(tokens, heads, layer.v_head_dim)
        assert filled is not None
        lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else None
        call.lse = None if lse is None else lse.data_ptr()
        call.q, (call.q_token, call.q_head, _) = _dense(q), q.stride()
        call.out, (call.out_token, call.out_head, _) = filled.data_ptr(), filled.stride()
        call.cu_seqlens_q = cu_seqlens_q.data_ptr()
        call.requests, call.tokens = cu_seqlens_q.shape[0] - 1, tokens
        call.q_type, call.out_type = TYPES[q.dtype], TYPES[filled.dtype]
        call.level, call.parallel = self._level, self._kernels.parallel
        call.threads = torch.get_num_threads()
        self._attend(call)
        if out is not None and filled is not out:
            filled = out.copy_(filled)
        return filled if lse is None else (filled, lse)

    def _refuse(
        self,
        layer: AttentionLayer,
        what: str,
        x: Tensor,
        shape: tuple[int, ...],
        types: Collection[torch.dtype],
    ) -> None:
        """Raise UnsupportedError for a tensor that the kernels would read or write past the end."""
        if x.shape != shape or x.dtype not in types or not x.is_cpu:
            raise UnsupportedError(
                f"{self.config.name}: layer {layer.layer_id} has {what} {list(x.shape)} {x.dtype} "
                f"on {x.device} (expected {list(shape)} in {', '.join(map(str, types))} on cpu)"
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
                    f"{'keys' if call.cu_seqlens_k else 'pages'}, {call.columns} columns of the "
                    "page table; check cu_seqlens, seq_lens and page_table"
                )
            self._local.workspace = torch.empty(needed, dtype=torch.uint8, device="cpu")


def _dense(x: Tensor) -> int:
    """Return the address of x, whose last dimension has to be dense. Raises UnsupportedError."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise UnsupportedError(
            f"intel_amx: a tensor {list(x.shape)} with strides {x.stride()} (its last dimension "
            "has to be dense); call .contiguous() on it"
        )
    return x.data_ptr()
