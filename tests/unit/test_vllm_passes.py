"""The parts of vLLM's adapter that need no vLLM: passes as batches, names, refusals."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from attn_core import UnsupportedError
from attn_core.integrations import vllm
from attn_core.integrations.vllm import layers, server
from attn_core.integrations.vllm.passes import PassBuilder
from attn_core.runtime.batch import ForwardMode
from attn_core.runtime.dispatcher import HybridDispatcher
from triton_passes import DEVICE, Requests, make_layer

pytestmark = pytest.mark.usefixtures("no_printing")

PAGE = 16


class Plans:
    """A dispatcher that keeps the batches that it plans."""

    def __init__(self):
        self.planned, self.captured, self.replayed, self.sizes = [], [], [], []

    def init_forward_metadata(self, batch):
        self.planned.append(batch)
        return object()

    def init_cuda_graph_state(self, *sizes):
        self.sizes.append(sizes)

    def init_forward_metadata_capture_cuda_graph(self, batch):
        self.captured.append(batch)
        return object()

    def init_forward_metadata_replay_cuda_graph(self, batch, plan):
        self.replayed.append((batch, plan))


def builder(plans, drafts=0, host_lengths=False):
    row = SimpleNamespace(row=SimpleNamespace(needs_host_lengths=host_lengths))
    return PassBuilder(
        lambda: plans, SimpleNamespace(roles={"decode": row}), device=torch.device("cpu"),
        page_size=PAGE, drafts=drafts, max_bs=4, max_num_tokens=64,
    )  # fmt: skip


def common(queries, lengths, positions=True, columns=8):
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    tokens = int(starts[-1])
    return SimpleNamespace(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=seq_lens,
        num_reqs=len(lengths), num_actual_tokens=tokens, max_seq_len=max(lengths),
        block_table_tensor=torch.zeros(len(lengths), columns, dtype=torch.int32),
        positions=torch.zeros(tokens, dtype=torch.int64) if positions else None,
        seq_lens_cpu_upper_bound=seq_lens + 5,
    )  # fmt: skip


def test_a_batch_is_a_view_of_the_engines_tensors():
    made = common((1, 1, 1), (9, 4, 30))
    part = builder(Plans()).even(made, 3, 3)
    view = part.batch.views["full"]
    assert part.batch.forward_mode is ForwardMode.DECODE
    assert view.page_table.data_ptr() == made.block_table_tensor.data_ptr()
    assert view.seq_lens.data_ptr() == made.seq_lens.data_ptr()
    assert view.out_cache_loc is None
    assert view.seq_lens_host is None
    assert part.batch.positions.data_ptr() == made.positions.data_ptr()


def test_prefill_behind_decode_rows_has_starts_of_its_own():
    made = common((1, 1, 7, 2), (9, 4, 30, 2), positions=False)
    part = builder(Plans()).ragged(made, slice(2, 4))
    assert part.tokens == slice(2, 11)
    assert part.batch.cu_seqlens_q.tolist() == [0, 7, 9]
    assert part.batch.views["full"].seq_lens.tolist() == [30, 2]
    assert part.batch.query_lens_host == (7, 2)


def test_prompts_without_a_prefix_have_lengths_and_keys_of_their_own():
    """vLLM's bound says so, with drafts too: nothing is read from the device."""
    made = common((1, 7, 2), (9, 7, 2))
    made.seq_lens_cpu_upper_bound = made.seq_lens.clone()
    build = builder(Plans(), drafts=4)
    part = build.ragged(made, slice(1, 3))
    assert part.batch.views["full"].seq_lens_host == part.batch.query_lens_host == (7, 2)
    key, value = torch.randn(12, 2, 8), torch.randn(12, 2, 8)  # two rows of padding
    k, v = part.new_keys(key, value)
    assert torch.equal(k, key[1:10])
    assert torch.equal(v, value[1:10])
    assert part.new_keys(None, None) == (None, None)
    assert build.even(made, 1, 1).new_keys(key, value) == (None, None)
    made.seq_lens_cpu_upper_bound[1] += 1  # a prefix, or drafts that may be rejected
    assert build.ragged(made, slice(1, 3)).batch.views["full"].seq_lens_host is None
    made.seq_lens_cpu_upper_bound = None
    assert build.ragged(made, slice(1, 3)).batch.views["full"].seq_lens_host is None


