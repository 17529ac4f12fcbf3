"""A small server for the random session; it records what each cache must hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_core.cache.allocator import PageAllocator
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.page_table import pad_page_table, reusable_prefix
from attn_core.cache.pool import KVPool
from attn_core.dtypes import PLAIN_DTYPES
from attn_core.errors import OutOfPagesError
from attn_core.ops.kv import copy_slots, write_kv
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.layer import AttentionLayer
from attn_core.testing.cases import Case, Parents
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point, make_layer, to_device
from attn_core.testing.oracle import tree_mask
from attn_core.testing.pools import poison, raw
from attn_core.testing.sequences import Request, Step

WINDOW = 21


class Server:
    """Requests over one poisoned pool, and the dispatcher of a bench that serves them."""

    def __init__(
        self,
        bench: Bench,
        case: Case,
        point: Point,
        *,
        drafts: int,
        max_bs: int,
        longest: int,
        rng: random.Random,
    ) -> None:
        row, size = bench.row, point.page_size
        self._bench, self._case, self._point, self._drafts = bench, case, point, drafts
        self._rng, self._torch_rng = rng, torch.Generator().manual_seed(rng.randrange(1 << 30))
        self._store = point.dtype if case.kv_dtype == "auto" else case.kv_dtype
        self.layers = to_device(_layers(bench, case, self._torch_rng), bench.torch_device)
        views, pages = sorted({x.view for x in self.layers}), max(12, 640 // size)
        self._allocators = {view: PageAllocator(pages, size) for view in views}
        # small scales saturate the tails of what is written; each layer has its own
        scales = ((1.0, 1.0),) * 2 if self._store in PLAIN_DTYPES else ((6e-3, 5e-3), (5e-3, 7e-3))
        if case.kind == "mla":  # a latent cache stores no V
            scales = ((scales[0][0], 1.0), (scales[1][0], 1.0))
        self._scales = {x.layer_id: s for x, s in zip(self.layers, scales, strict=True)}
        pool = KVPool(
            self.layers,
            num_pages=dict.fromkeys(views, pages),
            page_size=size,
            kv_cache_dtype=self._store,
            device=bench.torch_device,
            kind="mla" if case.kind == "mla" else "mha",
            layout=point.layout,
            scales=self._scales,
        )
        self._caches = [pool.layer(x.layer_id) for x in self.layers]
        for view in views:
            # the dummy too: it holds what padded rows wrote, and stands for pages behind a window
            self._poison(view, range(pages), large=bench.row.requires_finite_padding)
        self.dispatcher = bench.dispatcher(
            self.layers,
            pool,
            dtype=point.dtype,
            max_bs=max_bs,
            max_num_tokens=max_bs * 64,
            max_seq_len=longest,
            topk=2 if row.max_verify_topk > 1 else row.max_verify_topk,
            num_draft_tokens=drafts if row.max_verify_topk else 0,
        )
        self.requests: list[Request] = []
        self._numbers = itertools.count()

    # requests

    def begin(self) -> Request:
        """Take in a request, on the shared prefix of another where that can be."""
        new = self._request([], [])
        self.requests.append(new)
        sources = [r for r in self.requests if r.length]
        if sources and self._rng.random() < 0.5:
            source = self._rng.choice(sources)
            self._share(new, source, self._rng.randint(1, source.length))
        return new

    def fork(self, request: Request) -> Request | None:
        """Branch a request: whole pages are shared, the partial last page is copied.

        Returns None where pages that a branch would share were given back, or none is free.
        """
        new = self._request([], [])
        shared_tokens = self._share(new, request, request.length)
        if shared_tokens is None:
            return None
        for view, allocator in self._allocators.items():
            try:
                allocator.grow(new.key, request.length)
            except OutOfPagesError:
                self.release(new)
                return None
            tail = range(shared_tokens, request.length)
            src, dst = (self._slots(view, r, tail) for r in (request, new))
            for layer, cache in zip(self.layers, self._caches, strict=True):
                if layer.view == view:
                    copy_slots(cache, src, dst)
        new.keys, new.values = list(request.keys), list(request.values)
        return new

    def release(self, request: Request) -> None:
        """End a request; what it alone held becomes poison."""
        if request in self.requests:
            self.requests.remove(request)
        for view, allocator in self._allocators.items():
            if request.key in allocator:
                pages = allocator.pages(request.key)
                allocator.release(request.key)
                self._poison_free(view, pages)

    def forget_window(self, request: Request) -> None:
        """Give back the pages that no later token sees."""
        allocator = self._allocators.get("window")
        if allocator is not None and request.key in allocator:
            pages = allocator.pages(request.key)
            allocator.release_before(request.key, request.length - WINDOW + 1)
            self._poison_free("window", pages)

    def keep(self, request: Request, drafts: int, path: Sequence[int]) -> None:
        """Keep the drafts on an accepted path, moved together behind the prefix."""
        prefix = request.length - drafts
        kept_tokens = [*range(prefix), *(prefix + i for i in path)]
        for view in self._allocators:
            src = self._slots(view, request, [prefix + i for i in path])
            dst = self._slots(view, request, range(prefix, prefix + len(path)))
            for layer, cache in zip(self.layers, self._caches, strict=True):
                if layer.view == view:
                    copy_slots(cache, src, dst)
        request.keys = [x[kept_tokens] for x in request.keys]
        request.values = [x[kept_tokens] for x in request.values]

    # passes

    def prepare(
        self,
        mode: ForwardMode,
        requests: Sequence[Request],
        news: Sequence[int],
        *,
        trees: Sequence[Parents] | None,
        padding: int,
    ) -> Step:
        """Give each request room and draw its new tokens. Raises OutOfPagesError."""
        for request, n in zip(requests, news, strict=True):
            for allocator in self._allocators.values():
                allocator.grow(request.key, request.length + n)
        extra = self._drafts if mode is ForwardMode.TARGET_VERIFY else 1
        query_lens = [*news, *[extra] * padding]
        lens = [r.length + n for r, n in zip(requests, news, strict=True)]
        seq_lens = [*lens, *[extra] * padding]
        spec = None
        if mode is ForwardMode.TARGET_VERIFY:
            masks = [tree_mask(t) for t in (*trees, *[trees[0]] * padding)] if trees else None
            spec = SpecInfo(
                topk=2 if trees else 1,
                num_draft_tokens=extra,
                tree_mask=torch.stack(masks).to(self._bench.torch_device) if masks else None,
            )
        size, device = self._point.page_size, self._bench.torch_device
        latent = self._case.kind == "mla"
        width = max((-(-s // size) for s in seq_lens), default=1)
        tables = {
            view: pad_page_table(
                [*(allocator.pages(r.key) for r in requests), *[[0]] * padding],
                width=width + self._rng.randint(0, 2),
                device=device,
            )
            for view, allocator in self._allocators.items()
        }
        windows = {
            view: CacheView.build(
                page_table=table, page_size=size, seq_lens=seq_lens, new_lens=query_lens
            )
            for view, table in tables.items()
            if view != "full"
        }
        batch = ForwardBatch.build(
            mode,
            query_lens=query_lens,
            seq_lens=seq_lens,
            page_table=tables["full"],
            page_size=size,
            spec=spec,
            views=windows,
        )
        return Step(
            requests=tuple(requests),
            news=tuple(news),
            trees=tuple(trees) if trees else None,
            batch=batch,
            q=[self._draw(batch, x.num_q_heads, x.head_dim) for x in self.layers],
            k=[self._draw(batch, x.num_kv_heads, x.head_dim) for x in self.layers],
            v=[
                None if latent else self._draw(batch, x.num_kv_heads, x.v_head_dim)
                for x in self.layers
            ],
        )

    def write(self, step: Step, index: int) -> None:
        """Write a layer's new tokens, as another backend's pass would have done."""
        slots = step.batch.views[self.layers[index].view].out_cache_loc
        assert slots is not None  # every step has new tokens
        write_kv(self._caches[index], step.k[index], step.v[index], slots)

    def record(self, step: Step, index: int) -> None:
        """Note what the cache of a layer must hold now."""
        layer, start = self.layers[index], 0
        k, v = step.k[index].cpu(), step.v[index]
        k_scale, v_scale = self._scales[layer.layer_id]
        for request, n in zip(step.requests, step.news, strict=True):
            new = self._rounded(k[start : start + n], k_scale)
            request.keys[index] = torch.cat([request.keys[index], new])
            if v is None:
                request.values[index] = request.keys[index][..., : layer.v_head_dim]
            else:
                new = self._rounded(v[start : start + n].cpu(), v_scale)
                request.values[index] = torch.cat([request.values[index], new])
            start += n

    # details

    def _request(self, keys: list[Tensor], values: list[Tensor]) -> Request:
        for x in self.layers:
            keys.append(torch.zeros(0, x.num_kv_heads, x.head_dim, dtype=torch.float64))
            values.append(torch.zeros(0, x.num_kv_heads, x.v_head_dim, dtype=torch.float64))
        return Request(next(self._numbers), keys, values)

    def _share(self, new: Request, source: Request, tokens: int) -> int | None:
        shared_tokens = reusable_prefix(tokens, self._point.page_size)
        pages = shared_tokens // self._point.page_size
        if any(0 in a.pages(source.key)[:pages] for a in self._allocators.values()):
            return None
        for allocator in self._allocators.values():
            allocator.share(new.key, source.key, tokens)
        new.keys = [x[:shared_tokens] for x in source.keys]
        new.values = [x[:shared_tokens] for x in source.values]
        return shared_tokens

    def _slots(self, view: str, request: Request, tokens: Sequence[int]) -> Tensor:
        size, pages = self._point.page_size, self._allocators[view].pages(request.key)
        slots = [pages[t // size] * size + t % size for t in tokens]
        return torch.tensor(slots, dtype=torch.int64, device=self._bench.torch_device)

    def _draw(self, batch: ForwardBatch, heads: int, dim: int) -> Tensor:
        x = torch.randn(batch.num_tokens, heads, dim, generator=self._torch_rng)
        return x.to(TORCH_DTYPES[self._point.dtype]).to(self._bench.torch_device)

    def _rounded(self, x: Tensor, scale: float) -> Tensor:
        """What the store makes of new tokens: FP8 saturates."""
        dtype = TORCH_DTYPES[self._store]
        if self._store in PLAIN_DTYPES:
            return x.to(dtype).double()
        top = torch.finfo(dtype).max
        return (x.float() / scale).clamp(-top, top).to(dtype).double() * scale

    def _poison_free(self, view: str, pages: Sequence[int]) -> None:
        allocator = self._allocators[view]
        in_use = {p for r in self.requests if r.key in allocator for p in allocator.pages(r.key)}
        free = [p for p in pages if p and p not in in_use]
        self._poison(view, free, large=self._bench.row.requires_finite_padding)

    def _poison(self, view: str, pages: Sequence[int], *, large: bool) -> None:
        index = torch.tensor(list(pages), dtype=torch.int64, device=self._bench.torch_device)
        poison_value = raw(poison(self._store, (1,), large=large)).item()
        for layer, cache in zip(self.layers, self._caches, strict=True):
            if layer.view == view:
                for t, _ in cache.parts():
                    raw(t).index_fill_(0, index, poison_value)


def _layers(bench: Bench, case: Case, rng: torch.Generator) -> tuple[AttentionLayer, ...]:
    row = bench.row
    rich = replace(
        case,
        window=WINDOW if row.sliding_window else None,
        sinks=row.sinks,
        logit_cap=8.0 if row.logit_cap else None,
    )
    first, second = make_layer(case, rng), make_layer(rich, rng)
    view = "window" if row.sliding_window else "full"
    return first, replace(second, layer_id=1, view=view, scale=0.7 * first.scale)
