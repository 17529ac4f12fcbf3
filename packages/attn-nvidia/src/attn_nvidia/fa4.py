"""fa4: FlashAttention-4 over the paged cache, one kernel for prefill, decode and chains."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from attn_core import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    CacheView,
    ForwardBatch,
    LayerCache,
    LayerGroup,
    Output,
    align16,
    empty_attention,
    kernel_pages,
    refuse_call,
    refuse_layer,
    refuse_mode,
    refuse_unplanned,
    refuse_window,
    split_pages,
)
from torch import Tensor

from attn_nvidia.common.jit_log import building
from attn_nvidia.common.tensors import request_of_token

# Its compiler is not known to bear two threads, and when it compiles is the library's decision.
_ONE_AT_A_TIME = threading.Lock()

Variant = tuple[LayerGroup, bool, bool, bool]  # paged, causal, with log-sum-exp

_LATENT = 512  # the layers of an MLA model that lie in its cache; others are ragged


class Plan(NamedTuple):
    """What all layers of a class are called with; rows_without_keys: bool [T, 1], by query.

    The Hopper kernel of 4.0.0b18 gives NaN for these. None: by causal order each sees itself.
    """

    arguments: dict[str, Any]
    rows_without_keys: Tensor | None


Plans = Mapping[LayerGroup, Plan]


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """What every call of one layer is given."""

    group: LayerGroup
    arguments: dict[str, Any]
    sinks: Tensor | None


class FA4(AttentionBackend):
    """Every pass is one call of the forward function beneath flash_attn_varlen_func.

    The public function takes no `out` and prepares a backward pass. Its kernels are compiled on
    first use: per head dims, mask, group size, soft cap, and with or without a log-sum-exp.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        # neither has stubs; `flash_attn` may be another distribution's package as well
        interface: Any = importlib.import_module("flash_attn.cute.interface")
        self._mods: Any = importlib.import_module("flash_attn.cute.utils")
        self._attend = interface._flash_attn_fwd
        self._latent = config.row.kind == "mla"
        absorbed = config.row.absorbed
        sizes = [p for p in config.row.page_sizes if config.page_size % p == 0]
        self._page = max(sizes, default=config.page_size)
        self._layers = {layer: self._prepare(layer) for layer in config.layers}
        self._classes = {
            x.group
            for layer, x in self._layers.items()
            if absorbed and (not self._latent or layer.v_head_dim == _LATENT)
        }
        self._built: set[Variant] = set()

    def _prepare(self, layer: AttentionLayer) -> _Layer:
        refuse_layer(self.config, layer)
        refuse_window(self.config.name, layer)
        arguments: dict[str, Any] = {"softmax_scale": layer.scale}
        if layer.logit_cap is not None:
            # what `softcap` does, made once: the library would make and hash it in every call
            arguments["score_mod"] = self._mods.create_softcap_scoremod(layer.logit_cap)
        if layer.sliding_window is not None:
            arguments["window_size_left"] = layer.sliding_window - 1
        return _Layer(layer.group, arguments, layer.sinks)

    def init_forward_metadata(self, batch: ForwardBatch) -> Plans:
        """Collect what the layers of a class share; large pages are named as the kernel's."""
        tables: dict[str, Tensor] = {}
        plans: dict[LayerGroup, Plan] = {}
        for group in self._classes:
            view = batch.views.get(group.view)
            if view is None:
                continue
            if group.view not in tables:
                tables[group.view] = split_pages(view.page_table, self.config.page_size, self._page)
            table = tables[group.view]
            arguments = {
                "cu_seqlens_q": _dense(batch.cu_seqlens_q),
                "seqused_k": _dense(view.seq_lens),
                "page_table": table,
                "max_seqlen_q": batch.max_q_len,
                "max_seqlen_k": table.shape[1] * self._page,
                "causal": group.causal,
            }
            plans[group] = Plan(arguments, None if group.causal else _keyless(batch, view))
        return plans

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch, metadata: Plans) -> None:
        """Split the pages again, where they are not the kernel's; see who has keys."""
        for group, plan in metadata.items():
            view = batch.views[group.view]
            if self._page != self.config.page_size:
                pages = split_pages(view.page_table, self.config.page_size, self._page)
                plan.arguments["page_table"].copy_(pages)
            if plan.rows_without_keys is not None:
                plan.rows_without_keys.copy_(_keyless(batch, view))

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
        plan = metadata.get(prepared.group)
        if plan is None:
            refuse_mode(self.config, batch.forward_mode)
            refuse_unplanned(layer, metadata)
        keys, values = cache.k, cache.v
        if self._page != self.config.page_size:
            keys = kernel_pages(keys, self._page)
            if values is not None:
                values = kernel_pages(values, self._page)
        arguments = plan.arguments
        if not self._latent:
            output = self._call(
                prepared, True, align16(q), keys, values, out, return_lse, arguments
            )
            keyless = plan.rows_without_keys
            return output if keyless is None else _empty_rows(output, keyless, layer)
        # K is the rope part, the latent is V and joins the logits: four views, no copy
        cut = (layer.v_head_dim, layer.head_dim - layer.v_head_dim)
        (q_latent, q_rope), (latent, rope) = (
            x.split_with_sizes(cut, -1) for x in (align16(q), keys)
        )
        return self._call(
            prepared, True, q_rope, rope, latent, out, return_lse, arguments, qv=q_latent
        )

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
        if not k.shape[0]:
            return empty_attention(q, layer, out, return_lse)
        plan = {
            "cu_seqlens_q": _dense(cu_seqlens_q),
            "cu_seqlens_k": _dense(cu_seqlens_k),
            "max_seqlen_q": max_q,
            "max_seqlen_k": max_k,
            "causal": causal,
        }
        output = self._call(
            prepared, False, align16(q), align16(k), align16(v), out, return_lse, plan
        )
        if layer.sinks is None:
            return output
        keys = cu_seqlens_k.diff()
        rows_without_keys = _rows_without_keys(keys, cu_seqlens_q, q.shape[0], causal=causal)
        return _empty_rows(output, rows_without_keys, layer)  # exp(sink + inf)

    def _adopt(self, layer: AttentionLayer) -> _Layer:
        """Prepare a layer that the config does not list; one of a planned class runs as well."""
        self._layers[layer] = prepared = self._prepare(layer)
        return prepared

    def _call(
        self,
        prepared: _Layer,
        paged: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        out: Tensor | None,
        return_lse: bool,
        plan: dict[str, Any],
        **kwargs: Tensor,
    ) -> Output:
        variant = (prepared.group, paged, plan["causal"], return_lse)
        attend = self._attend if variant in self._built else partial(self._compile, variant)
        arguments = {**prepared.arguments, **plan, **kwargs}
        if prepared.sinks is not None:  # a copy made once would miss weights loaded afterwards
            arguments["learnable_sink"] = prepared.sinks.to(torch.bfloat16)  # all that it takes
        with _ONE_AT_A_TIME:
            result, lse = attend(q, k, v, out=out, return_lse=return_lse, **arguments)
        if not return_lse:
            return result if out is None else out
        lse = lse if kwargs else lse.T  # beside qv the library lays heads out innermost
        if prepared.sinks is not None:  # its sum is infinite where the sink is e^88 the best key
            lse = torch.where(lse == torch.inf, prepared.sinks.float(), lse)
        return result if out is None else out, lse

    def _compile(self, variant: Variant, *tensors: Tensor | None, **arguments: Any) -> Any:
        """Call for the first time, which compiles unless another backend has done it."""
        with building(f"a kernel of fa4 for {variant}"):
            result = self._attend(*tensors, **arguments)
        self._built.add(variant)
        return result


