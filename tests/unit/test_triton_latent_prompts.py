"""Prompts over latents become chunks of queries: against float64, and what the chunks are."""

import pytest
import torch
from attn_core.backends.triton import latent_prompts
from attn_core.backends.triton.kernel import Pass
from attn_core.backends.triton.latent_prompts import chunk_queries, in_chunks
from attn_core.runtime.batch import ForwardMode, SpecInfo
from attn_core.runtime.layer import LayerGroup
from attn_core.runtime.shared_keys import SharedKeys

pytest.importorskip("triton")

from attn_core.backends.triton.portable.launch import PortableDecode
from triton_passes import Requests, make_layer


@pytest.fixture
def chunks(monkeypatch):
    """Let the portable kernel take chunks too, as that of Hopper does."""
    monkeypatch.setattr(PortableDecode, "takes_chunks", True)


def latents(group=16):
    return make_layer(heads=1, group=group, dim=576, v_dim=512)


def test_each_chunk_sees_the_keys_as_far_as_its_last_query():
    requests = Requests(latents(), (70, 19, 21, 40), page=16)
    batch = requests.batch([17, 1, 0, 8])
    [group] = {LayerGroup.of(requests.layer)}
    got = in_chunks(Pass.of(group, batch), 8, 3)
    cu, lengths, table = got.requests
    begins, own = [0, 8, 16, 17, 18], [0, 0, 0, 1, 3]
    size = len(own)
    assert (got.size, requests.table.shape[1], table.shape[1]) == (16, 5, 3)
    assert cu.tolist() == begins + [26] * (17 - size)
    assert lengths[:size].tolist() == [61, 69, 70, 19, 40]
    assert torch.equal(table[:size], requests.table[own, :3])
    assert (got.tokens, got.batch, got.mask) == (26, batch, Pass.of(group, batch).mask)


@pytest.mark.parametrize("processors", [1, 5])
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [((150, 40, 64), (40, 1, 64)), ((200,), (33,)), ((90, 30), (17, 0)), ((90, 70), (5, 1))],
)
def test_chunks_equal_float64(chunks, lengths, queries, processors, monkeypatch):
    monkeypatch.setattr(latent_prompts, "CHUNK_ROWS", 64)
    requests = Requests(latents(), lengths, page=16, dtype="fp32")
    batch = requests.batch(queries)
    backend = requests.backend(multiprocessors=processors)
    plan = backend.init_forward_metadata(batch)
    [schedule] = plan.values()
    assert (schedule.chunk, schedule.tiles) == (4, None)
    assert schedule.split.cuts.programs <= processors or processors < schedule.split.cuts.row_blocks
    q = requests.draw(sum(queries))
    tokens = (requests.layer, requests.cache)
    got = backend.forward(q, None, None, *tokens, batch, plan, return_lse=True)
    requests.check(got, q, queries)
    again = requests.batch(queries)  # of the same lengths: the plan holds
    repeated = backend.forward(q, None, None, *tokens, again, plan, return_lse=True)
    assert torch.equal(got[0], repeated[0])


def test_other_passes_have_no_chunks(chunks):
    requests = Requests(latents(), (60, 40), page=16)
    backend = requests.backend()
    [few] = backend.init_forward_metadata(requests.batch([1, 1])).values()
    assert (few.chunk, few.tiles) == (0, None)
    verify = requests.batch(
        [3, 3], mode=ForwardMode.TARGET_VERIFY, spec=SpecInfo(topk=1, num_draft_tokens=3)
    )
    [drafts] = backend.init_forward_metadata(verify).values()
    assert (drafts.chunk, drafts.tiles) == (0, None)
    [fixed] = (
        requests.backend(deterministic=True).init_forward_metadata(requests.batch([40, 2])).values()
    )
    assert (fixed.chunk, fixed.split) == (0, None)


def test_captured_prompts_have_no_chunks_without_static_buffers(chunks):
    """A replay brings other lengths, which the chunks of a capture would not follow."""
    requests = Requests(latents(), (60, 40), page=16, dtype="fp32")
    backend = requests.backend()
    captured = requests.batch([20, 20], [60, 40])
    plan = backend.init_forward_metadata_capture_cuda_graph(captured)
    view = captured.views["full"]
    q = requests.draw(40)
    for lengths in ((60, 40), (33, 29)):
        view.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        backend.init_forward_metadata_replay_cuda_graph(captured, plan)
        tokens = (q, None, None, requests.layer, requests.cache, captured, plan)
        got = backend.forward(*tokens, return_lse=True)
        requests.check(got, q, [20, 20], lengths)


def test_chunks_are_not_counted_as_requests(chunks):
    requests = Requests(latents(), (60, 40), page=16)
    backend = requests.backend(shared_prefix=True)
    batch = requests.batch([40, 20], mode=ForwardMode.DRAFT_EXTEND)
    plan = backend.init_forward_metadata(batch)
    assert next(iter(plan.values())).chunk > 0
    assert backend.shared_keys(plan) == SharedKeys("triton", 2, 0, 0, 0, 0.0)


def test_without_a_kernel_for_chunks_prompts_are_tiles():
    requests = Requests(latents(), (60, 40), page=16)
    [schedule] = requests.backend().init_forward_metadata(requests.batch([40, 2])).values()
    assert (schedule.chunk, schedule.split is None or schedule.tiles is not None) == (0, True)


@pytest.mark.parametrize(
    ("heads", "tokens", "expected"),
    [(16, 64, 8), (128, 64, 1), (128, 2048, 4), (128, 1 << 20, 16), (16, 1 << 20, 16), (20, 9, 6)],
)
def test_more_tokens_have_larger_chunks(chunks, heads, tokens, expected):
    requests = Requests(latents(heads), (60,), page=16)
    scheduler = requests.backend()._scheduler
    group = LayerGroup.of(requests.layer)
    inputs = Pass.of(group, requests.batch([20], mode=ForwardMode.EXTEND))
    shape = scheduler._shape(group, inputs, 60)
    assert chunk_queries((PortableDecode(),), shape, tokens) == expected
