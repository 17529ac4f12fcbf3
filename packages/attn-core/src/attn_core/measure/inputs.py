"""The inputs of one measured pass: a shuffled paged pool, a batch, and what is right."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, cast

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.cache.page_table import num_pages_for, slot_table
from attn_core.cache.pool import KVPool
from attn_core.costs.shapes import Form, Pass
from attn_core.measure.answers import CHOSEN, Answers, Rows, Solve, Span, sample
from attn_core.measure.spread import lengths
from attn_core.ops.kv import read_kv
from attn_core.ops.quant import to_fp8
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.layer import AttentionLayer
from attn_core.testing.oracle import attend_request, tree_mask
from attn_core.testing.tolerance import Measure, require

MODES = {
    "prefill": ForwardMode.EXTEND,
    "decode": ForwardMode.DECODE,
    "verify": ForwardMode.TARGET_VERIFY,
}
SOFT_CAP = 30.0
DRAWN = (1 << 24) - 3  # values, then they repeat; no multiple of a row, so that no two are alike


def bytes_of(form: Form, size: Pass) -> int:
    """Return the bytes of a pass's K and V, of its new tokens, and of its queries and outputs."""
    heads, kv_heads = form.q_heads or 1, form.kv_heads or 1
    width = (form.head_dim or 1) + (0 if form.kind == "mla" else (form.v_head_dim or 1))
    stored = size.kv_tokens * kv_heads * width * TORCH_DTYPES[form.store].itemsize
    new = size.queries * (2 * heads + kv_heads) * width * TORCH_DTYPES[form.dtype].itemsize
    return stored + new


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What every candidate is called with; the new tokens are in the pool already.

    q [T, Hq, D]; k [T, Hkv, D] and v [T, Hkv, Dv] (None for MLA): the new tokens, which engines
    hand over too. parents: of the drafts of every request's tree. answers: of sampled rows, by
    whether the yardstick rounds. span: of all outputs that were checked.
    """

    form: Form
    size: Pass
    q: Tensor
    k: Tensor
    v: Tensor | None
    pool: KVPool
    cache: LayerCache
    batch: ForwardBatch
    layer: AttentionLayer
    parents: list[int] | None
    answers: dict[bool, Answers] = field(default_factory=dict)
    span: Span = field(default_factory=Span)

    def poison(self) -> None:
        """Leave NaN in the block that the allocator hands out next for an output.

        Else a kernel that writes nothing could return the right result of the backend before it.
        """
        shape = (*self.q.shape[:2], self.layer.v_head_dim)
        torch.full(shape, torch.nan, dtype=self.q.dtype, device=self.q.device)

    def check(self, out: Tensor, *, rounds: bool) -> Measure:
        """Compare sampled rows of an output with the float64 oracle; raise CheckFailed.

        rounds: the kernel rounds queries and probabilities to the store's FP8.
        """
        if rounds not in self.answers:
            keys, starts = self._lengths
            counts = [b - a for a, b in pairwise(starts)]
            rows = sample(f"{self.form}: {self.size}", keys, counts, self.form.page_size or 1)
            self.answers[rounds] = self._answers(rows, rounds)
        out = self._finite(out)
        measure = self.answers[rounds].check(str(self.size), out)
        self.span.add(out)
        return measure

    def disputed(self) -> Rows:
        """Return the row in which the outputs that passed the check differ most, if any does."""
        return self.span.disputed(self._lengths[1])

    def check_rows(self, out: Tensor, rows: Rows, *, rounds: bool) -> Measure:
        """Compare disputed rows with the oracle; raise CheckFailed."""
        answers = self._answers(rows, rounds, times=CHOSEN)
        return answers.check(str(self.size), self._finite(out))

    @cached_property
    def _lengths(self) -> tuple[Sequence[int], list[int]]:
        """Return the keys of each request, and where its queries begin."""
        keys = self.batch.views["full"].seq_lens_host
        assert keys is not None  # of a batch that build() made
        return keys, self.batch.cu_seqlens_q.tolist()

    def _finite(self, out: Tensor) -> Tensor:
        require(bool(out.isfinite().all()), f"{self.size}: not all values are finite")
        return out.view(-1, self.layer.num_q_heads, self.layer.v_head_dim)

    def _answers(self, rows: Rows, rounds: bool, times: float = 1.0) -> Answers:
        keys, starts = self._lengths
        table, layer = self.batch.views["full"].page_table, self.layer
        store = TORCH_DTYPES[self.form.store]

        def solver(b: int, queries: Sequence[int]) -> Solve:
            slots = slot_table(table[b : b + 1], self.form.page_size or 1, keys[b])[0]
            k, v = read_kv(self.cache, slots, torch.float32)
            values = k[..., : layer.v_head_dim] if v is None else v
            q = self.q[starts[b] : starts[b + 1]]

            def solve(dtype: torch.dtype, order: int) -> tuple[Tensor, Tensor]:
                return attend_request(
                    q, k, values, dtype=dtype, causal=True, scale=layer.scale,
                    window=layer.sliding_window, parents=self.parents, logit_cap=layer.logit_cap,
                    sinks=layer.sinks, queries=queries, order=order,
                    rounds=store if rounds and dtype != torch.float64 else None,
                )  # fmt: skip

            return solve

        return Answers.of(rows, starts, solver, self.q.dtype, times=times)


def build(form: Form, size: Pass, device: torch.device, seed: int = 0) -> Inputs:
    """Draw the inputs of a pass, the same for the same seed; pages are shuffled over the pool."""
    rng = torch.Generator(device).manual_seed(seed)
    heads, d = form.q_heads or 1, form.head_dim or 1
    layer = AttentionLayer(
        layer_id=0,
        num_q_heads=heads,
        num_kv_heads=form.kv_heads or heads,
        head_dim=d,
        v_head_dim=form.v_head_dim or d,
        scale=d**-0.5,
        logit_cap=SOFT_CAP if form.logit_cap else None,
        sliding_window=form.window,
        sinks=torch.randn(heads, device=device, generator=rng) if form.sinks else None,
    )
    keys, page = lengths(size), form.page_size or 1
    random.Random(seed).shuffle(keys)
    counts = [num_pages_for(s, page) for s in keys]
    table = torch.zeros(len(keys), max(counts), dtype=torch.int32, device=device)
    owned = torch.arange(max(counts), device=device) < torch.tensor(counts, device=device)[:, None]
    table[owned] = 1 + torch.randperm(sum(counts), generator=rng, device=device).int()
    pool = KVPool(
        [layer],
        num_pages=1 + sum(counts),
        page_size=page,
        kv_cache_dtype=form.store,
        device=device,
        kind=cast(Literal["mha", "mla"], form.kind),
    )
    cache = pool.layer(0)
    for number, store in enumerate((cache.k, cache.v), 1):
        if store is not None:
            _fill(store, number)
    is_prompt = size.queries == size.kv_tokens
    queries = list(keys) if is_prompt else [size.queries // size.requests] * size.requests
    parents = None
    spec = None
    if size.phase == "verify":
        mask = None
        if size.tree:
            parents = [(i - 1) // 2 if i else -1 for i in range(size.drafts)]
            tree = tree_mask(parents).to(device)
            mask = tree.expand(size.requests, -1, -1).contiguous()
        topk = 2 if size.tree else 1
        spec = SpecInfo(topk=topk, num_draft_tokens=size.drafts, tree_mask=mask)
    batch = ForwardBatch.build(
        MODES[size.phase],
        query_lens=queries,
        seq_lens=keys,
        page_table=table,
        page_size=page,
        spec=spec,
        writes=False,
    )
    q = torch.empty(size.queries, heads, d, dtype=TORCH_DTYPES[form.dtype], device=device)
    _fill(q, 0)
    k, v = read_kv(cache, _new_slots(table, page, keys, queries), q.dtype)
    return Inputs(
        form=form,
        size=size,
        q=q,
        k=k,
        v=v,
        pool=pool,
        cache=cache,
        batch=batch,
        layer=layer,
        parents=parents,
    )


def _new_slots(
    table: Tensor, page_size: int, keys: Sequence[int], queries: Sequence[int]
) -> Tensor:
    """Return the token slots of all new tokens, int64 [T]; they end the keys of each request."""
    counts = torch.tensor(queries, device=table.device)
    request = torch.repeat_interleave(counts)
    ends = torch.tensor(keys, device=table.device)[request]
    from_end = counts.cumsum(0)[request] - torch.arange(len(request), device=table.device)
    positions = ends - from_end
    page = table[request, positions // page_size].long()
    return page * page_size + positions % page_size


def _fill(store: Tensor, number: int) -> None:
    """Copy values of a normal distribution, others for another number from 0 to 2.

    They are drawn once per process: a copy takes a tenth of what drawing takes.
    """
    drawn, flat = _drawn(store.dtype, store.device), store.view(-1)
    start = number * DRAWN // 3
    for offset in range(-start, flat.shape[0], DRAWN):
        first, last = max(offset, 0), min(offset + DRAWN, flat.shape[0])
        flat[first:last] = drawn[first - offset : last - offset]


@functools.cache
def _drawn(dtype: torch.dtype, device: torch.device) -> Tensor:
    draw = torch.randn(DRAWN, device=device, generator=torch.Generator(device).manual_seed(0))
    return draw.to(dtype) if dtype.itemsize > 1 else to_fp8(draw, dtype, 1.0)