def _dense(lengths: Tensor) -> Tensor:
    """View contiguous lengths with the stride 1, which the library asks for at size 1 too."""
    return lengths.as_strided(lengths.shape, (1,))


def _keyless(batch: ForwardBatch, view: CacheView) -> Tensor:
    return _rows_without_keys(view.seq_lens, batch.cu_seqlens_q, batch.num_tokens, causal=False)


def _rows_without_keys(keys: Tensor, cu_seqlens_q: Tensor, tokens: int, *, causal: bool) -> Tensor:
    """Return bool [T, 1]: which queries see none of their request's keys, int32 [B]; never syncs.

    In causal order the last query sees the last key. Nothing is indexed: that asks for a device,
    and kernels are compiled for devices that are not here.
    """
    request = request_of_token(cu_seqlens_q, tokens)
    if not causal:
        return (keys == 0).index_select(0, request).view(-1, 1)
    # the first token of a request that sees a key
    first = cu_seqlens_q.narrow(0, 1, keys.shape[0]) - keys
    token = torch.arange(tokens, dtype=torch.int32, device=keys.device)
    return (token < first.index_select(0, request)).view(-1, 1)


def _empty_rows(output: Output, rows_without_keys: Tensor, layer: AttentionLayer) -> Output:
    """Write what no keys give, zeros and the sink or -inf, where the kernel gave NaN."""
    out, lse = output if isinstance(output, tuple) else (output, None)
    out.masked_fill_(rows_without_keys.unsqueeze(-1), 0)
    if lse is None:
        return out
    if layer.sinks is None:
        return out, lse.masked_fill_(rows_without_keys, -torch.inf)
    return out, torch.where(rows_without_keys, layer.sinks.float(), lse)
