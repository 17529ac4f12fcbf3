"""Requests of many queries are taken with the longest first, whatever their tiles."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from attn_core.backends.triton.schedule import TILE_ROWS, Tiles, fill_order
from triton_server import DEVICE

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
    fill_order(order, starts(queries), lengths, group, paged=paged)
    places = sorted(range(len(requests)), key=lambda b: -keys[b])
    assert request_order.tolist() == places, "equal ones keep their order"
    tiles = [-(-queries[b] * group // TILE_ROWS) for b in places]
    assert tile_offsets.tolist() == starts(tiles).tolist()
