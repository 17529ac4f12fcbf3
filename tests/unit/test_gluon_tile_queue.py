"""The order in which Hopper's programs take the tiles of prompts, emulated on a CPU."""

from collections import namedtuple
from itertools import groupby, product

import pytest
import torch
from emulated_gluon import HOPPER, Pointer, load, program

Config = namedtuple("Config", "HEADS")
Sizes = namedtuple("Sizes", "batch heads_at_once")


def taken(tiles, heads, at_once):
    """Return (request, head, tile) as one program takes them. tiles: of requests, in order."""
    queue = load("tile_queue", HOPPER)
    seqs = list(reversed(range(len(tiles))))
    order = queue.TileOrder(
        Pointer(torch.tensor([0, *tiles]).cumsum(0).int()),
        Pointer(torch.tensor(seqs).int()),
        Pointer(torch.zeros(2, dtype=torch.int32)),
    )
    program.id, program.count = (0,), (1,)
    sizes, config, found = Sizes(len(tiles), at_once), Config(heads), []
    item, seq = queue.next_item(order, sizes, config, True)
    while item >= 0:
        found.append((int(seq), int(item) % heads, int(item) // heads))
        item, seq = queue.next_item(order, sizes, config, False)
    return found


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("tiles", [[1], [4, 4], [0, 3, 0], [5, 1, 2, 0], [0]])
def test_every_tile_is_taken_once_and_the_longest_request_first(tiles, at_once):
    found = taken(tiles, 4, at_once)
    seqs = list(reversed(range(len(tiles))))
    whole = {
        (b, h, t) for b, n in zip(seqs, tiles, strict=True) for h, t in product(range(4), range(n))
    }
    assert len(found) == len(whole)
    assert {*found} == whole
    assert [b for b, _ in groupby(found, key=lambda x: x[0])] == [
        b for b, n in zip(seqs, tiles, strict=True) if n
    ], "no request waits until another head of those before it is done"


def test_heads_of_a_request_take_turns():
    found = taken([3, 1], 4, 2)
    first = [(h, t) for pair in ((0, 1), (2, 3)) for t in (2, 1, 0) for h in pair]
    assert found == [(1, h, t) for h, t in first] + [(0, h, 0) for h in range(4)]
