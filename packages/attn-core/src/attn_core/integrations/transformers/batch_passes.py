"""The passes of transformers' continuous batching: planned once, attended layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from attn_core.cache.page_table import num_pages_for
from attn_core.errors import UnsupportedError
from attn_core.integrations.transformers.batch_pool import CHUNK, BatchLayer, BatchPool
from attn_core.integrations.transformers.batch_requests import Requests, read_requests
from attn_core.ops.kv import write_kv
from attn_core.plugins.registry import Registry
from attn_core.runtime.backend import Metadata
from attn_core.runtime.batch import CacheView, ForwardBatch
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer
from attn_core.selection.result import Selection


@dataclass(frozen=True, eq=False)
class Copies:
    """What moves between a ring and the memory beside it, in slots, int64.

    held: group → the tokens of the ring that are seen. places: where they go. new: group → where
    the ring takes the new tokens, after they were seen.
    """

    held: Mapping[int, Tensor]
    places: Tensor
    new: Mapping[int, Tensor]


@dataclass(frozen=True, eq=False)
class Part:
    """Requests of a pass that attend as one batch, in the views of that batch.

    index: int64 [N], which tokens of the pass are theirs; None: all.
    copies: of requests whose new tokens overwrite, in a ring, some that the first of them still
    see. They attend over a copy of what the ring holds, with the new tokens behind it.
    """

    batch: ForwardBatch
    metadata: Metadata
    index: Tensor | None
    copies: Copies | None = None


class Batches:
    """The passes over one PagedAttentionCache. Raises what creating the backends raises."""

    def __init__(
        self,
        selection: Selection,
        registry: Registry,
        layers: Sequence[AttentionLayer],
        cache: Any,
        page_size: int,
    ) -> None:
        self.pool = BatchPool(cache, layers, page_size)
        may_run = [*selection.roles.values(), *chain.from_iterable(selection.alternatives.values())]
        if any(choice.row.requires_finite_padding for choice in may_run):
            self.pool.make_finite()
        self.dispatcher = HybridDispatcher.from_selection(
            selection, registry, self.pool.all_layers, self.pool, adaptive=True
        )
        self._groups = {x.group: x for x in self.pool.layers.values()}  # one layer of each
        self._rings = {g: x for g, x in self._groups.items() if x.chunk is not None}
        self._first = next(iter(self.pool.layers))
        self._parts: tuple[Part, ...] = ()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Write and attend for one layer: q [T, Hq, D], k, v [T, Hkv, D] → [T, Hq, D].

        arguments: what transformers gives every layer of a pass; the first layer plans by it.
        """
        if layer_id == self._first:
            self._parts = ()  # a plan that fails leaves none behind
            self._parts = self._plan(arguments, q.shape[0])
        x, out = self.pool.layers[layer_id], torch.empty_like(q)
        for part in self._parts:
            if not {x.layer.view, x.chunk and CHUNK} & part.batch.views.keys():
                continue
            i = part.index
            if i is None:
                return self._run(q, k, v, x, part)
            out.index_copy_(0, i, self._run(q[i], k[i], v[i], x, part))
        return out

    def _run(self, q: Tensor, k: Tensor, v: Tensor, x: BatchLayer, part: Part) -> Tensor:
        copies, layer = part.copies, x.layer
        if copies is not None and x.chunk is not None:
            layer = x.chunk
            self.pool.copy_beside(x, copies.held[x.group], copies.places)
        out = self.dispatcher.forward(q, k, v, layer, part.batch, part.metadata)
        assert isinstance(out, Tensor)  # no LSE was asked for
        if copies is not None:
            write_kv(self.pool.layer(x.layer.layer_id), k, v, copies.new[x.group])
        return out

    def _plan(self, arguments: Mapping[str, Any], num_tokens: int) -> tuple[Part, ...]:
        if arguments.get("block_table") is not None:
            raise UnsupportedError(
                "transformers' block tables; attn-core reads its indices: leave "
                "max_blocks_per_request out"
            )
        requests = read_requests(arguments, next(iter(self._rings), None), self.pool.page_size)
        lens, _, cached_lens = requests.host
        if sum(lens) != num_tokens:
            raise UnsupportedError(
                f"a pass of {num_tokens} tokens for {sum(lens)} of its requests; attn-core takes "
                "no padding"
            )
        window = min((x.layer.sliding_window or 0 for x in self._rings.values()), default=0)
        visible_lens = [h + n if n > 1 else 0 for n, h in zip(lens, cached_lens, strict=True)]
        long = [i for i, n in enumerate(visible_lens) if window and n > window]
        if not long:
            return (self._part(requests, self._groups, arguments),)
        parts = []
        full = {g: x for g, x in self._groups.items() if g not in self._rings}
        if full:
            parts.append(self._part(requests, full, arguments))
        short = [i for i in range(len(lens)) if i not in set(long)]
        if short:
            parts.append(self._part(requests.only(short), self._rings, arguments, requests))
        return (*parts, self._beside(requests.only(long), arguments, requests))

    def _part(
        self,
        requests: Requests,
        groups: Mapping[int, BatchLayer],
        arguments: Mapping[str, Any],
        all_requests: Requests | None = None,
    ) -> Part:
        """Plan requests that attend in place; all_requests: all requests, where these are some."""
        views: dict[str, CacheView] = {}
        index = requests.index
        for group, x in groups.items():
            windowed = group in self._rings
            slots = (all_requests or requests).slots(group, windowed, arguments)
            table = requests.table(slots, windowed, self.pool.page_size)
            new = arguments["write_index"][group]
            views[x.layer.view] = requests.view(table, new if index is None else new[index])
        return self._planned(requests.batch(views), index)

    def _beside(
        self, requests: Requests, arguments: Mapping[str, Any], all_requests: Requests
    ) -> Part:
        """Plan requests that attend beside their rings."""
        index, alone, size = requests.index, requests.alone(), self.pool.page_size
        assert index is not None
        table = alone.packed_table(size)
        begin = table[:, 0].long() * size
        self.pool.reserve(sum(num_pages_for(n, size) for n in alone.ends))
        cached = requests.held_from(requests.starts[True])
        copies = Copies(
            held={g: all_requests.slots(g, True, arguments)[cached] for g in self._rings},
            places=requests.held_from(begin),
            new={g: arguments["write_index"][g][index] for g in self._rings},
        )
        new = (begin + alone.past)[alone.row] + alone.within
        return self._planned(alone.batch({CHUNK: alone.view(table, new)}), index, copies)

    def _planned(
        self, batch: ForwardBatch, index: Tensor | None, copies: Copies | None = None
    ) -> Part:
        return Part(batch, self.dispatcher.init_forward_metadata(batch), index, copies)
