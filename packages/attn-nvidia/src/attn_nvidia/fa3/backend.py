"""fa3: FlashAttention-3 over the paged cache, one kernel for prefill, decode and verify."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from attn_core import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    ForwardBatch,
    LayerCache,
    LayerGroup,
    Output,
    ScaleTensors,
    align16,
    empty_attention,
    kernel_pages,
    merge_states,
    refuse_call,
    refuse_layer,
    refuse_unplanned,
    refuse_window,
    to_e4m3_saturating,
)
from torch import Tensor

from attn_nvidia.fa3.library import load
from attn_nvidia.fa3.plan import Call, CallGroup, Plan, Planner, Plans, window_of


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """What every call of one layer is given; sinks go with the last call of a plan."""

    kind: CallGroup
    arguments: dict[str, Any]
    sinks: Tensor | None

    @property
    def with_sinks(self) -> dict[str, Any]:
        """The arguments of that call. A copy made once would miss weights loaded afterwards."""
        if self.sinks is None:
            return self.arguments
        return {**self.arguments, "sinks": self.sinks.to(torch.bfloat16)}  # all that it takes


class FA3(AttentionBackend):
    """Every pass over the cache is one call of flash_attn_with_kvcache, but for trees of drafts.

    A tree is a pass over the prefix, which all drafts see, merged with one in which every draft is
    a request of its own with a page table of what it sees. With a window the second does it all.
    """

    planner: ClassVar[type[Planner]] = Planner

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        library = load(config.row.requires[0])
        self._paged, self._ragged = library.paged, library.ragged
        self._planner = self.planner(config, library)
        self._fp8 = config.kv_cache_dtype == "fp8_e4m3"
        self._layers = {layer: self._prepare(layer) for layer in config.layers}
        self._kinds = {x.kind for x in self._layers.values() if self._in_cache(x.kind.layer)}
        self._scales = ScaleTensors(config.device)

    def _in_cache(self, group: LayerGroup) -> bool:
        return True

    def _prepare(self, layer: AttentionLayer) -> _Layer:
        refuse_layer(self.config, layer)
        refuse_window(self.config.name, layer)
        capped = layer.logit_cap is not None
        arguments = {"softmax_scale": layer.scale, "softcap": layer.logit_cap or 0.0}
        return _Layer(CallGroup(layer.group, capped), arguments, layer.sinks)

    def init_forward_metadata(self, batch: ForwardBatch) -> Plans:
        """Plan every kind of layer: the tiles of a pass, and what the drafts of a tree see."""
        kinds = [k for k in self._kinds if k.layer.view in batch.views] if batch.num_tokens else []
        return {kind: self._planner.plan(kind, batch) for kind in kinds}

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch, metadata: Plans) -> None:
        """Derive again what depends on the lengths, into the tensors of the capture."""
        for kind, plan in metadata.items():
            for captured, new_plan in zip(plan, self._planner.plan(kind, batch, plan), strict=True):
                for name, value in new_plan.arguments.items():
                    target = captured.arguments[name]
                    if isinstance(value, Tensor) and value.data_ptr() != target.data_ptr():
                        target.copy_(value)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: Plans,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the cache, which holds the new tokens already; k and v are not read."""
        if topk_indices is not None:
            refuse_call(self.config, return_lse=return_lse, sparse=True)
        prepared = self._layers.get(layer) or self._adopt(layer)
        plan = metadata.get(prepared.kind)
        if plan is None:
            if not batch.num_tokens:
                return empty_attention(q, layer, out, return_lse)
            refuse_unplanned(layer, metadata)
        if len(plan) > 1:
            return self._merged(plan, prepared, q, layer, cache, out, return_lse)
        result = self._run(plan[0], prepared.with_sinks, q, layer, cache, out, return_lse)
        return _returned(result, layer, out, return_lse)

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
        prepared = self._layers.get(layer) or self._adopt(layer)
        refuse_window(self.config.name, layer, causal=causal)
        if not k.shape[0]:  # the library would give +inf as the log-sum-exp
            return empty_attention(q, layer, out, return_lse)
        result = self._ragged(
            align16(q),
            align16(k),
            align16(v),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            causal=causal,
            window_size=window_of(layer.sliding_window),
            out=out,
            return_softmax_lse=return_lse,
            **prepared.with_sinks,
        )
        return _returned(result, layer, out, return_lse)

    def _adopt(self, layer: AttentionLayer) -> _Layer:
        """Prepare a layer that the config does not list; one of a planned kind runs as well."""
        self._layers[layer] = prepared = self._prepare(layer)
        return prepared

    def _run(
        self,
        call: Call,
        arguments: dict[str, Any],
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        out: Tensor | None,
        return_lse: bool,
    ) -> Any:
        k, v = cache.k, cache.v
        if call.tokens and v is not None:
            k, v = kernel_pages(k, 1), kernel_pages(v, 1)
        if self._fp8:
            q, arguments = self._quantised(q, arguments, call, layer, cache)
        return self._paged(
            align16(q), k, v, out=out, return_softmax_lse=return_lse, **arguments, **call.arguments
        )

    def _quantised(
        self,
        q: Tensor,
        arguments: dict[str, Any],
        call: Call,
        layer: AttentionLayer,
        cache: LayerCache,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Round the queries to the cache's e4m3, since the kernel multiplies like with like."""
        shape = (call.arguments["cache_seqlens"].shape[0], layer.num_kv_heads)
        descales = {
            "k_descale": self._scales.of(cache.k_scale).expand(shape),
            "v_descale": self._scales.of(cache.v_scale).expand(shape),
        }
        return to_e4m3_saturating(q), {**arguments, **descales}

    def _merged(
        self,
        plan: Plan,
        prepared: _Layer,
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        parts = q.new_empty(len(plan), q.shape[0], layer.num_q_heads, layer.v_head_dim)
        lses = []
        for part, call in zip(parts, plan, strict=True):
            arguments = prepared.with_sinks if call.last else prepared.arguments
            lse = self._run(call, arguments, q, layer, cache, part, True)[1].T
            lses.append(_with_sinks(lse, layer.sinks) if call.last else lse)
        states = torch.stack(lses)
        if q.is_cuda:
            kernel = importlib.import_module("attn_core.ops.triton.merge")
            total = q.new_empty(states.shape[1:], dtype=torch.float32)
            out = torch.empty_like(parts[0]) if out is None else out
            kernel.merge_states(parts, states, into=(out, total))
        else:
            merged, total = merge_states(parts, states)
            out = merged if out is None else out.copy_(merged)
        return (out, total) if return_lse else out


def _returned(result: Any, layer: AttentionLayer, out: Tensor | None, return_lse: bool) -> Output:
    """Return out and LSE [T, Hq] of one call; the library leaves -inf where no key is seen."""
    if not return_lse:
        filled: Tensor = result
        return filled if out is None else out
    return result[0] if out is None else out, _with_sinks(result[1].T, layer.sinks)


def _with_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the LSE [T, Hq] of a call that was given the sinks [Hq], or None.

    Its kernels read no sink for a tile without keys. Any other LSE is at least the sink, and the
    sink itself where it outweighs the best key by e^88: there their sum is infinite, of which a
    merge of splits makes NaN.
    """
    if sinks is None:
        return lse
    sinks = sinks.float()
    return torch.where(lse < torch.inf, torch.maximum(lse, sinks), sinks)
