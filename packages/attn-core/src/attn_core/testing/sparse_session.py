"""A random serving session of sparse MLA: new keys are written, selected and attended to."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attn_core.cache.allocator import PageAllocator
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.page_table import pad_page_table
from attn_core.cache.pool import KVPool
from attn_core.dtypes import LATENT_BLOCK
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.spec.kinds import Phase
from attn_core.testing.cases import Case
from attn_core.testing.harness import Bench
from attn_core.testing.indexer import Indexer, index_scores, select, visible
from attn_core.testing.inputs import Point, make_layer, to_device
from attn_core.testing.oracle import attend_request
from attn_core.testing.pools import poison_latents, raw
from attn_core.testing.sparse_passes import check_selection
from attn_core.testing.tolerance import CheckFailed, Measure, require, within_budget, worst

M = ForwardMode
DRAFTS, LONGEST, MOST_REQUESTS = 4, 90, 4
_PHASE = {M.EXTEND: Phase.PREFILL, M.MIXED: Phase.PREFILL, M.DECODE: Phase.DECODE}


@dataclass(eq=False)
class _Request:
    """A request: what its caches must hold, latents per layer and index keys in float64."""

    key: int
    length: int = 0
    latents: list[Tensor] = field(default_factory=lambda: [torch.zeros(0, 1, 576)] * 2)
    index: Tensor = field(default_factory=lambda: torch.zeros(0, 1, dtype=torch.float64))


def run_sparse_session(bench: Bench, case: Case, point: Point, *, passes: int) -> Measure:
    """Drive passes of mixed modes over one cache; compare selections and outputs with the oracle.

    Two layers: the first selects, the second has no index keys and takes the first's selection. An
    output is compared with the attention over the selection that the backend made, which is itself
    held against the scores.
    """
    session = _Session(bench, case, point, random.Random(0))
    for number in range(passes):
        session.step(number)
    return session.verdict()


class _Session:
    def __init__(self, bench: Bench, case: Case, point: Point, rng: random.Random) -> None:
        self._bench, self._case, self._point, self._rng = bench, case, point, rng
        self._torch_rng, size = torch.Generator().manual_seed(7), point.page_size
        first = make_layer(case, self._torch_rng)
        self._layers = to_device((first, replace(first, layer_id=1)), bench.torch_device)
        pages = 1 + MOST_REQUESTS * -(-(LONGEST + 60) // size)
        self._allocator = PageAllocator(pages, size)
        pool = KVPool(
            self._layers,
            num_pages=pages,
            page_size=size,
            kv_cache_dtype=point.dtype if case.kv_dtype == "auto" else case.kv_dtype,
            device=bench.torch_device,
            kind="dsa",
            index_dim=case.index_shape[1],
            index_dtype=case.index_dtype,
            index_layers={0},
        )
        large = bench.row.requires_finite_padding
        for layer in self._layers:
            cache = pool.layer(layer.layer_id)
            for t, _ in cache.parts():
                poison_value = torch.full((1,), 200.0 if large else torch.nan).to(t.dtype)
                if t is cache.k and cache.latent_dim:
                    poison_value = poison_latents(case.dims, large=large)
                raw(t).copy_(raw(poison_value).to(t.device))
        require(pool.layer(1).index is None, "a layer that shares a selection has index keys")
        self._dispatcher = bench.dispatcher(
            self._layers,
            pool,
            dtype=point.dtype,
            max_bs=MOST_REQUESTS + 3,
            max_num_tokens=64 * MOST_REQUESTS,
            max_seq_len=LONGEST + 60,
            topk=bench.row.max_verify_topk,
            num_draft_tokens=DRAFTS if bench.row.max_verify_topk else 0,
        )
        self._requests: list[_Request] = []
        self._numbers = itertools.count()
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self._selections: list[Measure] = []
        self._modes = [M.EXTEND, M.EXTEND, M.DECODE, M.DECODE, M.MIXED]
        if bench.row.max_verify_topk:
            self._modes += [M.TARGET_VERIFY, M.DRAFT_EXTEND]

    def step(self, number: int) -> None:
        """Run one pass; requests that are long enough end before it."""
        rng = self._rng
        for request in [r for r in self._requests if r.length > LONGEST]:
            self._end(request)
        mode = rng.choice(self._modes)
        if not self._requests or mode is M.EXTEND:
            if len(self._requests) == MOST_REQUESTS:
                self._end(rng.choice(self._requests))
            existing = rng.sample(self._requests, min(1, len(self._requests)))
            self._requests.append(_Request(next(self._numbers)))
            chosen, query_lens, mode = [*existing, self._requests[-1]], [], M.EXTEND
            query_lens = [rng.choice((3, 12, 30)) for _ in chosen]
        else:
            chosen = rng.sample(self._requests, rng.randint(1, len(self._requests)))
            max_queries = {M.MIXED: 20, M.DRAFT_EXTEND: 3}.get(mode, 1)
            query_lens = [
                DRAFTS if mode is M.TARGET_VERIFY else rng.randint(1, max_queries) for _ in chosen
            ]
        try:
            self._run(mode, chosen, query_lens)
        except CheckFailed as error:
            raise CheckFailed(f"pass {number} ({mode.value}): {error}") from error
        if mode is M.TARGET_VERIFY:  # some drafts are not accepted
            for request in chosen:
                self._shorten(request, request.length - rng.randrange(DRAFTS))

    def verdict(self) -> Measure:
        """Compare all outputs; one pass has too few numbers for a budget of its own."""
        actual, truth, baseline = (torch.cat(x) for x in zip(*self._seen, strict=True))
        dtype = TORCH_DTYPES[self._point.dtype]
        return worst([*self._selections, within_budget("output", actual, truth, baseline, dtype)])

    def _end(self, request: _Request) -> None:
        self._requests.remove(request)
        self._allocator.release(request.key)

    def _shorten(self, request: _Request, length: int) -> None:
        request.length, request.index = length, request.index[:length]
        request.latents = [x[:length] for x in request.latents]

    def _run(
        self, mode: ForwardMode, chosen: Sequence[_Request], query_lens: Sequence[int]
    ) -> None:
        point, device, total = self._point, self._bench.torch_device, sum(query_lens)
        dtype, case = TORCH_DTYPES[point.dtype], self._case
        padding = self._rng.randint(0, 2) if mode is not M.EXTEND else 0
        extra = DRAFTS if mode is M.TARGET_VERIFY else 1
        for request, n in zip(chosen, query_lens, strict=True):
            self._allocator.grow(request.key, request.length + n)
        lengths = [r.length + n for r, n in zip(chosen, query_lens, strict=True)]
        pages = [self._allocator.pages(r.key) for r in chosen] + [[0]] * padding
        table = pad_page_table(pages)
        batch = ForwardBatch.build(
            mode,
            query_lens=[*query_lens, *[extra] * padding],
            seq_lens=[*lengths, *[extra] * padding],
            page_table=table.to(device),
            page_size=point.page_size,
            spec=SpecInfo(topk=1, num_draft_tokens=DRAFTS) if mode is M.TARGET_VERIFY else None,
        )
        tokens = batch.num_tokens

        def draw(*shape: int) -> Tensor:
            return torch.randn(tokens, *shape, generator=self._torch_rng)

        heads, dim = case.index_shape
        q_index, weights = draw(heads, dim).to(dtype), draw(heads) * (heads * dim) ** -0.5
        k_index = (draw(dim) * 2.0 ** draw(1).round()).to(dtype)
        latents = [draw(1, 576).to(dtype) for _ in self._layers]
        queries = [draw(self._layers[0].num_q_heads, 576).to(dtype) for _ in self._layers]
        phase_served = _PHASE.get(mode) in (None, *self._bench.row.phases)
        require(phase_served, f"the row does not serve {mode.value}")
        metadata = self._dispatcher.init_forward_metadata(batch)
        chosen_slots = self._dispatcher.index_topk(
            *to_device((q_index, k_index, weights), device), self._layers[0], batch, metadata
        )
        self._record(chosen, query_lens, k_index, latents)
        case = replace(case, mode=mode, query_lens=tuple(query_lens), seq_lens=tuple(lengths))
        dense = mode is M.EXTEND and max(lengths) <= case.index_topk
        require((chosen_slots is None) == dense, "dense without need, or selected without need")
        indexer = _indexer(case, q_index, weights, [r.index for r in chosen])
        selected: Sequence[Tensor] = indexer.selected
        if chosen_slots is not None:
            size = point.page_size
            self._selections.append(check_selection(chosen_slots, case, indexer, table, size))
            selected = _positions(chosen_slots.cpu(), case, table, size)
        for index, layer in enumerate(self._layers):
            q, k = to_device((queries[index], latents[index]), device)
            out = self._dispatcher.forward(
                q, k, None, layer, batch, metadata, topk_indices=chosen_slots
            )
            assert isinstance(out, Tensor)
            first = 0
            for request, n in zip(chosen, query_lens, strict=True):
                part, keys = slice(first, first + n), request.latents[index]
                truth, baseline = (
                    attend_request(
                        queries[index][part],
                        keys,
                        keys[..., :512],
                        dtype=exact,
                        causal=True,
                        scale=layer.scale,
                        selected=selected[part],
                    )[0]
                    for exact in (torch.float64, dtype)
                )
                self._seen.append((out[part].cpu(), truth, baseline))
                first += n
        require(first == total, "tokens were lost")

    def _record(
        self,
        chosen: Sequence[_Request],
        query_lens: Sequence[int],
        k_index: Tensor,
        latents: Sequence[Tensor],
    ) -> None:
        first = 0
        for request, n in zip(chosen, query_lens, strict=True):
            new = slice(first, first + n)
            stored = _stored(k_index[new], self._case)
            request.index = torch.cat([request.index, stored]) if request.length else stored
            stored_latents = [_stored_latents(x[new], self._case) for x in latents]
            request.latents = [
                torch.cat([old.to(x.dtype), x])
                for old, x in zip(request.latents, stored_latents, strict=True)
            ]
            request.length, first = request.length + n, first + n


def _stored(keys: Tensor, case: Case) -> Tensor:
    """Return what index keys [N, Di] are once they are stored, in float64."""
    if case.index_dtype == "bf16":
        return keys.bfloat16().double()
    scale = keys.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1 / 448)
    return (keys.float() / scale).to(torch.float8_e4m3fn).double() * scale.double()


def _stored_latents(latents: Tensor, case: Case) -> Tensor:
    """Return what latents [N, 1, 576] are once they are stored; FP8 in float64, of its formula."""
    if case.kv_dtype == "auto":
        return latents
    dim = case.dims[1]
    values = torch.unflatten(latents[..., :dim].double(), -1, (-1, LATENT_BLOCK))
    top = values.abs().amax(-1, keepdim=True)
    scale = torch.exp2((top / 448).clamp(min=1e-4).log2().ceil())
    values = (values / scale).to(torch.float8_e4m3fn).double() * scale
    return torch.cat([values.flatten(-2), latents[..., dim:].bfloat16().double()], -1)


def _indexer(case: Case, q_index: Tensor, weights: Tensor, keys: Sequence[Tensor]) -> Indexer:
    selected = tuple(
        select(index_scores(q_index[t], weights[t], keys[r][:num_visible]), case.index_topk)
        for r, t, num_visible in visible(case)
    )
    no_slots = torch.zeros(0, case.index_topk, dtype=torch.int32)
    return Indexer(
        q_index=q_index, weights=weights, keys=tuple(keys), topk_indices=no_slots, selected=selected
    )


def _positions(slots: Tensor, case: Case, table: Tensor, size: int) -> list[Tensor]:
    """Return the positions that each query's slots are, of a checked selection."""
    result = []
    for request, token, _ in visible(case):
        position = torch.arange(case.seq_lens[request])
        owned = table[request].long()[position // size] * size + position % size
        result.append(torch.isin(owned, slots[token][slots[token] >= 0].long()).nonzero()[:, 0])
    return result
