"""Passes of one model on several ranks: heads, or the keys of each request, split over them.

Nothing here is part of a backend: an engine does the communication, and its backends have to give
partial results that fit together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from attn_core import (
    AttentionLayer,
    CacheView,
    ForwardBatch,
    ForwardMode,
    GraphRunner,
    HybridDispatcher,
    KVPool,
    LayerRequirements,
    Overrides,
    Requirements,
    load_plugins,
    probe_device,
    select,
)
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.ops.kv import write_kv
from attn_core.ops.merge import merge_states
from attn_core.spec.device import probe_cpu
from torch import Tensor

KEYS, VALUES, QUERIES, NEW_KEYS, NEW_VALUES = range(1, 6)  # seeds
PASSES = ("heads", "keys decode", "keys extend")
GRAPHS = ("heads graph", "keys graph")


@dataclass(frozen=True)
class Problem:
    """The requests of a model. lengths: of several decode passes; new: of a chunk behind each."""

    device: str
    dtype: str
    heads: int
    kv_heads: int
    dim: int
    page: int
    lengths: tuple[tuple[int, ...], ...]
    new: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @property
    def longest(self) -> int:
        return max(map(max, self.lengths)) + max(self.new)

    def layer(self, share: int = 1, **more: Any) -> AttentionLayer:
        """Return a layer with one share of the heads."""
        return AttentionLayer(
            layer_id=0,
            num_q_heads=self.heads // share,
            num_kv_heads=self.kv_heads // share,
            head_dim=self.dim,
            v_head_dim=self.dim,
            scale=self.dim**-0.5,
            **more,
        )

    def tokens(self, lengths: tuple[int, ...], heads: int, seed: int) -> list[Tensor]:
        """Return the same random [n, heads, D] for each request on every rank."""
        rng = torch.Generator().manual_seed(seed * 1000 + sum(lengths))
        drawn = [torch.randn(n, heads, self.dim, generator=rng) for n in lengths]
        return [x.to(self.torch_dtype).to(self.device) for x in drawn]

    def dispatcher(self, layer: AttentionLayer, backend: str, pages: int) -> HybridDispatcher:
        """Return a dispatcher of one layer with one backend for all passes."""
        registry = load_plugins()
        needs = Requirements(
            layers=(LayerRequirements.of(layer),), dtype=self.dtype, page_size=self.page
        )
        here = probe_device() if self.device == "cuda" else probe_cpu()
        names = Overrides(attention_backend=backend)
        selection = select(needs, here, registry, registry.installed_libraries(), names)
        pool = KVPool(
            [layer],
            num_pages=pages,
            page_size=self.page,
            kv_cache_dtype=selection.kv_cache_dtype,
            layout=selection.layout,
            device=self.device,
        )
        requests = len(self.new)
        return HybridDispatcher.from_selection(
            selection,
            registry,
            [layer],
            pool,
            max_bs=requests,
            max_num_tokens=max(sum(self.new), requests),
            max_seq_len=self.longest,
        )

    def view(self, counts: list[int], written: list[int] | None = None) -> CacheView:
        """Lay out requests of so many keys, none being possible, page after page from page 1 on.

        written: how many of the last keys of each request the pass writes; None: all.
        """
        last = counts if written is None else written
        needed = [max(1, -(-n // self.page)) for n in counts]
        table = torch.zeros(len(counts), max(needed), dtype=torch.int32)
        first = 1
        for row, n in zip(table, needed, strict=True):
            row[:n] = torch.arange(first, first + n)
            first += n
        slots = [
            int(table[i, p // self.page]) * self.page + p % self.page
            for i, (n, new) in enumerate(zip(counts, last, strict=True))
            for p in range(n - new, n)
        ]
        return CacheView(
            page_table=table.to(self.device),
            seq_lens=torch.tensor(counts, dtype=torch.int32, device=self.device),
            out_cache_loc=torch.tensor(slots, dtype=torch.int64, device=self.device),
            max_seq_len=max(counts),
            seq_lens_host=tuple(counts),
        )

    @property
    def pages(self) -> int:
        """Pages that hold any of the passes, with the padding page 0."""
        return 1 + max(sum(max(1, -(-n // self.page)) for n in each) for each in self.lengths)

    def batch(
        self, mode: ForwardMode, query_lens: tuple[int, ...], name: str, view: CacheView
    ) -> ForwardBatch:
        cu = torch.tensor([0, *query_lens]).cumsum(0)
        return ForwardBatch(
            forward_mode=mode,
            cu_seqlens_q=cu.int().to(self.device),
            positions=torch.zeros(int(cu[-1]), dtype=torch.int64, device=self.device),
            max_q_len=max(query_lens),
            query_lens_host=query_lens,
            views={name: view},
        )


def write(dispatcher: HybridDispatcher, k: list[Tensor], v: list[Tensor], view: CacheView) -> None:
    """Write the keys and values of each request."""
    assert view.out_cache_loc is not None
    write_kv(dispatcher.caches.layer(0), torch.cat(k), torch.cat(v), view.out_cache_loc)


def gathered(x: Tensor, size: int) -> Tensor:
    """Return the tensors of all ranks, [size, *x.shape]; on a GPU, CUDA graphs capture it."""
    if size == 1:
        return x[None]
    parts = x.new_empty(size, *x.shape)
    dist.all_gather_into_tensor(parts.view(-1), x.contiguous().view(-1))
    return parts


def heads(problem: Problem, rank: int, size: int, backend: str, graph: bool) -> Iterator[Tensor]:
    """Attend with this rank's share of the heads, and gather the heads of all ranks."""
    p, share, ones = problem, problem.heads // size, (1,) * len(problem.new)
    layer = p.layer(size)
    mine = slice(rank * layer.num_kv_heads, (rank + 1) * layer.num_kv_heads)
    dispatcher = p.dispatcher(layer, backend, p.pages)

    def step(batch: ForwardBatch, metadata: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = dispatcher.forward(q, k, v, layer, batch, metadata)
        assert isinstance(out, Tensor)
        return torch.cat([*gathered(out, size)], 1)

    run = _runner(p, dispatcher, step, (share, *[layer.num_kv_heads] * 2), "full", graph, size)
    for lengths in p.lengths:
        k, v = (p.tokens(lengths, p.kv_heads, seed) for seed in (KEYS, VALUES))
        k, v = ([x[:, mine] for x in each] for each in (k, v))
        write(dispatcher, k, v, p.view(list(lengths)))
        view = p.view(list(lengths), list(ones))
        q = torch.cat(p.tokens(ones, p.heads, QUERIES))[:, rank * share : (rank + 1) * share]
        last = [torch.stack([x[-1] for x in each]) for each in (k, v)]
        yield run(p.batch(ForwardMode.DECODE, ones, "full", view), q, *last)


def keys(
    problem: Problem, rank: int, size: int, backend: str, graph: bool, extend: bool = False
) -> Iterator[Tensor]:
    """Attend to this rank's keys, token p being on rank p mod size, and merge all ranks' results.

    The keys before the new tokens are as those of cross attention: each query sees them all, and
    there may be none. A decode step's own token is among them; the new tokens of a chunk attend to
    one another in a second, causal pass, which every rank computes.
    """
    p, mode = problem, ForwardMode.EXTEND if extend else ForwardMode.DECODE
    query_lens = p.new if extend else (1,) * len(p.new)
    layer = p.layer(view="cross", is_cross=True)
    dispatcher = p.dispatcher(layer, backend, p.pages)

    def step(batch: ForwardBatch, metadata: Any, q: Tensor) -> Tensor:
        out, lse = dispatcher.forward(q, None, None, layer, batch, metadata, return_lse=True)
        outs, every = gathered(out, size), gathered(lse, size)
        if extend:
            k, v = (torch.cat(p.tokens(p.new, p.kv_heads, s)) for s in (NEW_KEYS, NEW_VALUES))
            cu, longest = batch.cu_seqlens_q, max(p.new)
            own, own_lse = dispatcher.forward_ragged(
                q, k, v, layer, cu, cu, longest, longest, causal=True, return_lse=True
            )
            outs, every = torch.cat([outs, own[None]]), torch.cat([every, own_lse[None]])
        return merge_states(outs, every)[0]

    run = _runner(p, dispatcher, step, (p.heads,), "cross", graph, size)
    for lengths in p.lengths:
        k, v = (p.tokens(lengths, p.kv_heads, seed) for seed in (KEYS, VALUES))
        k, v = ([x[rank::size] for x in each] for each in (k, v))
        counts = [len(x) for x in k]
        write(dispatcher, k, v, p.view(counts))
        view = p.view(counts, [0] * len(counts))
        q = torch.cat(p.tokens(query_lens, p.heads, QUERIES))
        yield run(p.batch(mode, query_lens, "cross", view), q)


def _runner(
    p: Problem, dispatcher: HybridDispatcher, step: Any, shapes: tuple[int, ...], view: str,
    graph: bool, size: int,
) -> Any:  # fmt: skip
    """Return what runs a pass: eagerly, or as a replay of one graph of all passes."""
    if not graph:
        return lambda batch, *inputs: step(batch, dispatcher.init_forward_metadata(batch), *inputs)
    if p.device == "cuda":
        gathered(torch.zeros(1, device=p.device), size)  # connects before the capture
    runner = GraphRunner(dispatcher, batch_sizes=[len(p.new)], max_seq_len={view: p.longest})
    inputs = [torch.empty(1, n, p.dim, dtype=p.torch_dtype, device=p.device) for n in shapes]
    runner.capture(ForwardMode.DECODE, step, inputs=inputs)
    return lambda batch, *inputs: runner.replay(batch, *inputs).clone()


def passes(problem: Problem, rank: int, size: int, backend: str, name: str) -> list[Tensor]:
    """Return what a rank has in the end, [T, H, D] for each of the problem's lengths."""
    graph = name in GRAPHS
    if name.startswith("heads"):
        result = heads(problem, rank, size, backend, graph)
    else:
        result = keys(problem, rank, size, backend, graph, name == "keys extend")
    return [x.cpu() for x in result]


def plain(problem: Problem, name: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the attention of one device to all keys of each request, in this precision."""
    p, result = problem, []
    for lengths in p.lengths:
        k, v = (p.tokens(lengths, p.kv_heads, seed) for seed in (KEYS, VALUES))
        query_lens = (1,) * len(p.new)
        if name == "keys extend":
            query_lens = p.new
            more = (p.tokens(p.new, p.kv_heads, seed) for seed in (NEW_KEYS, NEW_VALUES))
            k, v = (
                [torch.cat(x) for x in zip(old, new, strict=True)]
                for old, new in zip((k, v), more, strict=True)
            )
        q = p.tokens(query_lens, p.heads, QUERIES)
        result.append(torch.cat([_attend(p, *x, dtype) for x in zip(q, k, v, strict=True)]).cpu())
    return result


def _attend(p: Problem, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    k, v = (x.to(dtype).repeat_interleave(p.heads // p.kv_heads, 1) for x in (k, v))
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), k) * p.dim**-0.5
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
