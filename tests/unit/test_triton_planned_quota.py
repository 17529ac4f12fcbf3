"""The quota of latent decode: programs begin where requests do, where that costs no more."""

import itertools
import random

import pytest
import torch
from attn_core.runtime.batch import ForwardMode

pytest.importorskip("triton")

from attn_core.backends.triton.portable.plan_splits import ITEM_UNITS, plan_splits
from attn_core.backends.triton.tuning import power_of_two
from triton_passes import DEVICE, Requests, make_layer

BLOCK = 64


def plan(units, parts, least=2):
    """Return the units of the queue of work of each request, the quota, and the tile units."""
    batch = len(units)
    cu = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([n * BLOCK for n in units], dtype=torch.int32, device=DEVICE)
    out = torch.full((batch + 3,), -1, dtype=torch.int32, device=DEVICE)
    sizes = (BLOCK, 1, 0, False, True, power_of_two(batch), parts, least)
    plan_splits[(1,)](cu, lengths, out, batch, 0, *sizes)
    indptr = out.tolist()
    assert indptr[0] == 0
    return [b - a for a, b in itertools.pairwise(indptr[:-2])], *indptr[-2:]


def items(filled, units, quota, tile_units=0):
    """Return the blocks of keys of each item of each program, walking along the queue of work.

    A request begins where the program that has its first unit also has some of its keys.
    """
    ends, found, at = [], [[]], 0
    for own, real in zip(filled, units, strict=True):
        ends.append((at, at + own, real))
        at += own
    for begin, end, real in ends:
        for low in range(begin - begin % quota, end, quota):
            first = max(low - begin - tile_units, 0)
            last = min(low + quota - begin, end - begin) - tile_units
            program = low // quota
            found += [[] for _ in range(program + 1 - len(found))]
            if last > first:
                found[program].append(min(last, real) - first)
    return found


@pytest.mark.parametrize(
    ("units", "parts", "each"),
    [
        ([64] * 128, 132, [64]),  # the even quota, 63, ends in every request
        ([128] * 64, 132, [64]),
        ([512] * 16, 132, [64]),
        ([16] * 16, 132, [2]),
        ([16] * 16, 66, [4]),
        ([128] * 64, 33, [128, 128]),  # more requests than programs
        ([64] * 128, 16, [64] * 8),
        ([2], 132, [2]),
    ],
)
def test_requests_that_are_as_long_are_cut_alike(units, parts, each):
    filled, quota, tile_units = plan(units, parts)
    assert (filled, tile_units) == (units, 0)
    found = items(filled, units, quota)
    assert len(found) <= parts
    assert all(own == each for own in found)


def test_a_request_that_no_quota_divides_has_a_shorter_part():
    units = [100, 64, 0, 64, 100]
    filled, quota, tile_units = plan(units, 12)
    assert (filled, quota, tile_units) == ([102, 68, 34, 68, 102], 34, 0)  # without keys: one unit
    found = items(filled, [100, 64, 1, 64, 100], quota)
    assert found == [[34], [34], [32], [34], [30], [1], [34], [30], [34], [34], [32]]


def test_parts_with_many_short_requests_have_fewer_keys():
    units, each = [400] + [3] * 20, ITEM_UNITS.value
    filled, quota, tile_units = plan(units, 21)
    assert (filled, tile_units) == ([n + each for n in units], each)
    assert quota == -(-sum(filled) // 21)
    found = items(filled, units, quota, tile_units)
    assert found[:2] == [[quota - each], [quota]]  # each has one item, and the second no begin
    assert all(sum(own) + each * (len(own) - 1) <= quota for own in found)


def test_no_request_begins_where_no_key_of_it_is_left():
    units = [33, 30, 50]
    filled, quota, tile_units = plan(units, 3)
    assert (filled, quota, tile_units) == ([38, 35, 55], 43, 5)
    # the first part ends with the tile units of the second request
    assert items(filled, units, quota, tile_units) == [[33], [30, 8], [42]]


@pytest.mark.parametrize("seed", range(12))
def test_all_keys_are_somebodys_and_no_part_is_much_longer(seed):
    rng = random.Random(seed)
    parts, batch = rng.choice((16, 33, 66, 132)), rng.choice((1, 5, 33, 64, 200))
    spread = rng.choice((0, 1, 8, 60))
    units = [rng.randint(20, 20 + spread) for _ in range(batch)]
    filled, quota, tile_units = plan(units, parts)
    found = items(filled, units, quota, tile_units)
    assert len(found) <= parts
    assert sum(map(sum, found)) == sum(units)
    assert all(blocks > 0 for own in found for blocks in own)
    even = max(2, -(-sum(units) // parts))
    dearest = max(sum(own) + ITEM_UNITS.value * len(own) for own in found)
    assert dearest <= even + ITEM_UNITS.value * (batch / parts + 2) + 1


@pytest.mark.parametrize("processors", [1, 2, 3, 7])
@pytest.mark.parametrize("lengths", [(200, 200, 200), (300, 64, 1), (130,), (64, 288, 32, 20, 1)])
def test_latents_equal_float64_wherever_requests_are_cut(lengths, processors):
    layer = make_layer(heads=1, group=16, dim=576, v_dim=512)
    requests = Requests(layer, lengths, page=16, dtype="fp32")
    batch = requests.batch([1] * len(lengths), mode=ForwardMode.DECODE)
    q = requests.draw(len(lengths))
    requests.check(requests.attend(batch, q, multiprocessors=processors), q, [1] * len(lengths))
