"""ipex: intel-extension-for-pytorch's paged attention, one operator per layer and pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from attn_core import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    BatchError,
    ForwardBatch,
    LayerCache,
    Output,
    UnsupportedError,
    empty_attention,
    refuse_call,
    refuse_layer,
    refuse_unplanned,
    refuse_window,
)
from torch import Tensor

from attn_intel.ipex.library import load
from attn_intel.tensors import without_keys

UNCAPPED: Final = -1.0
UNWINDOWED: Final = -1


@dataclass(frozen=True, eq=False)
class Plan:
    """A pass over one view: what its layers share.

    table: int32 [B, max_pages], dense. seq_lens: int32 [B], and cu_seqlens_k, int32 [B + 1], their
    sums. longest: the most keys of a request. last_page: the largest page that is read, -1 for
    none. blind: which queries see no key or belong to no request, bool [T], None for none of them.
    single: each request has one query.
    """

    table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q_len: int
    longest: int
    last_page: int
    blind: Tensor | None
    single: bool


class IPEX(AttentionBackend):
    """Decode without window and soft cap is one operator of the library, all else the other.

    The library checks no page and no length, so that a plan does. Its operator for one query per
    request is used neither with a window, where it loses requests whose scores are all negative,
    nor with a soft cap, where it raises an error for four requests that begin with the same page.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._operators = load()
        self._store = config.kv_cache_dtype if config.kv_cache_dtype == "fp8_e5m2" else "auto"
        self._causal = {layer.view: layer.group.causal for layer in config.layers}
        self._heads: dict[AttentionLayer, Tensor] = {}
        for layer in config.layers:
            self._prepare(layer)

    def _prepare(self, layer: AttentionLayer) -> Tensor:
        """Return the KV head of each query head, int32 [Hq], of a layer that the row supports."""
        refuse_layer(self.config, layer)
        refuse_window(self.config.name, layer)
        heads = torch.arange(layer.num_kv_heads, dtype=torch.int32, device=self.config.device)
        self._heads[layer] = heads = heads.repeat_interleave(layer.group.num_queries_per_kv)
        return heads

    def init_forward_metadata(self, batch: ForwardBatch) -> Mapping[str, Plan]:
        """Check the pages and lengths of each view. Raises BatchError."""
        if not batch.num_tokens:
            return {}
        return {name: self._plan(batch, name) for name in self._causal if name in batch.views}

    def _plan(self, batch: ForwardBatch, name: str) -> Plan:
        view, starts, page_size = batch.views[name], batch.cu_seqlens_q, self.config.page_size
        table, lengths = view.page_table.contiguous(), view.seq_lens
        low, longest = (int(x) for x in lengths.aminmax()) if lengths.numel() else (0, 0)
        if low < 0 or longest > table.shape[1] * page_size:
            raise BatchError(
                f"view {name!r} has lengths from {low} to {longest}, its page table "
                f"{table.shape[1]} columns of {page_size} tokens; check seq_lens and page_table"
            )
        columns = torch.arange(0, table.shape[1] * page_size, page_size, dtype=torch.int32)
        read = table[columns < lengths[:, None]]
        first, last = (int(x) for x in read.aminmax()) if read.numel() else (0, -1)
        if first < 0:
            raise BatchError(f"view {name!r} has page {first}; its requests read pages from 0 on")
        new = starts.diff()
        blind = without_keys(starts, lengths, batch.num_tokens, causal=self._causal[name])
        blind[int(starts[-1]) :] = True
        return Plan(
            table=table,
            seq_lens=lengths,
            cu_seqlens_q=starts,
            cu_seqlens_k=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            max_q_len=int(new.max()),
            longest=longest,
            last_page=last,
            blind=blind if blind.any() else None,
            single=batch.num_tokens == batch.batch_size and bool((new == 1).all()),
        )

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
        plan = metadata.get(layer.view)
        if plan is None:
            if batch.num_tokens:
                refuse_unplanned(layer, metadata)
            return empty_attention(q, layer, out, return_lse)
        heads = self._heads.get(layer)
        heads = self._prepare(layer) if heads is None else heads
        if not plan.longest or not plan.max_q_len:
            return empty_attention(q, layer, out, return_lse)
        self._refuse_cache(layer, cache, plan)
        direct = out is not None and out.stride(-1) == 1 and out.dtype == q.dtype
        filled = out if out is not None and direct else q.new_empty(*q.shape[:2], layer.v_head_dim)
        if layer.sliding_window == 1:  # which the library takes for no window
            self._own_values(filled, layer, cache, plan)
        else:
            self._attend(filled, q, layer, cache, plan, heads)
        if (v_scale := float(cache.v_scale)) != 1:
            filled.mul_(v_scale)
        if plan.blind is not None:
            filled.masked_fill_(plan.blind[:, None, None], 0)
        return filled if out is None or out is filled else out.copy_(filled)

    def _attend(
        self,
        out: Tensor,
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        plan: Plan,
        heads: Tensor,
    ) -> None:
        q = q.contiguous()  # the heads of a group are read one after the other
        scale = layer.scale * float(cache.k_scale)
        window, cap = layer.sliding_window, layer.logit_cap or UNCAPPED
        windowed = window is not None and window < plan.longest
        if plan.single and not windowed and cap == UNCAPPED:
            self._operators.decode(
                *(out, q, cache.k, cache.v, heads, scale, plan.table, plan.seq_lens),
                *(cache.page_size, plan.longest, None),
                # any other value lets the library take requests that begin with the same page for
                # beams of one length, by a kernel that then refuses them for lack of a window
                plan.longest,
                *(1.0, 1.0, UNCAPPED),
            )
            return
        left = window - 1 if windowed and window is not None else UNWINDOWED
        self._operators.prefill(
            *(out, q, cache.k, cache.v, plan.cu_seqlens_q, plan.cu_seqlens_k),
            *(plan.max_q_len, plan.longest, scale, layer.group.causal, plan.table, None),
            *(left, UNWINDOWED, self._store, 1.0, 1.0, cap),
        )

    def _own_values(
        self, out: Tensor, layer: AttentionLayer, cache: LayerCache, plan: Plan
    ) -> None:
        """Fill out [T, Hq, Dv] with the value of each query's own token, all that it sees."""
        tokens = torch.arange(out.shape[0], dtype=torch.int32)
        request = torch.searchsorted(plan.cu_seqlens_q[1:], tokens, right=True)
        request.clamp_(max=plan.seq_lens.shape[0] - 1)
        position = plan.seq_lens[request] - (plan.cu_seqlens_q[request + 1] - tokens)
        position.clamp_(min=0)  # of blind queries
        page = plan.table[
            request, (position // cache.page_size).clamp_(max=plan.table.shape[1] - 1)
        ]
        assert cache.v is not None
        values = cache.v[page, :, position % cache.page_size].to(out.dtype)
        out.copy_(values.repeat_interleave(layer.group.num_queries_per_kv, 1))

    def _refuse_cache(self, layer: AttentionLayer, cache: LayerCache, plan: Plan) -> None:
        """Raise an error for pages that the library would read elsewhere than they lie."""
        k, v = cache.k, cache.v
        assert v is not None
        if plan.last_page >= k.shape[0]:
            raise BatchError(
                f"layer {layer.layer_id}: a request reads page {plan.last_page}, the pool has "
                f"pages 0 to {k.shape[0] - 1}; check page_table and seq_lens"
            )
        block, strides = (self.config.page_size, layer.head_dim), k.stride()
        dense = block[0] == 1 or strides[2] == layer.head_dim  # the stride of one token is any
        dense = dense and strides[3] == 1 and v.stride() == strides
        if not dense or k.shape != v.shape or k.shape[1:] != (layer.num_kv_heads, *block):
            raise UnsupportedError(
                f"layer {layer.layer_id}: pool pages {list(k.shape)} with strides {strides} of K, "
                f"{list(v.shape)} with {v.stride()} of V: {self.config.name} reads dense blocks "
                f"{list(block)} of {layer.num_kv_heads} KV heads, K and V alike; create the pool "
                "in layout HND with a tensor for each of K and V, as KVPool does"
            )
