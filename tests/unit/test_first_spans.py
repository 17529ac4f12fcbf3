"""The plan of shared prefixes names the span that each part of the work begins in."""

import random

import pytest
import torch

pytest.importorskip("triton")

from attn_core.backends.triton.portable import arguments
from attn_core.backends.triton.shared import (
    PARTS_PER_PROCESSOR,
    Parts,
    Sharing,
    buffer_shape,
    fill_spans,
    first_spans_of,
    spans_of,
)
from attn_core.backends.triton.tuning import Launch
from first_spans import FIELDS, FIRST_BLOCK, PAGES, first_spans
from triton_passes import DEVICE

PAGE = 64


def planned(
    lengths, queries, shared, *, parts, turns=1, min_units=1, tile_units=0, rows=64, page=PAGE,
    block=64,
):  # fmt: skip
    """Plan a batch whose requests share granules with the one before; return buffer and table."""
    batch, columns, granule = len(lengths), 1024 // page, max(page, block)
    table = torch.arange(batch * columns, dtype=torch.int32).view(batch, columns)
    for b, granules in enumerate(shared):
        shared_pages = granules * granule // page
        table[b, :shared_pages] = table[b - 1, :shared_pages]
    cu = torch.tensor([0, *queries]).cumsum(0).int()
    shape = buffer_shape(batch, -(-parts // PARTS_PER_PROCESSOR))
    buffer = torch.full(shape, -7, dtype=torch.int32, device=DEVICE)
    requests = (cu.to(DEVICE), torch.tensor(lengths).int().to(DEVICE), table.to(DEVICE))
    counter = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    launch = Launch(block_m=rows, block_n=block, warps=4, stages=2)
    sharing = Sharing(granule, page, 4, tile_units)
    fill_spans({}, requests, buffer, counter, launch, sharing, Parts(min_units, turns, parts))
    return buffer.cpu(), table


def check(buffer, table, *, parts, **more):
    """Compare the first spans with those of a search; return which spans they are."""
    batch, number, quota = len(table), arguments.NUMBER.value, arguments.QUOTA.value
    indptr = buffer[0, : 2 * batch + 1]
    expected = first_spans(indptr, spans_of(buffer), parts=parts, table=table, **more)
    got = first_spans_of(buffer)[: FIELDS * parts].view(parts, FIELDS)
    works = torch.arange(parts) * expected[:, quota] < int(indptr[-1]) * more["turns"]
    assert torch.equal(got[works, : FIRST_BLOCK + 1], expected[works, : FIRST_BLOCK + 1])
    all_of_both = [arguments.ALL_UNITS.value, quota, FIRST_BLOCK]
    assert torch.equal(got[:, all_of_both], expected[:, all_of_both])
    assert not got[~works, number].any(), "it is looked up, too"
    known = got[:, FIRST_BLOCK] >= 0
    count = max(more.get("block", 64) // more.get("page", PAGE), 1)
    pages = slice(PAGES, PAGES + count)
    assert torch.equal(got[known, pages], expected[known, pages])
    return set(got[works, number].tolist())


@pytest.mark.parametrize("parts", [1, 5, 33, 132, 264])
@pytest.mark.parametrize("turns", [1, 8])
def test_nothing_shared(parts, turns):
    lengths, queries = [700, 64, 0, 1000, 65], [1, 1, 1, 0, 1]
    plan = planned(lengths, queries, [0] * 5, parts=parts, turns=turns, min_units=2)
    found = check(*plan, parts=parts, turns=turns, min_units=2)
    assert 3 not in found, "a request without queries has no work"


@pytest.mark.parametrize("parts", [1, 7, 132])
@pytest.mark.parametrize("tile_units", [0, 4])
def test_groups_of_two_levels(parts, tile_units):
    lengths, shared = [800, 900, 640, 700, 300, 1000], [0, 4, 9, 4, 0, 0]
    more = {"parts": parts, "turns": 2, "min_units": 1 + tile_units, "tile_units": tile_units}
    plan = planned(lengths, [8] * 6, shared, **more)
    found = check(*plan, **more)
    assert parts == 1 or max(found) >= 6, "a part begins in a group"
    assert spans_of(plan[0])[6:8, arguments.LEVEL.value].tolist() == [1, 2]


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed):
    rng = random.Random(seed)
    batch = rng.choice([2, 3, 17, 130])
    lengths = [rng.randint(0, 1000) for _ in range(batch)]
    queries = [rng.choice([0, 1, 3]) for _ in range(batch)]
    shared = [0] + [rng.randint(0, 8) if seed % 3 else 0 for _ in range(batch - 1)]
    tile_units = rng.choice([0, 1, 4])
    more = {
        "parts": rng.choice([2, 33, 132]),
        "turns": rng.choice([1, 4]),
        "min_units": rng.randint(1, 4) + tile_units,
        "tile_units": tile_units,
        "page": rng.choice([1, 4, 8, 16, 64, 128]),
        "block": rng.choice([64, 128]),
    }
    plan = planned(lengths, queries, shared, rows=rng.choice([64, 128]), **more)
    check(*plan, **more)


@pytest.mark.parametrize("quota", [2, 3, 5, 7])
@pytest.mark.parametrize("tile_units", [0, 1])
def test_parts_of_a_tile_begin_with_the_same_key(quota, tile_units):
    """Of a group of 12 requests with 15 blocks: its parts begin where their windows end."""
    rows = -(-12 * 4 * 8 // 64)  # tiles of the group, and each request has a block of its own
    units = 12 * (1 + tile_units) + rows * (15 + tile_units)
    more = {"parts": -(-units // quota), "turns": 1, "min_units": 1, "tile_units": tile_units}
    buffer, table = planned([15 * 64 + 8] * 12, [8] * 12, [0] + [15] * 11, **more)
    check(buffer, table, **more)
    fields = first_spans_of(buffer)[: FIELDS * more["parts"]].view(-1, FIELDS)
    group = fields[fields[:, arguments.LEVEL.value] == 1]
    blocks = group[:, FIRST_BLOCK]
    ends = blocks % quota == quota - 1
    assert len(group) > rows
    assert ends.sum() > 0.6 * len(group), "but for parts of few blocks"


def test_a_pass_without_work():
    buffer, _ = planned([0, 0], [0, 0], [0, 0], parts=4)
    fields = first_spans_of(buffer)[: 4 * FIELDS].view(4, FIELDS)
    assert fields[:, arguments.ALL_UNITS.value].tolist() == [0] * 4
    assert fields[:, arguments.FIRST_BLOCK.value].tolist() == [-1] * 4
