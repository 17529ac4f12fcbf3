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
from first_spans import first_spans
from triton_passes import DEVICE

PAGE = GRANULE = 64


def planned(lengths, queries, shared, *, parts, turns=1, min_units=1, tile_units=0, rows=64):
    """Plan a batch whose requests share pages with the one before; return buffer and batch."""
    batch = len(lengths)
    table = torch.arange(batch * 16, dtype=torch.int32).view(batch, 16)
    for b, pages in enumerate(shared):
        table[b, :pages] = table[b - 1, :pages]
    cu = torch.tensor([0, *queries]).cumsum(0).int()
    shape = buffer_shape(batch, -(-parts // PARTS_PER_PROCESSOR))
    buffer = torch.full(shape, -7, dtype=torch.int32, device=DEVICE)
    requests = (cu.to(DEVICE), torch.tensor(lengths).int().to(DEVICE), table.to(DEVICE))
    counter = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    launch = Launch(block_m=rows, block_n=64, warps=4, stages=2)
    sharing = Sharing(GRANULE, PAGE, 4, tile_units)
    fill_spans({}, requests, buffer, counter, launch, sharing, Parts(min_units, turns, parts))
    return buffer.cpu()


def check(buffer, batch, *, parts, **more):
    """Compare the first spans with those of a search; return which spans they are."""
    indptr, number = buffer[0, : 2 * batch + 1], arguments.NUMBER.value
    expected = first_spans(indptr, spans_of(buffer), parts=parts, **more)
    got = first_spans_of(buffer)[: 16 * parts].view(parts, 16)[:, : arguments.ALL_UNITS.value + 1]
    works = (
        torch.arange(parts) * expected[:, arguments.QUOTA.value] < int(indptr[-1]) * more["turns"]
    )
    assert torch.equal(got[works], expected[works, : got.shape[1]])
    assert torch.equal(got[:, number + 1 :], expected[:, number + 1 : got.shape[1]])
    assert not got[~works, number].any(), "it is looked up, too"
    return set(got[works, number].tolist())


@pytest.mark.parametrize("parts", [1, 5, 33, 132, 264])
@pytest.mark.parametrize("turns", [1, 8])
def test_nothing_shared(parts, turns):
    lengths, queries = [700, 64, 0, 1000, 65], [1, 1, 1, 0, 1]
    buffer = planned(lengths, queries, [0] * 5, parts=parts, turns=turns, min_units=2)
    found = check(buffer, 5, parts=parts, turns=turns, min_units=2)
    assert 3 not in found, "a request without queries has no work"


@pytest.mark.parametrize("parts", [1, 7, 132])
@pytest.mark.parametrize("tile_units", [0, 4])
def test_groups_of_two_levels(parts, tile_units):
    lengths, shared = [800, 900, 640, 700, 300, 1000], [0, 4, 9, 4, 0, 0]
    more = {"parts": parts, "turns": 2, "min_units": 1 + tile_units}
    buffer = planned(lengths, [8] * 6, shared, tile_units=tile_units, **more)
    found = check(buffer, 6, **more)
    assert parts == 1 or max(found) >= 6, "a part begins in a group"
    assert spans_of(buffer)[6:8, arguments.LEVEL.value].tolist() == [1, 2]


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed):
    rng = random.Random(seed)
    batch = rng.choice([2, 3, 17, 130])
    lengths = [rng.randint(0, 1000) for _ in range(batch)]
    queries = [rng.choice([0, 1, 3]) for _ in range(batch)]
    shared = [0] + [rng.randint(0, 15) if seed % 3 else 0 for _ in range(batch - 1)]
    more = {
        "parts": rng.choice([2, 33, 132]),
        "turns": rng.choice([1, 4]),
        "min_units": rng.randint(1, 4),
    }
    buffer = planned(lengths, queries, shared, rows=rng.choice([64, 128]), **more)
    check(buffer, batch, **more)


def test_a_pass_without_work():
    buffer = planned([0, 0], [0, 0], [0, 0], parts=4)
    assert first_spans_of(buffer)[arguments.ALL_UNITS.value : 64 : 16].tolist() == [0] * 4
