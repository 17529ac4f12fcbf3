"""Prompts on Hopper: many requests, heads that take turns, and captured passes; against float64."""

import random
from dataclasses import replace

import pytest
import torch
from attn_core.backends.triton.tuning import heads_at_once
from attn_core.runtime.graphs import without_host_lengths
from attn_core.testing.inputs import mapped
from triton_passes import DEVICE, Requests, launches, make_layer

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("dim", "page"), [(64, 16), (128, 1), (256, 64)])
def test_many_requests_some_of_them_without_queries(dim, page, fixed):
    """More than the 64 that one program puts in order."""
    rng = random.Random(dim)
    queries = [rng.choice((0, 1, 5, 129, 200)) for _ in range(150)]
    queries[0] = queries[64] = queries[149] = 0
    queries[7] = 200
    lengths = [n + rng.choice((0, 3, 100)) for n in queries]
    lengths[64] = 0
    requests = Requests(make_layer(dim=dim), lengths, page=page)
    q = requests.draw(sum(queries))
    with launches() as names:
        actual = requests.attend(requests.batch(queries), q, deterministic=fixed)
    assert {"order_requests", "extend_hopper"} <= {*names}
    requests.check(actual, q, queries)


@pytest.mark.parametrize("page", [1, 64])
def test_heads_take_turns_in_twos_of_four(page):
    lengths, queries = [12_000, 700, 9_000], [512, 300, 0]
    requests = Requests(make_layer(heads=4, group=2), lengths, page=page)
    assert heads_at_once(4, 12_000, 2 * 128 * 2) == 2
    q = requests.draw(sum(queries))
    with launches() as names:
        actual = requests.attend(requests.batch(queries), q)
    assert "extend_hopper" in names
    requests.check(actual, q, queries)


@pytest.mark.parametrize(
    ("dim", "page", "more"),
    [
        (64, 64, {}),
        (128, 1, {}),
        (128, 16, {"logit_cap": 30.0}),
        (256, 64, {}),
        (128, 64, {"sinks": torch.linspace(-1, 12, 8)}),
    ],
    ids=str,
)
def test_keys_of_long_tiles_are_cut(dim, page, more):
    """A sink counts once, whatever the parts; a part that begins in a tile's own queries too."""
    more = {k: v.to(DEVICE) if k == "sinks" else v for k, v in more.items()}
    lengths, queries = [9_000, 300, 2_500, 1_300, 70], [130, 200, 1, 600, 0]
    requests = Requests(make_layer(dim=dim, **more), lengths, page=page)
    q = requests.draw(sum(queries))
    with launches() as names:
        actual = requests.attend(requests.batch(queries), q)
    assert {"extend_hopper", "merge_tiles"} <= {*names}
    requests.check(actual, q, queries)
    again = requests.attend(requests.batch(queries), q)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True)), "whoever took them"


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_sums_shrink_where_maxima_grow(dim):
    """By more than what leaves them as they are, in some rows of a warp and in none of another."""
    lengths = queries = [700, 2_100, 90]
    requests = Requests(make_layer(dim=dim), lengths, page=64)
    q = requests.draw(sum(queries))
    q[:1500] *= 8
    with launches() as names:
        actual = requests.attend(requests.batch(queries), q)
    assert "extend_hopper" in names
    requests.check(actual, q, queries)


def test_no_keys_are_cut_in_deterministic_mode():
    """A request has the same bits alone and beside others."""
    lengths, queries = [9_000, 300], [130, 200]
    requests = Requests(make_layer(), lengths, page=64)
    q = requests.draw(sum(queries))
    with launches() as names:
        actual = requests.attend(requests.batch(queries), q, deterministic=True)
    assert "merge_tiles" not in names
    requests.check(actual, q, queries)
    alone = requests.attend(requests.batch([0, 200]), q[130:], deterministic=True)
    assert all(torch.equal(a[130:], b) for a, b in zip(actual, alone, strict=True))


@pytest.mark.parametrize("page", [1, 16])
def test_a_captured_pass_of_many_queries_serves_other_lengths(page):
    """One graph, whose requests have other queries and other keys at each replay."""
    requests = Requests(make_layer(), [700, 1500, 900], page=page)
    layer, total = requests.layer, 600
    backend = requests.backend()
    room = requests.table.shape[1] * page
    batch = without_host_lengths(requests.batch([200, 200, 200], [200, 200, 200]))
    view = replace(batch.views["full"], max_seq_len=room)
    static = mapped(replace(batch, views={"full": view}), torch.Tensor.clone)
    backend.init_cuda_graph_state(3, total)
    plan = backend.init_forward_metadata_capture_cuda_graph(static)
    q, out = requests.draw(total), requests.draw(total)

    def run():
        tokens = (q, None, None, layer, requests.cache, static, plan)
        return backend.forward(*tokens, out=out, return_lse=True)

    with launches() as names:
        replay, lse = captured(run)
    assert "extend_hopper" in names or DEVICE.type == "cpu"
    for seed, queries, lengths in (
        (2, [200, 200, 200], [700, 200, 201]),
        (3, [1, 399, 200], [1, 1500, 900]),
        (4, [0, 600, 0], [5, 600, 0]),
        (5, [598, 1, 1], [700, 1, 900]),
    ):
        fresh = requests.batch(queries, lengths)
        static.cu_seqlens_q.copy_(fresh.cu_seqlens_q)
        static.positions.copy_(fresh.positions)
        static.views["full"].seq_lens.copy_(fresh.views["full"].seq_lens)
        q.copy_(requests.draw(total, seed))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        backend.init_forward_metadata_replay_cuda_graph(static, plan)
        replay()
        requests.check((out, lse), q, queries, lengths)


def captured(run):
    """Capture `run` in a graph; return what replays it, and the LSE that it fills."""
    if DEVICE.type == "cpu":
        lse = run()[1]
        return lambda: lse.copy_(run()[1]), lse
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = run()
    return graph.replay, lse
