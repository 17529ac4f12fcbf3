"""Requests that share pages, and what of them a plan should find."""

import itertools
import random

import torch
from attn_core.backends.triton.portable.arguments import QUERIES
from attn_core.cache.page_table import slot_table
from attn_core.ops.kv import read_kv
from attn_core.runtime.batch import SpecInfo
from triton_passes import DEVICE, Requests

GRANULE = 64  # so that short requests share


class Sharers(Requests):
    """Requests whose leading pages are those of the request before, as many as `shared` says.

    shared: pages that each request shares with the one before it. What is shared no longer has
    pages of its own: those hold NaN.
    """

    def __init__(self, layer, lengths, shared, **more):
        super().__init__(layer, lengths, **more)
        freed = torch.ones(self.cache.k.shape[0], dtype=torch.bool)
        for b, pages in enumerate(shared):
            if pages:
                self.table[b, :pages] = self.table[b - 1, :pages]
        for row, n in zip(self.table, lengths, strict=True):
            freed[row[: -(-n // self.page)].long()] = False
        for part, _ in self.cache.parts():
            poison = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
            poison[freed] = 0x7F if part.dtype.itemsize == 1 else torch.nan
        for b, n in enumerate(lengths):
            slots = slot_table(self.table[b : b + 1], self.page, n)[0].long()
            k, v = read_kv(self.cache, slots, torch.float32)
            self.keys[b] = k
            self.values[b] = k[..., : layer.v_head_dim] if v is None else v

    def permuted(self, order):
        """Put the requests into another order."""
        for name in ("lengths", "keys", "values"):
            setattr(self, name, [getattr(self, name)[i] for i in order])
        self.table = self.table[list(order)].contiguous()
        return self


def expected_spans(sharers, queries, granule=GRANULE):
    """Return the spans of groups (first request, requests, begin, end, level), found naively.

    queries: of each request; a list where they differ.
    """
    table, page, count = sharers.table.tolist(), sharers.page, len(sharers.lengths)
    rows = queries if isinstance(queries, list) else [queries] * count
    contexts = [n - own if own else 0 for n, own in zip(sharers.lengths, rows, strict=True)]
    common = []
    for b in range(count - 1):
        limit = max(0, min(contexts[b : b + 2])) // page
        pairs = zip(table[b][:limit], table[b + 1][:limit], strict=True)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        common.append(same * page // granule)

    def groups(low, high, base, level):
        result, first = [], low
        while first < high:
            last = first
            while last < high and common[last] > base:
                last += 1
            if last > first:
                least = min(common[first:last])
                result.append((first, last - first + 1, base * granule, least * granule, level))
                if level == 1:
                    result += groups(first, last, least, 2)
            first = last + 1
        return result

    return sorted(groups(0, count - 1, 0, 1), key=lambda x: (x[4], x[0]))


def planned_spans(split, size):
    """Return the spans of groups of a plan, and where the keys of each request alone begin."""
    spans, indptr = split.spans, split.work_indptr.tolist()
    rows, members = spans[: 2 * size, :6].tolist(), spans[:size, 6:].T
    groups = [
        (request, int((members[level - 1] == size + s).sum()), begin, end, level)
        for s, (request, level, _, _, begin, end) in enumerate(rows[size:])
        if indptr[size + s + 1] > indptr[size + s]
    ]
    return groups, [begin for *_, begin, _ in rows[:size]]


def queries_of(split, size):
    """Return the queries of the groups of a plan int32 [size], behind the last one any number."""
    return split.spans[size : 2 * size, QUERIES.value]


def verify(n, trees=None):
    """Return what a pass that verifies n drafts says of them."""
    mask = None if trees is None else trees.to(DEVICE)
    return SpecInfo(topk=1 if trees is None else 2, num_draft_tokens=n, tree_mask=mask)


def random_trees(requests, n, seed=0):
    """Draw masks bool [requests, n, n] of trees."""
    rng = random.Random(seed)
    masks = torch.eye(n).bool().repeat(requests, 1, 1)
    for b, i in itertools.product(range(requests), range(1, n)):
        parent = rng.randrange(-1, i)
        if parent >= 0:
            masks[b, i] |= masks[b, parent]
    return masks.to(DEVICE)
