"""Keys that neighbouring requests share are read once: the plan on the device, and the numbers."""

import itertools
import random

import pytest
import torch
from attn_core.cache.page_table import slot_table
from attn_core.ops.kv import read_kv
from attn_core.runtime.batch import ForwardMode, SpecInfo

pytest.importorskip("triton")

from attn_core.backends.triton import scheduler
from attn_core.backends.triton.shared import Sharing
from triton_passes import DEVICE, Requests, make_layer

M = ForwardMode
GRANULE = 64  # so that short requests share


@pytest.fixture(autouse=True)
def small_granule(monkeypatch):
    """Share from 64 keys on, and split short requests wherever this runs."""
    monkeypatch.setattr(scheduler, "shared_granule", lambda *args: GRANULE)
    monkeypatch.setattr(scheduler, "unsplit_keys_on", lambda device: 0)


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
    """Return the spans of groups (first request, requests, begin, end, level), found naively."""
    table, page, count = sharers.table.tolist(), sharers.page, len(sharers.lengths)
    common = []
    for b in range(count - 1):
        limit = max(0, min(sharers.lengths[b : b + 2]) - queries) // page
        pairs = zip(table[b][:limit], table[b + 1][:limit], strict=True)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        common.append(same * page // granule)

    def groups(low, high, base, level):
        found, first = [], low
        while first < high:
            last = first
            while last < high and common[last] > base:
                last += 1
            if last > first:
                least = min(common[first:last])
                found.append((first, last - first + 1, base * granule, least * granule, level))
                if level == 1:
                    found += groups(first, last, least, 2)
            first = last + 1
        return found

    return sorted(groups(0, count - 1, 0, 1), key=lambda x: (x[4], x[0]))


def planned_spans(split, size):
    """Return the spans of groups of a plan, and where the keys of each request alone begin."""
    spans, indptr = split.spans, split.work_indptr.tolist()
    queries = spans.queries[0].item()
    groups = [
        (
            spans.request[s].item(),
            spans.queries[s].item() // queries,
            spans.begin[s].item(),
            spans.end[s].item(),
            spans.level[s].item(),
        )
        for s in range(size, 2 * size)
        if indptr[s + 1] > indptr[s]
    ]
    return groups, spans.begin[:size].tolist()


def verify(n, trees=None):
    """Return what a pass that verifies n drafts says of them."""
    mask = None if trees is None else trees.to(DEVICE)
    return SpecInfo(topk=1 if trees is None else 2, num_draft_tokens=n, tree_mask=mask)


def attend(sharers, queries=1, mode=M.DECODE, spec=None, trees=None, **config):
    """Attend with groups and check against float64; return the split that was planned."""
    rows = [queries] * len(sharers.lengths)
    batch = sharers.batch(rows, mode=mode, spec=spec)
    q = sharers.draw(sum(rows))
    backend = sharers.backend(shared_prefix=True, **config)
    plan = backend.init_forward_metadata(batch)
    got = backend.forward(q, None, None, sharers.layer, sharers.cache, batch, plan, return_lse=True)
    sharers.check(got, q, rows, trees=trees)
    return next(iter(plan.values())).split


CASES = {
    "all": ([200, 230, 257, 193], [0, 8, 8, 8]),
    "one alone": ([200, 230, 90, 257], [0, 9, 0, 0]),
    "equal": ([240, 240, 240], [0, 15, 15]),
    "two groups": ([200, 190, 150, 180, 171], [0, 8, 0, 5, 5]),
    "levels": ([300, 280, 310, 290, 330, 260], [0, 12, 4, 12, 4, 9]),
    "three levels": ([400, 400, 400, 400], [0, 20, 12, 4]),
    "nothing": ([200, 190, 150], [0, 0, 0]),
    "too little": ([200, 190, 150], [0, 3, 3]),
    "many": ([80 + 3 * b for b in range(21)], [0, *[4] * 20]),
}


@pytest.mark.parametrize("name", CASES)
def test_groups_are_found_and_read_right(name):
    lengths, shared = CASES[name]
    sharers = Sharers(make_layer(dim=32), lengths, shared, page=16)
    split = attend(sharers)
    groups, begins = planned_spans(split, len(lengths))
    expected = expected_spans(sharers, 1)
    assert groups == expected
    assert bool(expected) == (name not in ("nothing", "too little"))
    for b, begin in enumerate(begins):
        ends = [end for first, n, _, end, _ in expected if first <= b < first + n]
        assert begin == max(ends, default=0)