@pytest.mark.parametrize(
    ("drafts", "queries", "padded", "even"),
    [(0, (1, 1, 1), 0, True), (0, (2, 2, 2), 0, False), (4, (4, 4, 4), 0, True),
     (4, (1, 1, 1), 0, True), (4, (2, 2, 2), 0, False), (4, (4, 4, 3), 0, False),
     (4, (4, 4, 0), 4, True), (4, (4, 0, 0, 0), 0, False), (4, (4, 4, *[0] * 6), 0, False),
     (0, (), 0, False)],
)  # fmt: skip
def test_even_passes_are_decode_and_whole_chains(drafts, queries, padded, even):
    """As many tokens as requests are no decode pass where requests without tokens pad it."""
    made = common(queries, (9,) * len(queries) or (0,))
    tokens = sum(queries) + padded
    assert builder(Plans(), drafts).is_even(made, len(queries), tokens) is even


def test_host_lengths_are_exact_and_hold_the_queries_of_padding():
    made = common((4, 4), (9, 0))
    part = builder(Plans(), drafts=4, host_lengths=True).even(made, 2, 8)
    assert part.batch.views["full"].seq_lens_host == (9, 4)  # with drafts vLLM knows a bound only
    made = common((1, 1), (9, 4))
    made.max_seq_len = 14
    made.seq_lens_cpu_upper_bound = known = MagicMock()
    known.__getitem__.return_value = made.seq_lens  # exact, where nothing is drafted
    part = builder(Plans(), host_lengths=True).ragged(made, slice(0, 2))
    assert part.batch.views["full"].seq_lens_host == (9, 4)
    assert known.__getitem__.called  # vLLM's own numbers, for which no device is read


def test_a_captured_size_is_planned_once_and_refilled():
    plans = Plans()
    build = builder(plans, drafts=4)
    made = common((4, 4), (9, 8))
    first = build.capture(made)
    assert plans.sizes == [(4, 16)]
    assert first.batch.views["full"].max_seq_len == 8 * PAGE
    assert build.capture(made).plan is first.plan
    made.seq_lens += 1
    replayed = build.even(made, 2, 8)
    assert replayed.plan is first.plan
    assert len(plans.replayed) == 2
    assert replayed.batch.cu_seqlens_q.data_ptr() == first.batch.cu_seqlens_q.data_ptr()
    assert build.even(common((4, 4), (9, 8)), 2, 8).plan is not first.plan
    assert build.even(made, 1, 4).plan is not first.plan
    with pytest.raises(UnsupportedError, match="cudagraph_mode"):
        build.capture(common((4, 3), (9, 8)))


def test_caches_are_views_and_scales_are_for_fp8():
    module = SimpleNamespace(layer_name="x", _k_scale_float=0.5, _v_scale_float=0.25)
    stored = torch.zeros(2, 3, PAGE, 2, 8, dtype=torch.uint8)
    cache = layers.to_cache(module, stored, "fp8_e4m3")
    assert cache.v.data_ptr() == stored[1].data_ptr()
    assert (cache.k_scale, cache.v_scale) == (0.5, 0.25)
    cache = layers.to_cache(module, stored.view(torch.bfloat16), "bf16")
    assert (cache.k_scale, cache.v_scale) == (1.0, 1.0)
    with pytest.raises(UnsupportedError, match="k_scale"):
        layers.to_cache(module, torch.zeros(3, PAGE, 576, dtype=torch.uint8), "fp8_e4m3")


def test_a_release_without_the_registries_starts(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    vllm.register()
    assert "not registered with this release of vLLM" in caplog.text


def test_versions_and_names():
    server.check_version("0.26.0")
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.25\.1.*tested with ==0\.26"):
        server.check_version("0.25.1")
    assert server.stored_dtype("auto", torch.float16) == "fp16"
    with pytest.raises(AttributeError):
        _ = vllm.Missing


@pytest.mark.parametrize("queries", [1, 4])
def test_requests_of_no_tokens_pad_a_captured_pass_on_triton(queries):
    """vLLM pads a replay by requests of length 0, whose queries the graph still has."""
    torch.manual_seed(0)
    requests = Requests(make_layer(dim=64), (70, 37, 0), page=PAGE, dtype="fp16")
    made = common((queries,) * 3, (70, 37, 0))
    made.block_table_tensor = requests.table
    made.query_start_loc = made.query_start_loc.to(DEVICE)
    made.seq_lens = made.seq_lens.to(DEVICE)
    made.positions = made.positions.to(DEVICE)
    dispatcher = object.__new__(HybridDispatcher)
    backend = requests.backend(topk=1, num_draft_tokens=queries)
    dispatcher.init_forward_metadata = backend.init_forward_metadata
    build = builder(dispatcher, drafts=queries)
    build._first, build._positions = build._first.to(DEVICE), build._positions.to(DEVICE)
    part = build.even(made, 3, 3 * queries)
    q = requests.draw(3 * queries)
    out, lse = backend.forward(
        q, None, None, requests.layer, requests.cache, part.batch, part.plan, return_lse=True
    )
    requests.check((out, lse), q, (queries, queries), (70, 37))
