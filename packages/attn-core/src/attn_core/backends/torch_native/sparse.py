"""Sparse MLA (DSA) in plain torch: the selection of keys, and attention over it, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_core.backends.plain_precision import plain_precision
from attn_core.backends.torch_native.backend import Plans, TorchNative
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.index import read_index
from attn_core.ops.kv import read_kv
from attn_core.ops.softmax import softmax_lse
from attn_core.runtime.backend import AttentionBackend, BackendConfig, Output
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.contract_checks import refuse_call
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.sparse import every_slot

_MOST_NUMBERS = 1 << 24  # float32 that are formed or gathered at once: 64 MiB


@dataclass(frozen=True, kw_only=True, eq=False)
class SparsePlan:
    """The plan of dense passes, and per request its row, its tokens in the pass and its length."""

    dense: Plans
    requests: tuple[tuple[int, slice, int], ...]


class TorchNativeSparse(AttentionBackend):
    """Sparse MLA: one request after the other is scored, some queries at a time are attended."""

    casts_output = True

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._dense = TorchNative(config)

    def init_forward_metadata(self, batch: ForwardBatch) -> SparsePlan:
        """Plan the pass; without host lengths it asks the device."""
        view = next(iter(batch.views.values()))
        lengths = view.seq_lens_host or view.seq_lens.tolist()
        query_lens, first, requests = (
            batch.query_lens_host or batch.cu_seqlens_q.diff().tolist(),
            0,
            [],
        )
        for row, (new, length) in enumerate(zip(query_lens, lengths, strict=True)):
            requests.append((row, slice(first, first + new), length))
            first += new
        return SparsePlan(dense=self._dense.init_forward_metadata(batch), requests=tuple(requests))

    @plain_precision
    def index_topk(
        self,
        q_index: Tensor,
        weights: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: SparsePlan,
    ) -> Tensor:
        """Choose the keys of each query; scores are formed where a query sees more than K keys."""
        topk, table = layer.index_topk, batch.views[layer.view].page_table
        assert topk is not None  # checked by the dispatcher
        chosen = q_index.new_full((q_index.shape[0], topk), -1, dtype=torch.int32)
        for row, tokens, length in metadata.requests:
            if tokens.start == tokens.stop:
                continue
            position = torch.arange(length, device=table.device)
            size = cache.page_size
            slots = table[row][position // size].long() * size + position % size
            keys = read_index(cache, slots, torch.float32) if length > topk else None
            for part in _parts(tokens, q_index.shape[1] * length):
                last = torch.arange(part.start, part.stop, device=table.device)
                last += length - tokens.stop  # the position of each query: the last key it sees
                if keys is None:
                    picked = position.expand(len(last), -1)
                else:
                    scores = index_scores(q_index[part], weights[part], keys)
                    picked = best(scores, last, topk)
                visible = picked <= last[:, None]
                chosen[part, : picked.shape[1]] = torch.where(
                    visible, slots[picked.clamp(max=length - 1)], -1
                ).int()
        return chosen

    @plain_precision
    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: SparsePlan,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Attend to the selected slots or, without a selection, to all keys."""
        if topk_indices is None and cache.latent_dim:
            topk_indices = every_slot(layer, batch, cache.page_size)
        if topk_indices is None:
            return self._dense.forward(
                q, k, v, layer, cache, batch, metadata.dense, out=out, return_lse=return_lse
            )
        refuse_call(self.config, return_lse=return_lse, sparse=True)
        tokens, v_dim = q.shape[0], layer.v_head_dim
        out = q.new_empty(tokens, layer.num_q_heads, v_dim) if out is None else out
        lse = torch.empty(tokens, layer.num_q_heads, dtype=torch.float32, device=q.device)
        numbers = topk_indices.shape[1] * q.shape[2]
        if self.config.deterministic:  # a GPU's product of several queries depends on their number
            numbers = _MOST_NUMBERS
        else:
            topk_indices = topk_indices[:, : batch.views[layer.view].max_seq_len]
        for part in _parts(slice(0, tokens), numbers):
            slots = topk_indices[part].long()
            unused = slots < 0
            latents = read_kv(cache, slots.clamp(min=0), torch.float32)[0].squeeze(-2)
            latents.masked_fill_(unused[..., None], 0.0)  # slot 0 may hold NaN, and 0 · NaN is NaN
            scores = (q[part].float() * layer.scale) @ latents.transpose(1, 2)
            scores.masked_fill_(unused[:, None], -torch.inf)
            p, lse[part] = softmax_lse(scores)
            out[part] = (p @ latents[..., :v_dim]).to(out.dtype)
        return (out, lse) if return_lse else out

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
        """Attend without a cache, as MLA does."""
        lengths = (cu_seqlens_q, cu_seqlens_k, max_q, max_k)
        return self._dense.forward_ragged(
            q, k, v, layer, *lengths, causal=causal, out=out, return_lse=return_lse
        )


def index_scores(q_index: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return the scores [n, L] of keys [L, Di] for queries [n, Hi, Di] with weights [n, Hi]."""
    n, heads, dim = q_index.shape
    products = q_index.detach().float().reshape(n * heads, dim) @ keys.T
    torch.fmax(products, products.new_zeros(()), out=products)  # relu, and of a NaN 0
    return (weights[:, None] @ products.view(n, heads, -1)).squeeze(1)


def best(scores: Tensor, last: Tensor, topk: int) -> Tensor:
    """Return the positions [n, K] of the greatest scores [n, L], of equal ones the earliest.

    last: [n], the last position that a query sees. Positions rise in a row; where it sees fewer
    than K keys, positions beyond `last` follow.
    """
    position = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill(position > last[:, None], -torch.inf)
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :topk].sort(-1).values


def _parts(rows: slice, numbers: int) -> Iterator[slice]:
    """Cut rows into parts that form so many numbers a row and not too many at once."""
    step = max(1, _MOST_NUMBERS // max(1, numbers))
    for first in range(rows.start, rows.stop, step):
        yield slice(first, min(first + step, rows.stop))
