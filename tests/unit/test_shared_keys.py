"""What requests read together is counted when somebody asks, from the plan on the device."""

import pytest
import torch
from attn_core.runtime.batch import ForwardMode
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.shared_keys import SharedKeys

pytest.importorskip("triton")

from attn_core.backends.triton import scheduler
from attn_core.backends.triton import shared as SHARED
from sharers import GRANULE, Sharers, random_trees, verify
from triton_passes import make_layer

M = ForwardMode


@pytest.fixture(autouse=True)
def small_granule(monkeypatch):
    """Share from 64 keys on, and split short requests wherever this runs."""
    monkeypatch.setattr(SHARED, "shared_granule", lambda *args: GRANULE)
    monkeypatch.setattr(scheduler, "unsplit_keys_on", lambda device: 0)


def serve(sharers, **config):
    """Return a dispatcher over the cache of some requests, asked for shared prefixes or not."""
    backend = sharers.backend(**{"shared_prefix": True, **config})
    return HybridDispatcher(dict.fromkeys(("prefill", "decode", "verify"), backend), sharers.pool)


def decode(sharers):
    return sharers.batch([1] * len(sharers.lengths), mode=M.DECODE)


def counted_naively(sharers, spans, lengths):
    """Return what SharedKeys says, of spans (first, requests, begin, end, level)."""
    tokens = sum(n * (end - begin) for _, n, begin, end, _ in spans)
    read = sum(end - begin for _, _, begin, end, _ in spans)
    grouped = sum(n for _, n, _, _, level in spans if level == 1)
    return SharedKeys("triton", len(lengths), grouped, tokens, read, (tokens - read) / sum(lengths))


@pytest.mark.parametrize(
    ("lengths", "shared", "spans"),
    [
        ([200, 230, 257, 193], [0, 8, 8, 8], [(0, 4, 0, 128, 1)]),
        ([200, 190, 150, 180, 171], [0, 8, 0, 5, 5], [(0, 2, 0, 128, 1), (2, 3, 0, 64, 1)]),
        (
            [300, 280, 310, 290],
            [0, 12, 4, 12],
            [(0, 4, 0, 64, 1), (0, 2, 64, 192, 2), (2, 2, 64, 192, 2)],
        ),
        ([200, 190, 150], [0, 0, 0], []),
    ],
    ids=["one group", "two groups", "levels", "nothing"],
)
def test_a_pass_says_what_it_read_together(lengths, shared, spans):
    sharers = Sharers(make_layer(1, dim=32), lengths, shared, page=16)
    server = serve(sharers)
    assert server.shared_keys is None
    server.init_forward_metadata(decode(sharers))
    assert server.shared_keys == counted_naively(sharers, spans, lengths)


def test_replays_are_counted_by_what_they_share():
    """Nothing but the plan on the device says it: the batch of a graph is overwritten in place."""
    layer = make_layer(dim=32)
    sharers = Sharers(layer, [300, 290, 280, 270], [0, 12, 12, 4], page=16)
    server = serve(sharers)
    server.init_cuda_graph_state(8, 8)  # buffers of more requests than the graph has
    batch = decode(sharers)
    metadata = server.init_forward_metadata_capture_cuda_graph(batch)
    view = batch.views["full"]
    for lengths, shared, spans in [
        ([250, 290, 100, 210], [0, 0, 0, 0], []),
        ([290, 300, 128, 200], [0, 9, 0, 5], [(0, 2, 0, 128, 1), (2, 2, 0, 64, 1)]),
        ([1, 300, 300, 1], [0, 0, 18, 0], [(1, 2, 0, 256, 1)]),
        ([250, 290, 100, 210], [0, 0, 0, 0], []),
    ]:
        other = Sharers(layer, lengths, shared, page=16)
        view.page_table.zero_()
        view.page_table[:, : other.table.shape[1]] = other.table
        view.seq_lens.copy_(torch.tensor(lengths))
        server.init_forward_metadata_replay_cuda_graph(batch, metadata)
        assert server.shared_keys == counted_naively(other, spans, lengths)


def test_prompts_between_do_not_hide_the_last_decode():
    sharers = Sharers(make_layer(1, dim=32), [200, 190], [0, 8], page=16)
    server = serve(sharers)
    server.init_forward_metadata(decode(sharers))
    found = server.shared_keys
    assert found.grouped == 2
    server.init_forward_metadata(sharers.batch([40, 30], mode=M.EXTEND))
    assert server.shared_keys == found


def test_a_pass_of_a_backend_that_does_not_share_is_not_the_pass_before():
    sharers = Sharers(make_layer(1, dim=32), [200, 190], [0, 8], page=16)
    shares, alone = sharers.backend(shared_prefix=True), sharers.backend(num_draft_tokens=4)
    routes = {"prefill": shares, "decode": shares, "verify": alone}
    server = HybridDispatcher(routes, sharers.pool)
    server.init_forward_metadata(decode(sharers))
    assert server.shared_keys.grouped == 2
    chain = sharers.batch([4, 4], mode=M.TARGET_VERIFY, spec=verify(4, None))
    server.init_forward_metadata(chain)
    assert server.shared_keys is None


def test_drafts_are_counted_with_their_requests():
    sharers = Sharers(make_layer(1, dim=32), [134, 140, 130, 270], [0, 8, 8, 4], page=16)
    trees = random_trees(4, 8)
    server = serve(sharers, topk=2, num_draft_tokens=8)
    server.init_forward_metadata(
        sharers.batch([8] * 4, mode=M.TARGET_VERIFY, spec=verify(8, trees))
    )
    assert server.shared_keys == counted_naively(sharers, [(0, 4, 0, 64, 1)], [134, 140, 130, 270])


def test_without_groups_there_is_nothing_to_count():
    sharers = Sharers(make_layer(1, dim=32), [200, 190], [0, 8], page=16)
    server = serve(sharers, shared_prefix=False)
    server.init_forward_metadata(decode(sharers))
    assert server.shared_keys is None, "no plan is kept for nobody"
    server = serve(sharers, deterministic=True)
    server.init_forward_metadata(decode(sharers))
    assert server.shared_keys == SharedKeys("triton", 2, 0, 0, 0, 0.0)


def test_layers_with_a_window_take_their_part_of_the_bytes():
    """Two of three layers read the last 70 keys of a request, and share none of them."""
    layer = make_layer(1, dim=32)
    sharers = Sharers(layer, [200, 190, 60], [0, 8, 0], page=16)
    backend = sharers.backend(shared_prefix=True)
    windows = tuple(make_layer(1, dim=32, sliding_window=70) for _ in range(2))
    config = backend.config
    three = type(backend)(type(config)(**{**vars(config), "layers": (*config.layers, *windows)}))
    found = three.shared_keys(three.init_forward_metadata(decode(sharers)))
    assert found[1:5] == (3, 2, 256, 128)
    assert found.saved == pytest.approx(128 / (450 + 2 * (70 + 70 + 60)))
