"""A captured step, replayed with other requests, is the eager step; padding stays out of sight."""

import dataclasses
from functools import cache
from typing import NamedTuple

import pytest
import torch
from attn_core import GraphRunner, HybridDispatcher, KVPool, UsageError
from attn_core.runtime.graphs import without_host_lengths
from graph_passes import (
    DRAFTS,
    FILL,
    PAGES,
    PASSES,
    REQUESTS,
    ROOM,
    SIZE,
    TREE,
    nothing,
    passing,
    recorded,
)
from graphed import Graphed
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import Operators
from recording import CONFIG, LAYERS, M, make, qkv
from recording import batch as small_batch

pytestmark = pytest.mark.usefixtures("no_printing")


class Named(NamedTuple):
    """What a step may return: a tuple with names."""

    tokens: torch.Tensor
    all: list[torch.Tensor]


def serving(topk):
    """Return a dispatcher over a pool of random numbers, and the step of its two layers."""
    config = dataclasses.replace(CONFIG, topk=topk, num_draft_tokens=DRAFTS)
    roles = dict.fromkeys(("prefill", "decode", "verify", "draft"), Graphed(config))
    pool = KVPool(LAYERS, num_pages=1 + REQUESTS * PAGES, page_size=SIZE, kv_cache_dtype="fp32")
    for layer in LAYERS:
        for t, _ in pool.layer(layer.layer_id).parts():
            t.normal_(generator=torch.Generator().manual_seed(layer.layer_id))
    dispatcher = HybridDispatcher(roles, pool)

    def run(batch, metadata, q, k, v):
        return [dispatcher.forward(q, k, v, layer, batch, metadata) for layer in LAYERS]

    return dispatcher, run


@cache
def captured_once(topk):
    """Return what all examples share, so that each replay follows those of others."""
    dispatcher, run = serving(topk)
    runner = GraphRunner(dispatcher, batch_sizes=[1, 2, REQUESTS], max_seq_len=ROOM)
    for mode, new in PASSES:
        runner.capture(mode, run, inputs=qkv(1), query_len=new)
    return dispatcher, run, runner


def contents(pool):
    return [t.clone() for x in LAYERS for t, _ in pool.layer(x.layer_id).parts()]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), topk=st.sampled_from([1, 2]), which=st.sampled_from(PASSES))
def test_a_replay_is_the_eager_step_and_touches_nothing_else(data, topk, which):
    mode, new = which
    dispatcher, run, runner = captured_once(topk)
    requests = data.draw(
        st.lists(st.integers(0, REQUESTS - 1), unique=True, min_size=1, max_size=REQUESTS)
    )
    lengths = [data.draw(st.integers(new, ROOM)) for _ in requests]
    tree = TREE if topk > 1 and mode is M.TARGET_VERIFY else None
    batch = passing(mode, requests, lengths, new=new, tree=tree)
    if data.draw(st.booleans()):
        batch = without_host_lengths(batch)
    inputs = qkv(len(requests) * new)
    assert runner.fits(batch)
    before = contents(dispatcher.caches)
    eager = run(batch, dispatcher.init_forward_metadata(batch), *inputs)
    after = contents(dispatcher.caches)
    for layer, old in zip(LAYERS, zip(before[::2], before[1::2], strict=True), strict=True):
        for (t, _), x in zip(dispatcher.caches.layer(layer.layer_id).parts(), old, strict=True):
            t.copy_(x)
            t[0] = torch.nan  # what padding reads must not reach a request
    replayed = runner.replay(batch, *inputs)
    for mine, right in zip(replayed, eager, strict=True):
        torch.testing.assert_close(mine, right)
    for mine, right in zip(contents(dispatcher.caches), after, strict=True):
        assert torch.equal(mine[1:], right[1:]), "a page that is no request's was written"


