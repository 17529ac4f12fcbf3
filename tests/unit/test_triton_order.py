"""Requests of many queries are taken with the longest first, whatever their tiles."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from attn_core.backends.triton.cut_tiles import may_cut
from attn_core.backends.triton.kernel import Shape
from attn_core.backends.triton.portable.arguments import KeyParts
from attn_core.backends.triton.portable.plan_tiles import LEAST_UNITS, UNIT, most_slots
from attn_core.backends.triton.schedule import TILE_ROWS, Tiles, fill_order
from triton_server import DEVICE


def heads_of(group, heads):
    """Return what the plan reads of a group of layers."""
    return SimpleNamespace(window=None, view="full", num_queries_per_kv=group, num_kv_heads=heads)


REQUESTS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5)), min_size=1, max_size=150)


@pytest.mark.parametrize("paged", [True, False])
@given(requests=REQUESTS, group=st.sampled_from([1, 4, 7]))
@settings(max_examples=15, deadline=None)
def test_the_longest_request_comes_first(requests, group, paged):
    def starts(counts):
        return torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)

    queries = [n for n, _ in requests]
    keys = [n + prefix for n, prefix in requests]
    lengths = torch.tensor(keys, dtype=torch.int32, device=DEVICE) if paged else starts(keys)
    tile_offsets, request_order = (
        torch.full((len(requests) + n,), -1, dtype=torch.int32, device=DEVICE) for n in (1, 0)
    )
    order = Tiles(
        choices=(),
        min_queries=0,
        request_order=request_order,
        tile_offsets=tile_offsets,
        counter=tile_offsets,
        longest=0,
        tiles=0,
        processors=1,
    )
    fill_order(order, starts(queries), lengths, heads_of(group, 2), paged=paged)
    places = sorted(range(len(requests)), key=lambda b: -keys[b])
    assert request_order.tolist() == places, "equal ones keep their order"
    tiles = [-(-queries[b] * group // TILE_ROWS) for b in places]
    assert tile_offsets.tolist() == starts(tiles).tolist()


def planned(requests, group=4, heads=8, programs=132):
    """Return the counts, the slots, the offsets and the order that cut (queries, keys)."""
    size = len(requests)
    ends = torch.tensor([0, *accumulate(n for n, _ in requests)]).int().to(DEVICE)
    keys = torch.tensor([m for _, m in requests]).int().to(DEVICE)
    offsets, order, counts, slots = (
        torch.full((size + n,), -1, dtype=torch.int32, device=DEVICE) for n in (1, 0, 0, 0)
    )
    parts = KeyParts(counts, slots, ends, ends)
    tiles = Tiles(
        choices=(), min_queries=0, request_order=order, tile_offsets=offsets, counter=ends,
        longest=0, tiles=0, processors=programs, parts=parts,
    )  # fmt: skip
    fill_order(tiles, ends, keys, heads_of(group, heads), paged=True)
    return [x.tolist() for x in (counts, slots, offsets, order)]


def may_be_cut(requests, group=4, heads=8, programs=132):
    """Say what the host expects of these."""
    queries, keys = zip(*requests, strict=True)
    rows = -(-sum(queries) * group // TILE_ROWS) + len(requests)
    of_group = heads_of(group, heads)
    shape = Shape("sm90", programs, of_group, "bf16", "bf16", 64, 1, max(keys), rows * heads)
    view = SimpleNamespace(seq_lens_host=keys)
    batch = SimpleNamespace(query_lens_host=queries, views={"full": view})
    return may_cut(shape, batch, max(keys), 0)


PREFIXED = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 40_000)).map(lambda x: (x[0], x[0] + x[1])),
    min_size=1,
    max_size=100,
)


@given(requests=PREFIXED, programs=st.sampled_from([3, 132]))
@example(requests=[(0, 9000), (1, 70)], programs=132)
@settings(max_examples=30, deadline=None)
def test_the_plan_of_cut_tiles_holds_together(requests, programs):
    counts, slots, offsets, order = planned(requests, programs=programs)
    tiles = [-(-n * 4 // TILE_ROWS) for n, _ in requests]
    assert offsets == [0, *accumulate(tiles[b] * counts[b] for b in order)]
    assert [slots[b] for b in order] == [8 * x for x in offsets[:-1]]
    found = [(-(-m // UNIT), c) for (n, m), c in zip(requests, counts, strict=True) if n]
    shortest_cut = min((u for u, c in found if c > 1), default=1 << 30)
    assert all(c == 1 for u, c in found if u < shortest_cut)
    assert all(2 * u > c * LEAST_UNITS for u, c in found if c > 1)
    cut = [8 * n * c for n, c in zip(tiles, counts, strict=True) if c > 1]
    assert sum(cut) <= most_slots(programs)
    assert all(
        8 * offsets[i + 1] <= most_slots(programs) for i, b in enumerate(order) if counts[b] > 1
    )
    if sum(cut) and sum(tiles) * 8 <= 16 * programs:
        assert may_be_cut(requests, programs=programs), "what the host leaves out is not cut"


@pytest.mark.parametrize(
    ("requests", "wanted"),
    [
        ([(128, 32_768)], [4]),  # 32 tiles: four parts of each are one round
        ([(128, 32_768)] * 3, [4] * 3),  # 96 tiles: 384 parts are three rounds
        ([(128, 32_768)] * 4, [1] * 4),  # 128 tiles are one round
        ([(128, 1024)], [1]),  # short
        ([(128, 23_000), *[(128, 2000)] * 15], [4, *[1] * 15]),
        ([(128, 32_768), *[(128, 4000)] * 63], [1] * 64),  # others fill the rest
        ([(2048, 32_768)], [1]),  # many tiles
    ],
)
def test_long_tiles_are_cut_where_the_device_would_idle(requests, wanted):
    counts, *_ = planned(requests)
    assert counts == wanted
    assert may_be_cut(requests) or set(wanted) == {1}


def test_prompts_without_a_prefix_are_not_cut():
    assert not may_be_cut([(1100, 1100)], heads=1, group=1)
    assert may_be_cut([(1100, 1101)], heads=1, group=1)
