"""A pass with prompts and requests of one query splits the keys of these and tiles the others."""

from dataclasses import replace

import pytest
import torch
from attn_core.runtime.batch import ForwardMode
from attn_core.runtime.graphs import without_host_lengths

pytest.importorskip("triton")

from attn_core.backends.triton import scheduler
from attn_core.backends.triton.variants import kernels_of
from triton_passes import DEVICE, Requests, make_layer

LENGTHS, QUERIES = [90, 150, 300, 64, 1], [1, 70, 1, 64, 1]


@pytest.fixture(autouse=True)
def short_requests_are_split(monkeypatch):
    monkeypatch.setattr(scheduler, "unsplit_keys_on", lambda device: 0)


def planned(requests, batch, **config):
    [schedule] = requests.backend(**config).init_forward_metadata(batch).values()
    return schedule


def make_requests(**layer):
    return Requests(make_layer(dim=64, **layer), LENGTHS, page=16, dtype="fp16")


@pytest.mark.parametrize("mode", [ForwardMode.MIXED, ForwardMode.EXTEND])
@pytest.mark.parametrize(
    "layer",
    [
        {},
        {"sliding_window": 40, "logit_cap": 5.0},
        {"sinks": torch.linspace(-1, 1, 8).to(DEVICE)},
    ],
    ids=["plain", "window", "sinks"],
)
def test_a_mixed_pass_equals_float64(mode, layer):
    requests = make_requests(**layer)
    batch = requests.batch(QUERIES, mode=mode)
    q = requests.draw(sum(QUERIES))
    requests.check(requests.attend(batch, q), q, QUERIES)


def test_both_parts_have_the_work_of_their_own_requests():
    requests = make_requests()
    schedule = planned(requests, requests.batch(QUERIES))
    units = schedule.split.work_indptr.diff().tolist()
    assert [n > 0 for n in units] == [n == 1 for n in QUERIES]
    assert schedule.tiles.min_queries == 2


@pytest.mark.parametrize("queries", [[70, 70, 2, 64, 0], [1, 1, 1, 1, 1]])
def test_a_pass_of_one_kind_has_one_part(queries):
    requests = make_requests()
    batch = requests.batch(queries, [max(*pair) for pair in zip(queries, LENGTHS, strict=True)])
    schedule = planned(requests, batch)
    split, tiles = schedule.split, schedule.tiles
    assert (split is None) != (tiles is None)
    assert not (split.cuts.max_queries if split else tiles.min_queries)


def test_where_lengths_are_on_the_device_the_mode_says_whether_a_pass_is_mixed():
    requests = make_requests()
    for mode in (ForwardMode.MIXED, ForwardMode.EXTEND):
        batch = without_host_lengths(requests.batch(QUERIES, mode=mode))
        schedule = planned(requests, replace(batch, query_lens_host=None))
        assert (schedule.split is not None) == (mode is ForwardMode.MIXED)


def test_a_deterministic_pass_is_not_mixed():
    """Whether a request is split must not depend on its neighbours."""
    requests = make_requests()
    schedule = planned(requests, requests.batch(QUERIES), deterministic=True)
    assert schedule.split is None


def test_requests_of_one_query_have_no_tiles_on_hopper(monkeypatch):
    hopper = kernels_of("sm90")
    if hopper == kernels_of("sm80"):
        pytest.skip("this Triton has no kernels of Hopper")
    monkeypatch.setattr(scheduler, "kernels_of", lambda arch: hopper)
    requests = make_requests(heads=2, group=4)
    schedule = planned(requests, requests.batch(QUERIES))
    tiles = [-(-n * 4 // 128) if n > 1 else 0 for n in QUERIES]
    order = schedule.tiles.request_order.tolist()
    assert order == sorted(range(5), key=lambda b: -LENGTHS[b])
    assert schedule.tiles.tile_offsets.diff().tolist() == [tiles[b] for b in order]
