"""What the adapter for SGLang makes of its tables, arguments and pools; needs no SGLang."""

import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from attn_core import ForwardMode, UnsupportedError
from attn_core.errors import UsageError
from attn_core.integrations import choice
from attn_core.integrations.choice import overrides, shares_prefixes
from attn_core.integrations.sglang import page_tables, tree_tables
from attn_core.integrations.sglang.page_tables import Branches, fill_branches, fill_page_table
from attn_core.integrations.sglang.passes import PassBuilder
from attn_core.integrations.sglang.server import (
    captures,
    check_arguments,
    draft_shape,
    drafts,
    speculation,
    verifies,
)
from attn_core.integrations.sglang.tree_tables import TreeTables, fill_trees
from attn_core.spec.requirements import Requirements
from interpreted import interpreted

pytestmark = pytest.mark.usefixtures("no_printing")

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


def launch_branches(req_to_token, rows, lengths, topk, page, branches, slot_map):
    """Run the GPU's kernel in the interpreter."""
    block, table = 16, branches.page_table
    page_tables._branch_kernel()[(table.shape[0], -(-table.shape[1] // block))](
        req_to_token, rows, lengths, req_to_token if slot_map is None else slot_map, table,
        branches.lengths, branches.slots, branches.positions, table.shape[1],
        req_to_token.stride(0), table.stride(0), branches.lengths.stride(0),
        TOPK=topk, STEPS=branches.lengths.shape[0], PAGE_SIZE=page,
        MAPPED=slot_map is not None, BLOCK=block,
    )  # fmt: skip


@pytest.mark.parametrize("run", [fill_branches, launch_branches])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("topk", [1, 4])
def test_branches_hold_the_tokens_of_their_request_and_their_own_drafts(run, mapped, page, topk):
    table, steps = token_table(5, page), 3
    slot_map = torch.randperm(6000) if mapped and page == 1 else None
    if mapped and page > 1:
        slot_map = (torch.randperm(400)[:, None] * page + torch.arange(page)).flatten()
    prefixes = [1, 15, 200 - 8 * topk]
    rows, lengths = torch.tensor([3, 0, 4]), torch.tensor(prefixes)
    columns = -(-CONTEXT // page)
    whole = Branches.create(4 * topk, columns, steps, torch.device("cpu"))
    branches = whole.first(3 * topk)
    run(table, rows, lengths, topk, page, branches, slot_map)
    for b in range(3 * topk):
        row, prefix = [3, 0, 4][b // topk], prefixes[b // topk]
        tail = prefix % page
        run_of_slots = -(-(tail + steps + 1) // page) * page
        for step in range(steps):
            assert branches.lengths[step, b] == prefix + step + 1
            assert branches.positions[step, b] == prefix + step
            slot = table[row, prefix + step + b % topk * run_of_slots].long()
            slot = slot if slot_map is None else slot_map[slot]
            assert branches.slots[step, b] == slot
            at = prefix + step
            assert branches.page_table[b, at // page] * page + at % page == slot
        whole_pages = table[row, : prefix - tail : page].long()
        whole_pages = whole_pages if slot_map is None else slot_map[whole_pages]
        found = branches.page_table[b, : len(whole_pages)]
        assert found.tolist() == (whole_pages // page).tolist()
        used = -(-(prefix + steps) // page)
        assert not branches.page_table[b, used:].any()  # a valid page: the dummy
    assert not whole.slots[:, 3 * topk :].any()


def launch_trees(req_to_token, rows, lengths, trees, slot_map):
    """Run the GPU's kernel in the interpreter."""
    block, table, drafts = 16, trees.page_table, trees.topk * trees.lengths.shape[0]
    tree_tables._kernel()[(table.shape[0], -(-table.shape[1] // block))](
        req_to_token, rows, lengths, req_to_token if slot_map is None else slot_map, table,
        trees.lengths, trees.slots, trees.positions, table.shape[1], req_to_token.stride(0),
        table.stride(0), trees.lengths.stride(0), trees.slots.stride(0), trees.positions.stride(0),
        TOPK=trees.topk, STEPS=trees.lengths.shape[0], DRAFTS=1 << (drafts - 1).bit_length(),
        MAPPED=slot_map is not None, BLOCK=block,
    )  # fmt: skip


@pytest.mark.parametrize("run", [fill_trees, launch_trees])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("topk", "steps"), [(2, 1), (4, 2), (4, 3), (3, 4)])
def test_trees_hold_the_tokens_of_their_request_and_the_drafts_of_all_steps(
    run, mapped, topk, steps
):
    table = token_table(5, 1)
    slot_map = torch.randperm(6000) if mapped else None
    prefixes, own = [1, 15, 200 - 8 * topk], [3, 0, 4]
    rows, lengths = torch.tensor(own), torch.tensor(prefixes)
    whole = TreeTables.create(4, CONTEXT, steps, topk, torch.device("cpu"))
    run(table, rows, lengths, whole.first(3), slot_map)

    def slot(row, column):
        found = table[row, column].long()
        return found if slot_map is None else slot_map[found]

    for b, (row, prefix) in enumerate(zip(own, prefixes, strict=True)):
        expected = [int(slot(row, column)) for column in range(prefix)]
        for step in range(steps):
            drafts = [int(slot(row, prefix + x * (steps + 1) + step)) for x in range(topk)]
            assert whole.slots[step, b * topk : (b + 1) * topk].tolist() == drafts
            expected += drafts
            assert whole.lengths[step, b] == len(expected)
            n = topk * (step + 1)
            levels = [prefix + i // topk for i in range(n)]
            assert whole.positions[step, b * n : (b + 1) * n].tolist() == levels
        assert whole.page_table[b, : len(expected)].tolist() == expected
        assert not whole.page_table[b, len(expected) :].any()  # a valid page: the dummy
    assert not whole.slots[:, 3 * topk :].any()
    assert not whole.page_table[3].any()


def test_the_kernels_of_tables_compile(tmp_path):
    """The interpreter takes what the compiler does not."""
    script = pathlib.Path(__file__).parents[1] / "support" / "build_tables.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:3] == ["page table", "branches", "trees"]


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


def builder(page=16, **changed):
    values = {"topk": 3, "drafts": 4, "host_lengths": False}
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


def test_padded_requests_of_a_replay_write_the_dummy_slot():
    slot_map = torch.arange(5000) + 7
    passes = builder(slot_map=lambda: slot_map)
    static, mode = passes.static(4, 16), ForwardMode.DRAFT_EXTEND
    captured = passes.captured(engine_batch("DRAFT_EXTEND_V2", [5, 5], None), mode, static)
    slots = captured.views["window"].out_cache_loc
    assert slots.tolist() == list(range(7, 15))
    one = engine_batch("DRAFT_EXTEND_V2", [20, 4], None, out_cache_loc=torch.arange(60, 64))
    passes.refill(one, mode, static)  # SGLang hands over the slots of real requests alone
    assert slots.tolist() == [67, 68, 69, 70, 0, 0, 0, 0]


def test_graphs_are_asked_for_where_the_server_captures():
    assert captures(args(), "cuda")
    assert not captures(args(), "cpu")
    assert not captures(args(disable_decode_cuda_graph=True), "cuda")


def test_passes_that_are_not_served_name_the_flag():
    with pytest.raises(UnsupportedError, match=r"DLLM_EXTEND .* --attention-backend"):
        builder().mode(engine_batch("DLLM_EXTEND", [1], None))


def args(**changed):
    values = {
        "speculative_algorithm": None,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
        "speculative_ngram_max_bfs_breadth": 10,
        "speculative_attention_mode": "prefill",
        "speculative_draft_attention_backend": None,
        "get_attention_backends": lambda: ("attn_core", "fa3"),
    }
    return SimpleNamespace(**(values | changed))


def test_speculation_of_a_server():
    assert draft_shape(args()) == (0, 0)
    assert speculation(args(), 1) is None
    eagle, ngram = args(speculative_algorithm="EAGLE"), args(speculative_algorithm="NGRAM")
    assert draft_shape(eagle) == (4, 8)
    assert draft_shape(ngram) == (10, 8)
    assert verifies(eagle)
    assert not verifies(args())
    assert not verifies(args(speculative_algorithm="EAGLE", speculative_attention_mode="decode"))
    wanted = speculation(eagle, 4)
    assert (wanted.topk, wanted.num_draft_tokens, wanted.mode) == (4, 8, "prefill")


def test_the_flag_of_the_draft_model_names_its_backend():
    assert drafts(args(), "prefill")
    assert not drafts(args(), "decode")  # the decode phase is fa3's
    assert drafts(args(speculative_draft_attention_backend="attn_core"), "decode")
    assert not drafts(args(speculative_draft_attention_backend="triton"), "prefill")


def test_what_is_not_served_says_what_to_change():
    check_arguments(args())
    with pytest.raises(UnsupportedError, match=r"--attn-cp-size 2 .*leave it out, or name a"):
        check_arguments(args(attn_cp_size=2))
    with pytest.raises(UnsupportedError, match=r"--dcp-size 2 .*attn_core alone, or leave out"):
        check_arguments(args(dcp_size=2))
    with pytest.raises(UnsupportedError, match="disaggregation"):
        check_arguments(args(disaggregation_mode="prefill"))
    with pytest.raises(UnsupportedError, match="ATTN_PREFILL_ATTENTION_BACKEND"):
        check_arguments(args(speculative_algorithm="EAGLE"))


def test_variables_name_what_is_inside():
    chosen = overrides(
        {"ATTN_DECODE_ATTENTION_BACKEND": " triton ", "ATTN_DENY": "fa3, fa4,", "ATTN_PREFER": " "}
    )
    assert chosen.decode_attention_backend == "triton"
    assert chosen.deny == ("fa3", "fa4")
    assert chosen.prefer == ()


def test_a_variable_asks_for_shared_prefixes(monkeypatch):
    """It is part of what is selected for, so that nothing but a backend that does it is chosen."""
    monkeypatch.delenv("ATTN_SHARED_PREFIX", raising=False)
    assert not shares_prefixes()
    monkeypatch.setenv("ATTN_SHARED_PREFIX", "true")
    with pytest.raises(UsageError, match=r"ATTN_SHARED_PREFIX=true .expected 1 or 0"):
        shares_prefixes()
    monkeypatch.setattr(choice, "load_plugins", interpreted)
    chosen = {}
    for value in ("0", "1"):
        monkeypatch.setenv("ATTN_SHARED_PREFIX", value)
        selection, _ = choice.choose(Requirements(page_size=16), torch.device("cpu"))
        assert selection.requirements.shared_prefix == (value == "1")
        chosen[value] = selection.roles["decode"].backend
    assert chosen["1"] == "triton"
    assert chosen["0"] != "triton"


@pytest.mark.parametrize("page", [1, 16])
def test_requests_that_share_slots_share_a_group(page, monkeypatch):
    """Equal slots in SGLang's token table are equal pages in ours, which the plan finds."""
    shared = pytest.importorskip("attn_core.backends.triton.shared")
    table = token_table(4, page)
    table[1, :192] = table[2, :192] = table[3, :192]
    lengths = torch.tensor([200, 260, 193, 220])
    pages, out = torch.zeros(4, CONTEXT // page + 1, dtype=torch.int32), torch.zeros(4).int()
    fill_page_table(table, torch.arange(4), lengths, 0, page, pages, out)
    buffer = torch.empty(shared.buffer_shape(4, 1), dtype=torch.int32)
    requests = shared.Requests(torch.arange(5, dtype=torch.int32), out, pages)
    launch = shared.Launch(block_m=64, block_n=64, warps=4, stages=2)
    sharing = shared.Sharing(64, page, 4)
    shared.fill_spans({}, requests, buffer, torch.zeros(1).int(), launch, sharing)
    spans, units = shared.spans_of(buffer), buffer[0, :9].diff()
    [span] = spans[4:8][units[4:] > 0].tolist()
    # request, level, first query, queries, first key, last key + 1
    assert span[:6] == [1, 1, 1, 3, 0, 192]