@pytest.mark.parametrize(("mode", "new"), PASSES)
def test_padded_requests_are_dummies_whatever_was_replayed_before(mode, new):
    dispatcher, _, decoder = make("decode", decode=recorded(topk=2, drafts=DRAFTS))
    seen = []
    runner = GraphRunner(dispatcher, batch_sizes=[REQUESTS], max_seq_len=ROOM)
    runner.capture(
        mode, lambda b, m, x: seen.append((b, x.clone())) or x, inputs=[torch.ones(1, 2)],
        query_len=new,
    )  # fmt: skip
    tree = TREE if mode is M.TARGET_VERIFY else None
    every = passing(mode, range(REQUESTS), [ROOM] * REQUESTS, new=new, tree=tree)
    runner.replay(every, torch.ones(REQUESTS * new, 2))
    one = passing(mode, [3], [7], new=new, tree=tree)
    got = runner.replay(one, torch.full((new, 2), 5.0))
    assert torch.equal(got, torch.full((new, 2), 5.0))
    batch, x = seen[-1]
    assert not x[new:].any()
    length = max(FILL, new)
    for name in ("full", "window"):
        view = batch.views[name]
        assert torch.equal(view.page_table[0], one.views[name].page_table[0])
        assert not view.page_table[1:].any()
        assert view.seq_lens.tolist() == [7, *[length] * 3]
        assert not view.out_cache_loc[new:].any()
        assert view.out_cache_loc[:new].tolist() == one.views[name].out_cache_loc.tolist()
    assert batch.positions.tolist() == [
        *one.positions.tolist(),
        *[*range(length - new, length)] * 3,
    ]
    assert batch.cu_seqlens_q.tolist() == [i * new for i in range(REQUESTS + 1)]
    if tree is not None:
        assert torch.equal(batch.spec.tree_mask[0], TREE)
        assert batch.spec.tree_mask[1:].diagonal(dim1=1, dim2=2).all()
    planned = decoder.calls[-1][1][0]
    assert planned.views["full"].seq_lens_host == (7, *[length] * 3)
    assert planned.views["full"].max_seq_len == max(7, length)
    assert planned.query_lens_host == (new,) * REQUESTS
    assert planned.views["full"].page_table.data_ptr() == batch.views["full"].page_table.data_ptr()


def test_columns_of_a_wider_table_are_gone():
    seen = []
    runner = GraphRunner(make()[0], batch_sizes=[2], max_seq_len=ROOM)
    runner.capture(M.DECODE, lambda b, m: seen.append(b))
    runner.replay(passing(M.DECODE, [0, 1], [ROOM, ROOM]))
    narrow = small_batch(M.DECODE)  # two columns
    runner.replay(narrow)
    for name, view in narrow.views.items():
        static = seen[-1].views[name].page_table
        assert torch.equal(static[:, :2], view.page_table)
        assert not static[:, 2:].any()


def test_a_wide_table_of_short_requests_fits():
    runner = GraphRunner(make()[0], batch_sizes=[2], max_seq_len=SIZE)
    runner.capture(M.DECODE, nothing)
    assert runner.fits(passing(M.DECODE, [0, 1], [2, SIZE]))
    assert runner.replay(passing(M.DECODE, [0, 1], [2, SIZE])) is None


def test_lengths_known_on_the_device_only_stay_there():
    dispatcher, _, decoder = make()
    runner = GraphRunner(dispatcher, batch_sizes=[2], max_seq_len=ROOM)
    runner.capture(M.DECODE, nothing)
    runner.replay(without_host_lengths(passing(M.DECODE, [0], [5])))
    planned = decoder.calls[-1][1][0]
    assert planned.views["full"].seq_lens_host is None
    assert planned.views["full"].seq_lens.tolist() == [5, FILL]


def test_the_buffers_of_backends_are_created_once_for_the_largest_batch():
    dispatcher, _, decoder = make("decode", decode=recorded(drafts=DRAFTS))
    runner = GraphRunner(dispatcher, batch_sizes=[8, 2, 2], max_seq_len=8)
    assert runner.batch_sizes == [2, 8]
    assert [x for x in decoder.calls if x[0] == "init_cuda_graph_state"] == [
        ("init_cuda_graph_state", (8, 8 * DRAFTS), {})
    ]


def test_outputs_keep_their_form_and_lose_the_padded_rows():
    runner = GraphRunner(
        make("decode", decode=recorded(drafts=DRAFTS))[0], batch_sizes=[4], max_seq_len=8
    )
    runner.capture(
        M.TARGET_VERIFY,
        lambda b, m, x: {"tokens": x, "each": (x[::DRAFTS], None), "named": Named(x, [x])},
        inputs=[torch.ones(1)],
    )
    x = torch.arange(2.0 * DRAFTS)
    got = runner.replay(passing(M.TARGET_VERIFY, [0, 1], [4, 4], new=DRAFTS), x)
    assert torch.equal(got["tokens"], x)
    assert torch.equal(got["each"][0], x[::DRAFTS])
    assert got["each"][1] is None
    assert torch.equal(got["named"].tokens, x)
    assert torch.equal(got["named"].all[0], x)
    for wrong, message in ((torch.ones(3), r"of 4 requests returned \[3\]"), (1, "returned int")):
        with pytest.raises(UsageError, match=message):
            runner.capture(M.DECODE, lambda b, m, wrong=wrong: wrong)


def test_a_replay_copies_each_table_and_each_dtype_once_and_reads_nothing_back():
    runner = GraphRunner(make()[0], batch_sizes=[2], max_seq_len=ROOM)
    runner.capture(M.DECODE, lambda b, m, *x: x, inputs=qkv(1))
    batch, inputs = passing(M.DECODE, [0, 1], [3, 4]), qkv(2)
    with Operators() as ops:
        runner.replay(batch, *inputs)
    ran = [x for x in ops.names if x not in ("slice", "detach", "alias")]
    assert ran == ["copy_"] * 2 + ["_foreach_copy_"] * 3, "tables; int32, int64 and the inputs"
