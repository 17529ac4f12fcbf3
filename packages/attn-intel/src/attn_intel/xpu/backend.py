"""intel_xpu: flash_attn_varlen_func over the paged cache and without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from attn_core import (
    DECODE_MODES,
    EVEN_MODES,
    TORCH_DTYPES,
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    CacheView,
    ForwardBatch,
    LayerCache,
    Output,
    ScaleTensors,
    UnsupportedError,
    empty_attention,
    refuse_call,
    refuse_layer,
    refuse_unplanned,
    refuse_window,
)
from torch import Tensor

from attn_intel.tensors import aligned, alone, loads, refuse_pages, without_keys
from attn_intel.xpu.library import load

NO_WINDOW: Final = (-1, -1)
NEVER_CAUSAL: Final = frozenset({80, 96})  # head dims of encoders alone, where there is no cache


def window_of(window: int | None) -> tuple[int, int]:
    """Return a window of W tokens as the library has it: how many before a token are seen."""
    return NO_WINDOW if window is None else (window - 1, 0)


def longest_query(batch: ForwardBatch, deterministic: bool) -> int:
    """Return max_seqlen_q, by which the library chooses a kernel: decode's or prefill's.

    It takes q.shape[0] == B · max_seqlen_q for a pass of even requests, each token of which its
    decode kernel can have alone. The rows of a padded batch may add up to that too: then it gets
    one more than the longest query, which is right for prefill. So it does in deterministic mode,
    where a request has the same kernel in any company.
    """
    longest, mode = batch.max_q_len, batch.forward_mode
    if longest > 1 and batch.num_tokens != batch.batch_size * longest:
        return longest
    if deterministic:
        even = mode in DECODE_MODES
    else:
        even = mode in EVEN_MODES or set(batch.query_lens_host or ()) == {longest}
    return longest if even else longest + 1


@dataclass(frozen=True, eq=False)
class Plan:
    """A pass over one view: the arguments that all of its layers share.

    The library reads the rows of a page table one after the other: `table` is the batch's own, or
    a dense copy of it. blind: of a cross view, which queries have no encoder tokens, bool [T].
    """

    view: CacheView
    table: Tensor
    arguments: dict[str, Any]
    blind: Tensor | None


class IntelXPU(AttentionBackend):
    """Prefill, decode, mixed passes and chains of drafts are one call over the page table.

    It has kernels for the combinations of head dim, group, window and sinks that its rows declare;
    for others the library computes in PyTorch, after it has copied every length to the host.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._attend = load()
        self._dtype = TORCH_DTYPES[config.dtype]  # that of the sinks that the kernels read
        self._fp8 = config.kv_cache_dtype.startswith("fp8")
        self._scales = ScaleTensors(config.device)
        self._views = {layer.view for layer in config.layers}
        self._cross = {layer.view for layer in config.layers if layer.is_cross}
        self._read: dict[int, LayerCache] = {}  # whose pages were found to be readable
        self._arguments = {layer: self._prepare(layer) for layer in config.layers}

    def _prepare(self, layer: AttentionLayer) -> dict[str, Any]:
        refuse_layer(self.config, layer)
        refuse_window(self.config.name, layer)
        return {
            "softmax_scale": layer.scale,
            "causal": layer.group.causal,
            "window_size": window_of(layer.sliding_window),
        }

    def init_forward_metadata(self, batch: ForwardBatch) -> Mapping[str, Plan]:
        """Choose the kernel of this pass; no length is read from the device."""
        if not batch.num_tokens:
            return {}
        return {name: self._plan(batch, name) for name in self._views if name in batch.views}

    def _plan(self, batch: ForwardBatch, name: str) -> Plan:
        view = batch.views[name]
        table = view.page_table.contiguous()
        arguments = {
            "max_seqlen_q": longest_query(batch, self.config.deterministic),
            "cu_seqlens_q": batch.cu_seqlens_q,
            "max_seqlen_k": view.max_seq_len,
            "seqused_k": view.seq_lens,
            "block_table": table,
            "num_splits_kv": 1 if self.config.deterministic else None,  # None: its own choice
            "is_mix_batch": False,  # requests of one token among others take the prefill kernel too
        }
        return Plan(view, table, arguments, self._blind(batch, name))

    def _blind(self, batch: ForwardBatch, name: str) -> Tensor | None:
        if name not in self._cross:
            return None
        lengths = batch.views[name].seq_lens
        return without_keys(batch.cu_seqlens_q, lengths, batch.num_tokens, causal=False)

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Mapping[str, Plan]
    ) -> None:
        """Refill what is not the batch's own."""
        for name, plan in metadata.items():
            if plan.table.data_ptr() != plan.view.page_table.data_ptr():
                plan.table.copy_(plan.view.page_table)
            blind = self._blind(batch, name)
            if plan.blind is not None and blind is not None:
                plan.blind.copy_(blind)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Mapping[str, Plan],
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the cache, which holds the new tokens already; k and v are not read."""
        refuse_call(self.config, return_lse=return_lse, sparse=topk_indices is not None)
        if not (layer.group.causal or self.config.row.cross_attention):
            raise UnsupportedError(
                f"layer {layer.layer_id} attends to a cache without causal order, for which the "
                f"chosen row of {self.config.name} has no kernels; attend without a cache"
            )
        plan = metadata.get(layer.view)
        if plan is None:
            if batch.num_tokens:
                refuse_unplanned(layer, metadata)
            return empty_attention(q, layer, out, return_lse)
        arguments = plan.arguments
        if self._fp8:
            k_scale, v_scale = (self._scales.of(alone(s)) for s in (cache.k_scale, cache.v_scale))
            arguments = arguments | {"k_descale": k_scale, "v_descale": v_scale}
        if self._read.get(layer.layer_id) is not cache:
            refuse_pages(self.config.name, cache)
            self._read[layer.layer_id] = cache
        return self._call(q, cache.k, cache.v, layer, out, return_lse, arguments, plan.blind)

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
        """Attend without a cache; nothing is planned."""
        refuse_call(self.config, return_lse=return_lse)
        refuse_window(self.config.name, layer, causal=causal)
        if not self.config.row.encoder:
            raise UnsupportedError(
                f"layer {layer.layer_id} attends without a cache, for which the chosen row of "
                f"{self.config.name} has no kernels; select with LayerRequirements(encoder=True)"
            )
        if causal and layer.head_dim in NEVER_CAUSAL:
            raise UnsupportedError(
                f"layer {layer.layer_id}: causal attention without a cache at head dim "
                f"{layer.head_dim}, for which the library of {self.config.name} has no kernel; "
                "it has one for causal=False, and causal ones for head dims 64, 128 and 256: "
                "choose another backend for this layer"
            )
        if not (q.shape[0] and k.shape[0]):
            return empty_attention(q, layer, out, return_lse)
        arguments = {
            "max_seqlen_q": max_q,
            "cu_seqlens_q": cu_seqlens_q,
            "max_seqlen_k": max_k,
            "cu_seqlens_k": cu_seqlens_k,
            "causal": causal,
        }
        blind = None
        if cu_seqlens_q is not cu_seqlens_k:  # of self-attention every query sees itself
            blind = without_keys(cu_seqlens_q, cu_seqlens_k.diff(), q.shape[0], causal=causal)
        return self._call(q, aligned(k), aligned(v), layer, out, return_lse, arguments, blind)

    def _call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        out: Tensor | None,
        return_lse: bool,
        arguments: dict[str, Any],
        blind: Tensor | None,
    ) -> Output:
        prepared = self._arguments.get(layer)
        if prepared is None:  # a layer that the config does not list
            self._arguments[layer] = prepared = self._prepare(layer)
        filled = out
        if out is None or not loads(out):
            filled = q.new_empty(*q.shape[:2], layer.v_head_dim)
        # not prepared: a copy would miss weights that are loaded afterwards
        sinks = None if layer.sinks is None else layer.sinks.to(self._dtype)
        result: Any = self._attend(
            aligned(q),
            k,
            v,
            out=filled,
            return_softmax_lse=return_lse,
            s_aux=sinks,
            **prepared | arguments,
        )
        result, lse = result if return_lse else (result, None)
        if blind is not None:
            result.masked_fill_(blind[:, None, None], 0.0)
            if lse is not None:
                lse.masked_fill_(blind, -inf)  # [Hq, T]
        if out is not None and filled is not out:
            result = out.copy_(result)
        return result if lse is None else (result, lse.T)
