"""The indexer of a case of sparse MLA: its inputs, its keys in the cache, and what is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_core.testing.cases import Case
from attn_core.testing.pools import Placement

_E4M3_MAX = 448.0
_ALONG = torch.tensor([-2.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 1.0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Indexer:
    """What index_topk gets, and what is right.

    q_index [T, Hi, Di], weights float32 [T, Hi]. keys: per request, float64 [s, Di].
    topk_indices: the right slots int32 [T, K], in no order. selected: the positions that these are,
    one tensor per query.
    """

    q_index: Tensor
    weights: Tensor
    keys: tuple[Tensor, ...]
    topk_indices: Tensor
    selected: tuple[Tensor, ...]

    def of(self, pick: Callable[[Tensor], Tensor]) -> Indexer:
        """Return the indexer of another pass, whose tokens `pick` takes from those of this one."""
        return dataclasses.replace(
            self,
            q_index=pick(self.q_index),
            weights=pick(self.weights),
            topk_indices=pick(self.topk_indices),
        )


def visible(case: Case) -> Iterator[tuple[int, int, int]]:
    """Yield per query of a case its request, its token and how many keys it sees."""
    token = 0
    for request, (n, s) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        for i in range(n):
            yield request, token, s - n + i + 1
            token += 1


def index_scores(q_index: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return the scores [s] of keys [s, Di] for one query [Hi, Di], in the dtype of `keys`."""
    products = (q_index.to(keys) @ keys.T).clamp(min=0)
    return (weights.to(keys)[:, None] * products).sum(0)


def select(scores: Tensor, topk: int) -> Tensor:
    """Return the positions of the greatest scores [s], of equal ones the earliest; they rise."""
    ranked = sorted(range(len(scores)), key=lambda t: (-scores[t].item(), t))
    return torch.tensor(sorted(ranked[:topk]), dtype=torch.int64)


def draw_indexer(
    case: Case, placed: Placement, page_size: int, dtype: torch.dtype, rng: torch.Generator
) -> tuple[Tensor, Indexer]:
    """Draw index keys in poisoned pages, as LayerCache.index has them, and queries in `dtype`."""
    fp8, (heads, dim) = case.index_dtype == "fp8_e4m3", case.index_shape
    total = sum(case.query_lens) + case.padding * (case.drafts or 1)
    # Exact numbers are small integers. Every second request has keys along one direction, most of
    # them against it: their scores are 0, and so many that the border lies among them.
    direction = torch.randint(0, 2, (dim,), generator=rng) * 2.0 - 1
    if case.exact_index:
        size = torch.randint(1, 3, (total, heads, 1), generator=rng)
        q_index = size * direction + torch.randint(-1, 2, (total, heads, dim), generator=rng)
        weights = 2.0 ** torch.randint(-2, 1, (total, heads), generator=rng)
    else:
        q_index = torch.randn(total, heads, dim, generator=rng)
        weights = torch.randn(total, heads, generator=rng) * (heads * dim) ** -0.5
    q_index = q_index.to(torch.float8_e4m3fn if case.fp8_queries else dtype)

    def draw_keys(request: int, count: int) -> Tensor:
        if not case.exact_index:
            return torch.randn(count, dim, generator=rng)
        if request % 2:
            return _ALONG[torch.randint(len(_ALONG), (count, 1), generator=rng)] * direction
        return torch.randint(-2, 3, (count, dim), generator=rng).float()

    pages, keys = placed.num_pages, []
    values = torch.full((pages, page_size, dim), torch.nan)
    values = values.to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    scales = torch.full((pages, page_size), torch.nan)
    for request, (page, offset) in enumerate(placed.slots):
        x = draw_keys(request, len(page))
        if fp8:  # scales of many sizes, so that those of other tokens are seen
            scale = 2.0 ** torch.randint(-3, 4, (len(page),), generator=rng).float()
            scales[page, offset] = scale
            x = (x * 32).clamp(-_E4M3_MAX, _E4M3_MAX) if not case.exact_index else x
        stored = x.to(values.dtype)
        raw = values.view(torch.uint8) if fp8 else values
        raw[page, offset] = stored.view(torch.uint8) if fp8 else stored
        keys.append(stored.double() * (scale.double()[:, None] if fp8 else 1.0))
    index = values
    if fp8:
        parts = (values.view(torch.uint8).flatten(1), scales.view(torch.uint8))
        index = torch.cat(parts, 1).contiguous()
    topk_indices = torch.full((total, case.index_topk), -1, dtype=torch.int32)
    selected = []
    for request, token, num_visible in visible(case):
        scores = index_scores(q_index[token], weights[token], keys[request][:num_visible])
        positions = select(scores, case.index_topk)
        page, offset = placed.slots[request]
        slots = page[positions] * page_size + offset[positions]
        mixed = torch.randperm(len(slots), generator=rng)
        topk_indices[token, : len(slots)] = slots[mixed].int()
        selected.append(positions)
    return index, Indexer(
        q_index=q_index,
        weights=weights,
        keys=tuple(keys),
        topk_indices=topk_indices,
        selected=tuple(selected),
    )
