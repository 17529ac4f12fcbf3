"""One attention call with all that it reads, as plain data that another machine can run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache
from attn_core.runtime.backend import BackendConfig
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.graphs import without_host_lengths
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.kinds import Kind

LIMITS = ("max_bs", "max_num_tokens", "max_seq_len", "topk", "num_draft_tokens")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a backend is created with, beside its layers: the fields of BackendConfig by name."""

    kind: Kind
    dtype: str
    kv_cache_dtype: str
    deterministic: bool = False
    shared_prefix: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)  # of LIMITS; 0 = not known

    @classmethod
    def of(cls, config: BackendConfig) -> Setting:
        """Return the setting of a backend that runs."""
        return cls(
            kind=config.row.kind,
            dtype=config.dtype,
            kv_cache_dtype=config.kv_cache_dtype,
            deterministic=config.deterministic,
            shared_prefix=config.shared_prefix,
            limits={name: getattr(config, name) for name in LIMITS},
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Reproducer:
    """A call of `forward` on the host: B requests, T queries, one layer and the pages they read.

    others: layers of other groups that the backend planned with this one.
    cache: the pages alone that requests read, numbered anew, behind an empty page 0. New K/V are
    written already.
    page_table: int32 [B, M]. seq_lens: KV lengths, of the layer's view.
    q [T, Hq, D]; k, v: the new tokens, or None.
    lse: the log-sum-exp was asked for. host_lengths: the batch has its lengths on the host.
    recorded: backend → (out [T, Hq, Dv], LSE float32 [T, Hq] or None), where and when it was found.
    about: what people want to know of where it comes from; nothing is computed from it.
    """

    setting: Setting
    layer: AttentionLayer
    others: tuple[AttentionLayer, ...]
    cache: LayerCache
    mode: ForwardMode
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    page_table: Tensor
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    spec: SpecInfo | None
    lse: bool
    host_lengths: bool
    recorded: Mapping[str, tuple[Tensor, Tensor | None]]
    about: Mapping[str, Any] = field(default_factory=dict)

    def batch(self, device: torch.device) -> ForwardBatch:
        """Build the pass on a device. Nothing is written: its views have no slots."""
        table, view = self.page_table.to(device), self.layer.view
        spec = self.spec
        if spec is not None and spec.tree_mask is not None:
            spec = replace(spec, tree_mask=spec.tree_mask.to(device))
        full_view = CacheView.build(
            page_table=table,
            page_size=self.cache.page_size,
            seq_lens=self.seq_lens,
            new_lens=self.query_lens if not self.layer.is_cross else [0] * len(self.seq_lens),
            writes=False,
        )
        full = self.query_lens if self.layer.is_cross else self.seq_lens
        width = table.shape[1] + max(self.query_lens, default=0)
        batch = ForwardBatch.build(
            self.mode,
            query_lens=self.query_lens,
            seq_lens=full,
            page_table=table if view == "full" else table.new_zeros(len(full), width),
            page_size=self.cache.page_size,
            spec=spec,
            views={} if view == "full" else {view: full_view},
            writes=False,
        )
        return batch if self.host_lengths else without_host_lengths(batch)

    @property
    def rows(self) -> tuple[slice, ...]:
        """The query tokens of each request."""
        ends = [0]
        for n in self.query_lens:
            ends.append(ends[-1] + n)
        return tuple(slice(a, b) for a, b in pairwise(ends))

    def visible(self, request: int) -> list[Tensor] | None:
        """List the keys that each query of a request sees, where a mask of drafts says it.

        The drafts' places are the prefix and the drafts that they see; a window counts them.
        """
        mask = None if self.spec is None else self.spec.tree_mask
        if mask is None or self.mode is not ForwardMode.TARGET_VERIFY:
            return None
        visible_drafts, prefix = mask[request], self.seq_lens[request] - self.query_lens[request]
        place = torch.cat([torch.arange(prefix, device="cpu"), prefix + visible_drafts.sum(-1) - 1])
        window, result = self.layer.sliding_window, []
        for i, row in enumerate(visible_drafts):
            keys = torch.cat([torch.ones(prefix, dtype=torch.bool, device="cpu"), row])
            if window is not None:
                keys &= place > place[prefix + i] - window
            result.append(keys.nonzero().flatten())
        return result


def compacted(
    cache: LayerCache,
    page_table: Tensor,
    seq_lens: Sequence[int],
    *,
    seen_from: Sequence[int] | None = None,
) -> tuple[LayerCache, Tensor]:
    """Keep the pages that hold tokens of these requests, on the host, in the order of their ids.

    page_table: int32 [B, M]. seen_from: per request the first token that a query sees. Page 0 is
    empty, and all entries of the table that are not read name it.
    """
    size, table = cache.page_size, page_table.cpu().long()
    ends = [-(-s // size) for s in seq_lens]
    starts = [first // size for first in seen_from or [0] * len(ends)]
    column = torch.arange(max(ends, default=0), device="cpu")
    valid = (column >= torch.tensor(starts, device="cpu")[:, None]) & (
        column < torch.tensor(ends, device="cpu")[:, None]
    )
    table = table[:, : len(column)] * valid
    read = torch.cat([table.new_zeros(1), table.flatten()])
    used_pages, numbers = torch.unique(read, return_inverse=True)
    pages = used_pages.to(cache.k.device)

    def taken(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        raw = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
        copied = raw[pages].cpu().contiguous()
        copied[0] = 0
        return copied.view(x.dtype)

    k = taken(cache.k)
    assert k is not None  # only V and scales may be absent
    blocks = cache.block_scales
    k_blocks = None if blocks is None else taken(blocks[0])
    compact_cache = LayerCache(
        k=k,
        v=taken(cache.v),
        k_scale=_number(cache.k_scale),
        v_scale=_number(cache.v_scale),
        block_scales=None if blocks is None or k_blocks is None else (k_blocks, taken(blocks[1])),
        layout=cache.layout,
    )
    return compact_cache, numbers[1:].view(table.shape).int()


def _number(scale: float | Tensor) -> float | Tensor:
    return scale.detach().cpu().clone() if isinstance(scale, Tensor) else scale


def seen_from(
    layer: AttentionLayer, query_lens: Sequence[int], seq_lens: Sequence[int]
) -> list[int]:
    """Return per request the first token that a query sees, with drafts at the least place."""
    window = layer.sliding_window
    if window is None or layer.is_cross:
        return [0] * len(seq_lens)
    pairs = zip(query_lens, seq_lens, strict=True)
    return [max(0, s - n - window + 1) for n, s in pairs]


def some_requests(r: Reproducer, requests: Sequence[int]) -> Reproducer:
    """Return the call with these requests alone, in this order, and the pages that they read."""
    tokens = torch.cat(
        [torch.arange(s.start, s.stop, device="cpu") for s in (r.rows[b] for b in requests)]
    )
    return repaged(
        replace(
            r,
            query_lens=tuple(r.query_lens[b] for b in requests),
            seq_lens=tuple(r.seq_lens[b] for b in requests),
            page_table=r.page_table[list(requests)],
            spec=_spec(r.spec, requests),
            **some_tokens(r, tokens),
        )
    )


def _spec(spec: SpecInfo | None, requests: Sequence[int]) -> SpecInfo | None:
    if spec is None or spec.tree_mask is None:
        return spec
    return replace(spec, tree_mask=spec.tree_mask[list(requests)].contiguous())


def some_tokens(r: Reproducer, tokens: Tensor) -> dict[str, Any]:
    """Return the fields of a reproducer that have a row per query, with these rows alone."""
    new = not r.layer.is_cross
    return {
        "q": r.q[tokens],
        "k": r.k[tokens] if r.k is not None and new else r.k if new else None,
        "v": r.v[tokens] if r.v is not None and new else r.v if new else None,
        "recorded": {
            name: (out[tokens], None if lse is None else lse[tokens])
            for name, (out, lse) in r.recorded.items()
        },
    }


def repaged(r: Reproducer) -> Reproducer:
    """Return the call without the pages that nothing reads any more."""
    first = seen_from(r.layer, r.query_lens, r.seq_lens)
    cache, table = compacted(r.cache, r.page_table, r.seq_lens, seen_from=first)
    return replace(r, cache=cache, page_table=table)
