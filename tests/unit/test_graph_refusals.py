"""What is not captured is refused with a sentence, at the capture or at the replay."""

import dataclasses

import pytest
import torch
from attn_core import BatchError, ForwardBatch, GraphRunner, UnsupportedError, UsageError
from graph_passes import DRAFTS, SIZE, TREE, nothing, passing, recorded
from recording import M, make
from recording import batch as small_batch


def without_slots(batch):
    views = {n: dataclasses.replace(v, out_cache_loc=None) for n, v in batch.views.items()}
    return dataclasses.replace(batch, views=views)


def of_pages(batch, size):
    views = {n: dataclasses.replace(v, page_size=size) for n, v in batch.views.items()}
    return dataclasses.replace(batch, views=views)


REFUSED = [
    (small_batch(M.EXTEND), r"extend of 2 queries per request is not captured \(is: decode of 1, "),
    (passing(M.DECODE, [0, 1, 2], [1, 1, 1]), "3 requests: graphs are captured for up to 2"),
    (passing(M.DECODE, [0], [9]), "view 'full': lengths up to 9, the static page table holds 8"),
    (without_slots(passing(M.DECODE, [0], [5])), r"has no out_cache_loc"),
    (passing(M.DECODE, [0], [5], views=()), r"no view 'window' \(has \['full'\]\)"),
    (of_pages(passing(M.DECODE, [0], [5]), 8), "view 'full' was built for pages of 8, not of 4"),
    (
        passing(M.TARGET_VERIFY, [0], [5], new=DRAFTS, tree=TREE),
        "chains, without a tree_mask, was captured",
    ),
    (
        dataclasses.replace(
            passing(M.DECODE, [0], [5]), state_slots=torch.ones(1, dtype=torch.int32)
        ),
        "state_slots are not captured",
    ),
]


@pytest.mark.parametrize(("batch", "message"), REFUSED, ids=[m[:12] for _, m in REFUSED])
def test_a_pass_that_does_not_fit_is_refused(batch, message):
    runner = GraphRunner(
        make("decode", decode=recorded(drafts=DRAFTS))[0], batch_sizes=[2, 1], max_seq_len=8
    )
    runner.capture(M.DECODE, nothing)
    runner.capture(M.TARGET_VERIFY, nothing)
    assert not runner.fits(batch)
    with pytest.raises(UnsupportedError, match=message + ".*; run the pass eagerly"):
        runner.replay(batch)


def test_a_ragged_pass_is_refused():
    runner = GraphRunner(make("decode")[0], batch_sizes=[2], max_seq_len=8, max_query_len=2)
    runner.capture(M.DRAFT_EXTEND, nothing, query_len=2)
    table = torch.tensor([[1], [2]], dtype=torch.int32)
    ragged = ForwardBatch.build(
        M.DRAFT_EXTEND, query_lens=[2, 1], seq_lens=[4, 4], page_table=table, page_size=SIZE
    )
    with pytest.raises(UnsupportedError, match="3 tokens of 2 requests: not 2 for each; run"):
        runner.replay(ragged)


@pytest.mark.parametrize(
    ("level", "mode", "message"),
    [
        ("never", M.DECODE, r"decode passes run on decoder, which is not captured"),
        ("decode", M.TARGET_VERIFY, "needs cuda_graph 'uniform', .* decoder has 'decode'"),
        ("uniform", M.EXTEND, "extend passes run on prefiller, which is not captured"),
    ],
)
def test_a_level_that_the_row_does_not_reach_is_refused(level, mode, message):
    decoder = recorded(drafts=DRAFTS, cuda_graph=level)
    runner = GraphRunner(make("decode", decode=decoder)[0], batch_sizes=[1], max_seq_len=8)
    asked = {M.EXTEND: 2}.get(mode)
    with pytest.raises(UnsupportedError, match=message):
        runner.capture(mode, nothing, query_len=asked)
    assert not runner.fits(passing(M.DECODE, [0], [2]))


def test_inputs_of_another_shape_are_refused():
    runner = GraphRunner(make()[0], batch_sizes=[2], max_seq_len=8)
    runner.capture(M.DECODE, lambda b, m, x: x, inputs=[torch.ones(1, 3)])
    one = passing(M.DECODE, [0], [2])
    with pytest.raises(BatchError, match="0 inputs, the captured step takes 1"):
        runner.replay(one)
    with pytest.raises(BatchError, match=r"input 0 is \[2, 3\] \(expected \[1, 3\]\)"):
        runner.replay(one, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("mode", "asked", "message"),
    [
        (M.IDLE, None, "an idle pass has no tokens"),
        (M.DRAFT_EXTEND, None, "draft_extend passes of None queries .*query_len 1 to"),
        (M.DRAFT_EXTEND, 9, "of 9 queries per request, max_query_len 3"),
        (M.TARGET_VERIFY, 2, "of 2 queries .*expected query_len 3"),
        (M.DECODE, 2, "of 2 queries .*expected query_len 1"),
    ],
)
def test_a_step_of_other_lengths_is_refused(mode, asked, message):
    decoder = recorded(drafts=DRAFTS)
    runner = GraphRunner(make("decode", decode=decoder)[0], batch_sizes=[1], max_seq_len=8)
    with pytest.raises(UsageError, match=message):
        runner.capture(mode, nothing, query_len=asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"batch_sizes": []}, r"batch_sizes \[\]"),
        ({"batch_sizes": [0, 1]}, r"batch_sizes \[0, 1\]"),
        ({"max_query_len": 0}, "max_query_len 0"),
        ({"max_seq_len": {"full": 8}}, "view 'window': max_seq_len 0"),
    ],
)
def test_sizes_below_one_are_refused(asked, message):
    def capture():
        runner = GraphRunner(make()[0], **{"batch_sizes": [1], "max_seq_len": 8, **asked})
        runner.capture(M.DECODE, nothing)

    with pytest.raises(UsageError, match=message):
        capture()
