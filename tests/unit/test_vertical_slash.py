"""Sparse prompts: lines, lists of keys and kernels over them; what is read, planned and refused."""

import json
from dataclasses import replace

import pytest
import torch
from attn_core import (
    AttentionLayer,
    DualChunk,
    ForwardBatch,
    ForwardMode,
    LayerRequirements,
    ModelConfigError,
    SparsePrompts,
    UnsupportedError,
    UsageError,
    load_plugins,
    plan_sparse,
    read_config,
    read_vertical_slash,
    requirements_from_config,
    rotary_positions,
)
from attn_core.ops.vertical_slash import (
    NO_INDEX,
    TORCH,
    KeyLists,
    Part,
    VerticalSlash,
    choose_vertical_slash,
    parts_of,
    seen_keys,
)
from attn_core.selection.dual_chunk_gaps import chunk_layer_gaps

CHUNKS = DualChunk(chunk_size=80, local_size=16, sparse_threshold=70)
LAYER = AttentionLayer(
    layer_id=0, num_q_heads=2, num_kv_heads=1, head_dim=16, v_head_dim=16, scale=0.25,
    dual_chunk=CHUNKS, vertical_slash=((40, 110), (35, 104)),
)  # fmt: skip


def kernels():
    pytest.importorskip("triton")
    from attn_core.ops.triton.vertical_slash import KERNELS

    return KERNELS


def lines(*heads):
    """Lines of heads, (verticals, slashes) each, filled up with NO_INDEX."""
    sides = []
    for side, down in ((0, False), (1, True)):
        most = max(len(head[side]) for head in heads)
        rows = [
            sorted([*h[side], *[NO_INDEX] * (most - len(h[side]))], reverse=down) for h in heads
        ]
        sides.append(torch.tensor(rows, dtype=torch.int32))
    return VerticalSlash(*sides)


def test_windows_cover_their_diagonals_and_columns_the_rest():
    part = Part(128, 256, 0, 256)
    lists = TORCH.to_lists(lines(([0, 3, 100, 191, 192], [0, 70])), part)
    # distance 70: windows end at 122 and 186; distance 0 ends with the block
    assert lists.block_count.tolist() == [[2, 2]]
    assert lists.block_offset[0, 0].tolist()[:2] == [58, 128]
    assert lists.block_offset[0, 1].tolist()[:2] == [122, 192]
    assert [lists.column_index[0, r, :n].tolist() for r, n in enumerate(lists.column_count[0])] == [
        [0, 3],
        [0, 3, 100, 191],
    ]


def test_a_window_that_is_covered_in_part_adds_a_block_after_the_last_one():
    lists = TORCH.to_lists(lines(([0], [0, 10, 64])), Part(64, 128, 0, 128))
    assert lists.block_offset[0, 0, : lists.block_count[0, 0]].tolist() == [0, 64]
    assert lists.column_count[0, 0] == 0  # key 0 is in a block


def test_parts_of_a_piece_do_not_share_keys():
    assert parts_of(128, 150, 64) == (
        Part(128, 150, 128, 150), Part(128, 150, 64, 128), Part(128, 150, 0, 64),
    )  # fmt: skip
    assert parts_of(0, 64, 64) == (Part(0, 64, 0, 64),)


@pytest.mark.parametrize(("n", "length", "last", "dims"), [
    (333, 128, 5, (16, 24)), (200, 1000, 64, (20, 16)), (65, 64, 1, (32, 32)),
])  # fmt: skip
def test_triton_lists_and_attends_as_torch_does(n, length, last, dims):
    own, rng = kernels(), torch.Generator().manual_seed(n)
    k, v = (torch.randn(n, d, generator=rng) for d in dims)
    k, v = (torch.cat([x, x], 1)[:, : x.shape[1]] for x in (k, v))  # rows apart
    for begin in range(0, n, length):
        end = min(begin + length, n)
        q = torch.randn(end - begin, 3, 2, dims[0], generator=rng)
        chosen = choose_vertical_slash(q[-last:], k[:end], [(31, 101), (45, 120)], 0.3, length)
        for part in parts_of(begin, end, length):
            want, got = TORCH.to_lists(chosen, part), own.to_lists(chosen, part)
            assert torch.equal(want.block_count, got.block_count)
            assert torch.equal(want.column_count, got.column_count)
            for block in range(want.block_count.shape[1]):
                assert torch.equal(*(seen_keys(x, block, part.hi) for x in (want, got)))
            a, b = (x.attend_lists(q[:, 0], k, v, got, part, 0.3) for x in (TORCH, own))
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("which", ["torch", "triton"])
def test_rows_without_keys_are_zero_and_minus_infinity(which):
    attend = (TORCH if which == "torch" else kernels()).attend_lists
    count = torch.zeros(1, 1, dtype=torch.int32)
    lists = KeyLists(
        count, torch.full((1, 1, 4), NO_INDEX).int(), count, torch.zeros(1, 1, 1).int()
    )
    out, lse = attend(torch.randn(3, 1, 16), *torch.randn(2, 8, 16), lists, Part(5, 8, 0, 8), 1.0)
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_forced_lines_come_first_and_short_prompts_have_all():
    q, k = torch.zeros(4, 3, 1, 16), torch.randn(300, 16)
    chosen = choose_vertical_slash(q, k, [(30, 100)], 1.0, 1000)
    assert chosen.vertical[0].tolist() == list(range(30))
    assert chosen.slash[0].tolist() == list(range(99, -1, -1))
    few = choose_vertical_slash(q, k[:20], [(1000, 500)], 1.0, 1000)
    assert few.vertical.shape == few.slash.shape == (1, 20)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 64), (29, 99)])
