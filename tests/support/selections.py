"""Rows of scores that a selection may get wrong, and what is right."""

import math

import torch
from attn_core.backends.triton.sparse import selecting
from attn_core.backends.triton.sparse.passes import SparsePass
from attn_core.runtime.batch import CacheView

PAGE = 16


def _at(x):
    return torch.arange(len(x), device=x.device)


# name → scores, made of normal numbers x
ROWS = {
    "normal": lambda x: x,
    "relu": lambda x: x.clamp(min=0),
    "long tail": lambda x: (3 * x).exp(),
    "one outlier": lambda x: torch.where(_at(x) == len(x) // 3, 3e38, x),
    "all equal": lambda x: torch.full_like(x, 3.0),
    "two values": lambda x: (x > 0).float(),
    "ties": lambda x: (2 * x).round(),
    "subnormal": lambda x: (2 * x).round() * 1e-42,
    "both zeros": lambda x: torch.zeros_like(x).copysign(x),
    "ascending by bits": lambda x: 1.0 + (_at(x) // 100).float() * 2.0**-23,
    "ascending": lambda x: _at(x).float(),
    "descending": lambda x: -_at(x).float(),
    "the last are the greatest": lambda x: torch.where(_at(x) < 15 * len(x) // 16, -1.0, x.abs()),
    "tail of -inf": lambda x: torch.where(_at(x) < len(x) // 3, x, -math.inf),
    "all -inf": lambda x: torch.full_like(x, -math.inf),
    "NaN": lambda x: torch.where(x > 1, math.nan, x),
    "NaN of both signs": lambda x: torch.full_like(x, math.nan).copysign(x),
    # any float32 there is
    "bits": lambda x: (_at(x).int() * -1640531535 ^ x.view(torch.int32)).view(torch.float32),
}


def rows(names, n, device="cpu", seed=0):
    """Return a row of n scores for each name."""
    rng = torch.Generator(device).manual_seed(seed)
    return torch.stack([ROWS[x](torch.randn(n, generator=rng, device=device)) for x in names])


def right(scores, topk):
    """Return the columns of the topk greatest of a row, of equal ones the earliest, in order.

    NaN is above all else; the two zeros are equal.
    """
    nan = scores.isnan()
    key = torch.where(nan, math.inf, torch.where(scores == 0, 0.0, scores))
    order = key.sort(descending=True, stable=True).indices
    order = order[nan[order].to(torch.uint8).sort(descending=True, stable=True).indices]
    return order[:topk].sort().values


def slots(scores, topk, table):
    """Return int32 [topk]: the slots of what is right, -1 behind them."""
    best = right(scores, topk)
    result = table[best // PAGE].long() * PAGE + best % PAGE
    return torch.cat([result, result.new_full((topk - len(result),), -1)]).int()


def select(scores, topk, visible, how):
    """Select from rows of a request each over shuffled pages: the slots and the page table."""
    n, length = scores.shape
    table = torch.randperm(n * -(-length // PAGE), device=scores.device).view(n, -1).int()
    lengths = torch.tensor(visible, dtype=torch.int32, device=scores.device)
    view = CacheView(page_table=table, seq_lens=lengths, out_cache_loc=None, max_seq_len=length)
    ends = torch.arange(n + 1, device=scores.device).int()
    chosen = torch.full((n, topk), -7, dtype=torch.int32, device=scores.device)
    inputs = SparsePass(view, ends, ends[:n], queries=1)
    selecting.select(scores, 0, n, inputs, chosen, how, page_size=PAGE)
    return chosen, table


def check(names, scores, topk, visible, how):
    """Select from rows, each of which sees its first scores, and compare every slot."""
    chosen, table = select(scores, topk, visible, how)
    for row, name in enumerate(names):
        seen = scores[row, : max(0, visible[row])]
        want = slots(seen, topk, table[row])
        assert torch.equal(chosen[row], want), (name, topk, visible[row])
