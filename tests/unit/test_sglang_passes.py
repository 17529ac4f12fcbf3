"""What the adapter for SGLang makes of its tables, arguments and pools; needs no SGLang."""

from types import SimpleNamespace

import pytest
import torch
from attn_core import ForwardMode, UnsupportedError
from attn_core.integrations.sglang import page_tables
from attn_core.integrations.sglang.page_tables import drafts_of_full_mask, fill_page_table
from attn_core.integrations.sglang.passes import PassBuilder
from attn_core.integrations.sglang.server import (
    captures,
    check_arguments,
    draft_shape,
    overrides,
    speculation,
    verifies,
)

CONTEXT = 300


def token_table(requests, page, seed=0):
    """Return int32 [requests, CONTEXT] of slots on shuffled pages, with gaps between rows."""
    generator = torch.Generator().manual_seed(seed)
    each = -(-CONTEXT // page)
    pages = torch.randperm(requests * each, generator=generator) + 1
    slots = pages.view(requests, each, 1) * page + torch.arange(page)
    wide = torch.full((requests, 2 * CONTEXT), -7, dtype=torch.int32)
    wide[:, :CONTEXT] = slots.view(requests, -1)[:, :CONTEXT].int()
    return wide[:, :CONTEXT]


def launch(req_to_token, rows, lengths, new, page, table, out, slot_map=None, starts=None):
    """Run the GPU's kernel in the interpreter."""
    block = 16
    page_tables._kernel()[(table.shape[0], -(-table.shape[1] // block))](
        req_to_token, rows, lengths, req_to_token if slot_map is None else slot_map,
        rows if starts is None else starts, table, out,
        new, table.shape[1], req_to_token.stride(0), table.stride(0),
        PAGE_SIZE=page, MAPPED=slot_map is not None, STARTED=starts is not None, BLOCK=block,
    )  # fmt: skip


@pytest.mark.parametrize("run", [fill_page_table, launch])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("length_dtype", [torch.int64, torch.int32])
def test_tables_hold_the_pages_of_each_request(run, mapped, page, length_dtype):
    table = token_table(5, page)
    slot_map = None
    if mapped:
        pages = torch.randperm(2000)
        slot_map = (pages[:, None] * page + torch.arange(page)).flatten()
    rows, lengths = torch.tensor([3, 0, 4]), torch.tensor([1, 0, 290], dtype=length_dtype)
    columns = -(-CONTEXT // page)
    filled = torch.zeros(4, columns + 3, dtype=torch.int32)[:3]  # rows lie apart
    out = torch.full((3,), -1, dtype=torch.int32)
    run(table, rows, lengths, 4, page, filled, out, slot_map)
    assert out.tolist() == [5, 4, 294]
    for b, (row, n) in enumerate(zip([3, 0, 4], out.tolist(), strict=True)):
        slots = table[row, :n:page].long()
        slots = slots if slot_map is None else slot_map[slots]
        assert filled[b, : len(slots)].tolist() == (slots // page).tolist()
        assert not filled[b, len(slots) :].any()  # a valid page: the dummy


@pytest.mark.parametrize("run", [fill_page_table, launch])
def test_tables_begin_behind_an_encoder(run):
    table = token_table(5, 1)
    rows, lengths, starts = torch.tensor([3, 4]), torch.tensor([5, 40]), torch.tensor([290, 7])
    filled = torch.zeros(2, 60, dtype=torch.int32)
    out = torch.zeros(2, dtype=torch.int32)
    run(table, rows, lengths, 0, 1, filled, out, starts=starts)
    assert out.tolist() == [5, 40]
    assert filled[0, :5].equal(table[3, 290:295])
    assert filled[1, :40].equal(table[4, 7:47])
    assert not filled[0, 5:].any()


def test_the_drafts_of_a_full_mask():
    prefix, n = torch.tensor([17, 0, 4]), 5
    trees = torch.rand(3, n, n) > 0.5
    parts = [
        torch.cat([torch.ones(n, p, dtype=torch.bool), t], 1).flatten()
        for p, t in zip(prefix.tolist(), trees, strict=True)
    ]
    assert drafts_of_full_mask(torch.cat(parts), prefix, n).equal(trees)
    padded = torch.cat([prefix, torch.tensor([1])])  # a captured batch has rows of nobody
    assert drafts_of_full_mask(torch.cat(parts), padded, n)[:3].equal(trees)


def builder(page=16, **changed):
    values = {"topk": 3, "drafts": 4, "compact": True, "host_lengths": False}
    values |= {"slot_map": lambda: None}
    return PassBuilder(token_table(8, page), page, **(values | changed))


def engine_batch(mode, lengths, table, **changed):
    size = len(lengths)
    values = {
        "forward_mode": SimpleNamespace(name=mode),
        "batch_size": size,
        "seq_lens": torch.tensor(lengths),
        "seq_lens_cpu": None,
        "req_pool_indices": torch.arange(size),
        "out_cache_loc": torch.arange(100),
        "positions": torch.arange(100),
        "extend_seq_lens": None,
        "extend_seq_lens_cpu": None,
        "spec_info": SimpleNamespace(custom_mask=None),
    }
    return SimpleNamespace(**(values | changed))


def test_lengths_that_only_the_device_knows_plan_for_the_context():
    passes = builder()
    batch = passes.eager(engine_batch("DECODE", [30, 40], passes.req_to_token), ForwardMode.DECODE)
    assert batch.views["full"].max_seq_len == CONTEXT
    assert batch.views["full"].seq_lens_host is None
    known = engine_batch("DECODE", [30, 40], None, seq_lens_cpu=torch.tensor([30, 40]))
    batch = passes.eager(known, ForwardMode.DECODE)
    assert batch.views["full"].max_seq_len == 40
    assert batch.views["full"].page_table.shape == (2, 3)


def test_a_replay_fills_the_memory_that_was_captured():
    passes = builder(drafts=4)
    static = passes.static(4, 16)
    mode = ForwardMode.TARGET_VERIFY
    captured = passes.captured(engine_batch("TARGET_VERIFY", [1, 1], None), mode, static)
    trees = torch.rand(3, 4, 4) > 0.5
    info = SimpleNamespace(custom_mask=trees[:2].flatten())
    passes.refill(engine_batch("TARGET_VERIFY", [20, 60], None, spec_info=info), mode, static)
    view = captured.views["full"]
    assert view.seq_lens.tolist() == [24, 64]
    assert captured.spec.tree_mask.equal(trees[:2])
    expected = passes.req_to_token[1, :64:16] // 16
    assert view.page_table[1, :4].tolist() == expected.tolist()
    assert captured.cu_seqlens_q.tolist() == [0, 4, 8]


def test_a_replay_writes_windowed_layers_where_their_slots_are_now():
    slot_map = torch.randperm(5000)
    passes = builder(slot_map=lambda: slot_map)
    static = passes.static(4, 4)
    mode = ForwardMode.DECODE
    captured = passes.captured(engine_batch("DECODE", [1, 1], None), mode, static)
    later = engine_batch("DECODE", [20, 60], None, out_cache_loc=torch.tensor([70, 80]))
    passes.refill(later, mode, static)
    assert captured.views["window"].out_cache_loc.tolist() == slot_map[[70, 80]].tolist()
    pages = slot_map[passes.req_to_token[1, :60:16].long()] // 16
    assert captured.views["window"].page_table[1, :4].tolist() == pages.tolist()


def test_graphs_are_asked_for_where_the_server_captures():
    assert captures(args(), "cuda")
    assert not captures(args(), "cpu")
    assert not captures(args(disable_decode_cuda_graph=True), "cuda")


def test_draft_passes_name_the_flag_for_them():
    with pytest.raises(UnsupportedError, match="--speculative-draft-attention-backend"):
        builder().mode(engine_batch("DRAFT_EXTEND_V2", [1], None))


def args(**changed):
    values = {
        "speculative_algorithm": None,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
        "speculative_ngram_max_bfs_breadth": 10,
        "speculative_attention_mode": "prefill",
        "get_attention_backends": lambda: ("attn_core", "fa3"),
    }
    return SimpleNamespace(**(values | changed))


def test_speculation_of_a_server():
    assert draft_shape(args()) == (0, 0)
    assert speculation(args()) is None
    eagle, ngram = args(speculative_algorithm="EAGLE"), args(speculative_algorithm="NGRAM")
    assert draft_shape(eagle) == (4, 8)
    assert draft_shape(ngram) == (10, 8)
    assert verifies(eagle)
    assert not verifies(args())
    assert not verifies(args(speculative_algorithm="EAGLE", speculative_attention_mode="decode"))
    wanted = speculation(eagle)
    assert (wanted.topk, wanted.num_draft_tokens, wanted.mode) == (4, 8, "prefill")


def test_what_is_not_served_says_what_to_change():
    check_arguments(args())
    with pytest.raises(UnsupportedError, match="--dcp-size 2"):
        check_arguments(args(dcp_size=2))
    with pytest.raises(UnsupportedError, match="disaggregation"):
        check_arguments(args(disaggregation_mode="prefill"))
    with pytest.raises(UnsupportedError, match="ATTN_PREFILL_ATTENTION_BACKEND"):
        check_arguments(args(speculative_algorithm="EAGLE"))


def test_variables_name_what_is_inside():
    chosen = overrides(
        {"ATTN_DECODE_ATTENTION_BACKEND": "triton", "ATTN_DENY": "fa3,fa4", "ATTN_PREFER": ""}
    )
    assert chosen.decode_attention_backend == "triton"
    assert chosen.deny == ("fa3", "fa4")
    assert chosen.prefer == ()