def test_fewer_lines_than_are_forced_are_the_first_keys_and_the_nearest(sizes):
    """Whatever the others score: no query is left without its own key."""
    verticals, slashes = sizes
    q, k = torch.randn(4, 3, 2, 16), torch.randn(300, 16)
    chosen = choose_vertical_slash(q, k, [sizes, (40, 110)], 3.0, 1000)
    assert chosen.vertical[0, :verticals].tolist() == list(range(verticals))
    assert chosen.slash[0][chosen.slash[0] < NO_INDEX].tolist() == list(range(slashes - 1, -1, -1))
    assert set(range(30)) < set(chosen.vertical[1].tolist())
    assert set(range(100)) < set(chosen.slash[1].tolist())


@pytest.mark.parametrize("beside_ipex", [False, True])
def test_what_keys_score_decides(beside_ipex, monkeypatch):
    """One key and one distance that the last queries look at, far from all that is forced.

    Beside intel-extension-for-pytorch a product is not written to a slice that is handed as `out`.
    """
    if beside_ipex:
        monkeypatch.setattr(torch, "matmul", lambda x, y, out: out.zero_())
    k = torch.zeros(400, 16)
    k[57, 0], k[390 - 250, 1] = 50.0, 50.0
    q = torch.zeros(1, 3, 1, 16)
    q[..., 0] = 1.0
    chosen = choose_vertical_slash(q, k[:391], [(31, 101)], 1.0, 1000)
    assert 57 in chosen.vertical[0].tolist()
    assert 390 - 57 in chosen.slash[0].tolist()


def batch(query_lens, seq_lens, mode=ForwardMode.EXTEND, **changes):
    table = torch.zeros(len(seq_lens), 10, dtype=torch.int32)
    one = ForwardBatch.build(
        mode, query_lens=query_lens, seq_lens=seq_lens, page_table=table, page_size=16
    )
    return replace(one, **changes)


def test_long_whole_prompts_are_cut_out_of_a_pass():
    plans = []
    plan = plan_sparse([LAYER], batch((5, 80, 71), (20, 80, 71)), lambda x: plans.append(x) or x)
    assert isinstance(plan, SparsePrompts)
    (cut,) = plan.cuts.values()
    assert [tuple(p) for p in cut.prompts] == [(1, 5, 80), (2, 85, 71)]
    assert cut.rest.query_lens_host == (5, 0, 0)
    assert cut.rest.cu_seqlens_q.tolist() == [0, 5, 5, 5]
    assert cut.rows.tolist() == [*range(5)]
    assert len(plans) == 2


def test_checkpoints_of_linear_layers_are_no_part_of_the_dense_requests():
    slots = torch.tensor([0, 1], dtype=torch.int32)
    saves = torch.tensor([-1, 2, -1], dtype=torch.int32)  # 80 tokens are two chunks of 64
    one = batch((5, 80), (20, 80), state_slots=slots, checkpoint_slots=saves)
    (cut,) = plan_sparse([LAYER], one, lambda x: x).cuts.values()
    assert cut.rest.checkpoint_slots is None


@pytest.mark.parametrize(("mode", "query_lens", "seq_lens"), [
    (ForwardMode.EXTEND, (70, 5), (70, 60)),
    (ForwardMode.DECODE, (1,), (150,)),
    (ForwardMode.MIXED, (1, 5), (150, 60)),
    (ForwardMode.DRAFT_EXTEND, (3,), (150,)),
])  # fmt: skip
def test_other_passes_keep_the_plan_of_the_backend(mode, query_lens, seq_lens):
    one = batch(query_lens, seq_lens, mode)
    assert plan_sparse([LAYER], one, lambda x: x) is one


@pytest.mark.parametrize("n", [1, 40, 79])
def test_a_part_of_a_sparse_prompt_is_refused_with_what_to_change(n):
    with pytest.raises(UnsupportedError) as refused:
        plan_sparse([LAYER], batch((3, n), (3, 80)), lambda x: x)
    said = str(refused.value)
    assert f"request 1 hands over {n} of 80 tokens" in said
    assert "no chunked prefill, no prefix cache" in said
    assert "sparse_attention_enabled" in said


def test_layers_and_requirements_say_what_is_missing():
    with pytest.raises(UsageError, match="without vertical_slash"):
        replace(LAYER, vertical_slash=None)
    with pytest.raises(UsageError, match="1 vertical and 1 slash or more for each of 2 heads"):
        replace(LAYER, vertical_slash=((40, 110),))
    with pytest.raises(UsageError, match="with a sparse_threshold"):
        replace(LAYER, dual_chunk=replace(CHUNKS, sparse_threshold=None))
    with pytest.raises(UsageError, match="sparse prompts and logit_cap"):
        LayerRequirements(dual_chunk=CHUNKS, logit_cap=30.0)
    with pytest.raises(UsageError, match="sparse_threshold -1"):
        replace(CHUNKS, sparse_threshold=-1)
    assert LAYER.query_shape == (5, 2, 16)


