"""What the host does for a pass and for a layer is bounded: calls are counted, as time is noisy.

A text that is made before there is an error, a check that reads a tensor, a selection that is made
anew: each is hundreds of calls more, in every step of an engine.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from attn_core import ForwardBatch, ForwardMode
from attn_core.integrations.vllm.passes import PassBuilder
from attn_core.runtime.batch import CacheView
from recording import make, qkv

B = 2


def calls_of(run):
    """Return how many calls, Python's and C's, one run takes."""
    run()  # what is found once
    counted = 0

    def count(frame, event, arg):
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted


def view():
    table = torch.zeros(B, 2, dtype=torch.int32)
    slots, lengths = torch.arange(B), torch.tensor([3, 5], dtype=torch.int32)
    return CacheView(page_table=table, seq_lens=lengths, out_cache_loc=slots, max_seq_len=5)


def decode(views):
    starts = torch.arange(B + 1, dtype=torch.int32)
    positions = torch.tensor([2, 4])
    return lambda: ForwardBatch(
        forward_mode=ForwardMode.DECODE, cu_seqlens_q=starts, positions=positions, max_q_len=1,
        views=views,
    )  # fmt: skip


def test_a_batch():
    views = {"full": view(), "window": view()}
    assert calls_of(view) < 60
    assert calls_of(decode(views)) < 90


def test_a_plan_and_a_layer_after_the_first():
    dispatcher, _pre, dec = make("decode")
    batch = decode({"full": view(), "window": view()})()
    assert calls_of(lambda: dispatcher.init_forward_metadata(batch)) < 60
    plan = dispatcher.init_forward_metadata(batch)
    q, k, v = qkv(B)
    layer = dec.config.layers[0]
    forward = calls_of(lambda: dispatcher.forward(q, k, v, layer, batch, plan))
    assert forward < 100


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_step_of_vllm_that_a_graph_replays(drafts):
    queries = drafts or 1
    dispatcher = make("decode")[0]
    roles = {role: SimpleNamespace(row=b.config.row) for role, b in dispatcher.routes.items()}
    passes = PassBuilder(
        lambda: dispatcher, SimpleNamespace(roles=roles), device=torch.device("cpu"), page_size=4,
        drafts=drafts, max_bs=B, max_num_tokens=64,
    )  # fmt: skip
    starts = torch.arange(0, B * queries + 1, queries, dtype=torch.int32)
    common = SimpleNamespace(
        query_start_loc=starts, query_start_loc_cpu=starts, num_reqs=B, max_seq_len=8,
        num_actual_tokens=B * queries, seq_lens=torch.full((B,), 8, dtype=torch.int32),
        block_table_tensor=torch.zeros(B, 8, dtype=torch.int32), positions=None,
        seq_lens_cpu_upper_bound=torch.full((B,), 8),
    )  # fmt: skip
    passes.capture(common)
    assert calls_of(lambda: passes.even(common, B, B * queries)) < 220
