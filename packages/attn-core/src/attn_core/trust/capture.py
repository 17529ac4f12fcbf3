"""Take a call out of a running pass: its tensors on the host, and the pages that it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache
from attn_core.runtime.backend import BackendConfig
from attn_core.runtime.batch import CacheView, ForwardBatch
from attn_core.runtime.layer import AttentionLayer
from attn_core.trust.judge import Answer
from attn_core.trust.reproducer import Reproducer, Setting, compacted, seen_from, some_tokens


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `forward`, after new K/V were written."""

    batch: ForwardBatch
    layer: AttentionLayer
    cache: LayerCache
    q: Tensor
    k: Tensor | None
    v: Tensor | None

    @property
    def view(self) -> CacheView:
        return self.batch.views[self.layer.view]

    def query_lens(self) -> list[int]:
        """Return the queries per request; reads them from the device if the host has none."""
        lens = self.batch.query_lens_host
        return self.batch.cu_seqlens_q.diff().tolist() if lens is None else [*lens]

    def seq_lens(self) -> list[int]:
        """Return the keys per request; reads them from the device if the host has none."""
        lens = self.view.seq_lens_host
        return self.view.seq_lens.tolist() if lens is None else [*lens]


def padded(call: Call, request: int) -> bool:
    """Say whether a request is padding: its last token lies in page 0, which no request owns."""
    last = max(call.seq_lens()[request] - 1, 0) // call.cache.page_size
    return call.view.page_table.shape[1] > last and int(call.view.page_table[request, last]) == 0


def nbytes(call: Call, requests: Sequence[int]) -> int:
    """Return how many bytes the tensors of these requests take in a file, at most."""
    lens, queries, size = call.seq_lens(), call.query_lens(), call.cache.page_size
    pages = 1 + sum(-(-lens[b] // size) for b in requests)
    tokens = sum(queries[b] for b in requests)
    per_page = sum(t.nbytes for t, _ in call.cache.parts()) // call.cache.num_pages
    layer, width = call.layer, call.q.dtype.itemsize
    heads = layer.num_q_heads * (layer.head_dim + 2 * layer.v_head_dim)
    new = layer.num_kv_heads * (layer.head_dim + layer.v_head_dim)
    return pages * per_page + tokens * (heads + new) * width + tokens * layer.num_q_heads * 8


def captured(
    config: BackendConfig,
    call: Call,
    answers: Mapping[str, Answer],
    requests: Sequence[int],
    about: Mapping[str, Any],
) -> Reproducer:
    """Return the call of these requests, with what the backends answered."""
    layer, rows = _described(call.layer), list(requests)
    lens, queries = call.seq_lens(), call.query_lens()
    seq_lens_kept, new = [lens[b] for b in rows], [queries[b] for b in rows]
    cache, table = compacted(
        call.cache,
        call.view.page_table[rows],
        seq_lens_kept,
        seen_from=seen_from(layer, new, seq_lens_kept),
    )
    spec = call.batch.spec
    if spec is not None and spec.tree_mask is not None:
        spec = replace(spec, tree_mask=spec.tree_mask[rows].cpu().contiguous())
    full = Reproducer(
        setting=Setting.of(config),
        layer=layer,
        others=_others(config, layer),
        cache=cache,
        mode=call.batch.forward_mode,
        query_lens=tuple(new),
        seq_lens=tuple(seq_lens_kept),
        page_table=table,
        q=call.q,
        k=call.k,
        v=call.v,
        spec=spec,
        lse=any(a.lse is not None for a in answers.values()),
        host_lengths=call.batch.query_lens_host is not None,
        recorded={name: (a.out, a.lse) for name, a in answers.items()},
        about=about,
    )
    starts = torch.tensor([0, *queries], device="cpu").cumsum(0).tolist()
    tokens = torch.cat([torch.arange(starts[b], starts[b + 1], device="cpu") for b in rows])
    parts = some_tokens(full, tokens.to(call.q.device))
    recorded = {name: _host(x) for name, x in parts.pop("recorded").items()}
    q, k, v = _host((parts["q"], parts["k"], parts["v"]))
    return replace(full, recorded=recorded, q=q, k=k, v=v)


def _host(tensors: tuple[Any, ...]) -> Any:
    return tuple(None if x is None else x.detach().cpu().contiguous() for x in tensors)


def _described(layer: AttentionLayer) -> AttentionLayer:
    return layer if layer.sinks is None else replace(layer, sinks=layer.sinks.detach().cpu())


def _others(config: BackendConfig, layer: AttentionLayer) -> tuple[AttentionLayer, ...]:
    """Return a layer of each other group of this view, without sinks: no plan reads them."""
    groups = {x.group: x for x in config.layers if x.view == layer.view}
    groups.pop(layer.group, None)
    return tuple(replace(x, sinks=None) for x in groups.values())