def test_a_row_without_sparse_prompts_says_what_would_do():
    needs = LayerRequirements(dual_chunk=CHUNKS)
    row = next(r for r in load_plugins().get("torch_native").capabilities if r.sparse_prefill)
    assert not [*chunk_layer_gaps(row, needs, "softmax")]
    (gap,) = chunk_layer_gaps(replace(row, sparse_prefill=False), needs, "softmax")
    assert str(gap) == "sparse prompts of more than 70 tokens (not supported)"
    assert gap.fixes[0].values == (("dual_chunk", replace(CHUNKS, sparse_threshold=None)),)
    assert str(CHUNKS) == "of chunks of 64 tokens, sparse in prompts of more than 70 tokens"


def test_queries_that_choose_are_rotated_without_a_clamp():
    positions = torch.tensor([0, 63, 64, 150])
    _, queries = rotary_positions(CHUNKS, positions)
    assert queries[3].tolist() == [64, 127, 64, 86]
    assert queries[4].tolist() == [80, 143, 80, 102]
    assert rotary_positions(replace(CHUNKS, sparse_threshold=None), positions)[1].shape == (3, 4)


def config(**more):
    head = {str(h): ["vertical_and_slash", 1000 if h % 2 else 30, 200 + h, 0.9] for h in range(4)}
    chunks = {"chunk_size": 80, "local_size": 16, "sparse_attention_config": [head, head], **more}
    return {
        "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 64, "num_hidden_layers": 2, "torch_dtype": "bfloat16",
        "dual_chunk_attention_config": chunks,
    }  # fmt: skip


def test_lines_of_a_config_are_read_for_each_rank():
    (layer,) = requirements_from_config(config()).layers
    assert layer.dual_chunk == DualChunk(80, 16, 0, 32768, 64)
    said = requirements_from_config(config(sparse_attention_threshold=9, sparse_attention_last_q=8))
    assert said.layers[0].dual_chunk == DualChunk(80, 16, 0, 9, 8)
    assert "sparse" not in " ".join(said.assumptions)
    assert read_vertical_slash(config(), 1) == ((130, 200), (1000, 201), (130, 202), (1000, 203))
    assert read_vertical_slash(config(), 0, tp=2, rank=1) == ((130, 202), (1000, 203))
    off = requirements_from_config(config(sparse_attention_enabled=False))
    assert off.layers[0].dual_chunk == DualChunk(80, 16)
    with pytest.raises(UsageError, match="rank 2 of tp 2"):
        read_vertical_slash(config(), 0, tp=2, rank=2)


@pytest.mark.parametrize("entry", [
    None, [], ["block_sparse", 3, 4, 0.1], ["vertical_and_slash", 0, 5, 1.0],
    ["vertical_and_slash", True, 5, 1.0], ["vertical_and_slash", "7", 5, 1.0], "vertical_and_slash",
])  # fmt: skip
def test_a_broken_list_is_refused(entry):
    head = {str(h): ["vertical_and_slash", 40, 50, 0.9] for h in range(4)} | {"2": entry}
    with pytest.raises(ModelConfigError, match=r"for head 2 of layer 0 .expected"):
        requirements_from_config(config(sparse_attention_config=[head]))
    with pytest.raises(ModelConfigError, match="nothing for the heads of layer 1"):
        read_vertical_slash(config(sparse_attention_config=[head]), 1)


def test_the_list_beside_a_config_is_read(tmp_path):
    whole = config()
    listed = whole["dual_chunk_attention_config"].pop("sparse_attention_config")
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert requirements_from_config(read_config(tmp_path)).layers[0].dual_chunk == DualChunk(80, 16)
    (tmp_path / "sparse_attention_config.json").write_text(json.dumps(listed))
    read = read_config(tmp_path)
    assert requirements_from_config(read).layers[0].dual_chunk.sparse_threshold == 32768
    assert read_vertical_slash(read, 1)[0] == (130, 200)


def test_a_captured_prompt_may_not_be_sparse():
    from attn_core.runtime.backend import BackendConfig
    from attn_core.runtime.contract_checks import refuse_capture

    spec = load_plugins().get("torch_native")
    row = replace(next(r for r in spec.capabilities if r.sparse_prefill), cuda_graph="always")
    own = BackendConfig(
        name=spec.name, row=row, layers=(LAYER,), page_size=16, dtype="bf16", kv_cache_dtype="bf16",
        device=torch.device("cpu"),
    )  # fmt: skip
    refuse_capture(own, batch((70,), (70,)))
    refuse_capture(own, batch((1,), (150,), ForwardMode.DECODE))
    with pytest.raises(UnsupportedError, match="capture it for at most 70 tokens"):
        refuse_capture(own, batch((80,), (80,)))
