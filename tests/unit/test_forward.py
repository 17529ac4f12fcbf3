"""A batch is checked once, at construction: every message, both sides, and never by a sync."""

import dataclasses

import numpy as np
import pytest
import torch
from attn_core.errors import BatchError, UsageError
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.requirements import LayerRequirements


def view(b=2, device="cpu", **changes):
    parts = {
        "page_table": torch.ones(b, 3, dtype=torch.int32, device=device),
        "seq_lens": torch.full((b,), 4, dtype=torch.int32, device=device),
        "out_cache_loc": torch.zeros(2 * b, dtype=torch.int64, device=device),
        "max_seq_len": 4,
        "seq_lens_host": (4,) * b,
    }
    return CacheView(**{**parts, **changes})


def batch(mode=ForwardMode.EXTEND, b=2, t=4, device="cpu", **changes):
    parts = {
        "cu_seqlens_q": torch.arange(b + 1, dtype=torch.int32, device=device) * (t // max(b, 1)),
        "positions": torch.zeros(t, dtype=torch.int64, device=device),
        "max_q_len": 2,
        "views": {"full": view(b, device)},
        "query_lens_host": (t // b,) * b if b else (),
    }
    return ForwardBatch(forward_mode=mode, **{**parts, **changes})


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def apart(t):
    """Return the same numbers, every other place in memory."""
    return torch.stack([t, t], -1)[..., 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_table": torch.ones(2, 3)}, r"page_table is torch.float32 \(expected torch.int32\)"),
        ({"page_table": torch.ones(2, 3, 1).int()}, r"page_table has shape \(2, 3, 1\)"),
        ({"seq_lens": torch.ones(2).long()}, r"seq_lens is torch.int64 \(expected torch.int32\)"),
        ({"seq_lens": int32(4)}, r"seq_lens has shape \(1,\) \(expected \(2,\)"),
        ({"out_cache_loc": int32(1)}, r"out_cache_loc is torch.int32 \(expected torch.int64\)"),
        ({"out_cache_loc": torch.zeros(1, 1).long()}, r"out_cache_loc has shape \(1, 1\)"),
        ({"seq_lens": int32(4, 4).to("meta")}, r"a cache view on several devices: .*cpu.*meta"),
        ({"seq_lens_host": (4,)}, "seq_lens_host has 1 lengths for 2 requests"),
        ({"seq_lens_host": (4, -1)}, "negative length -1 in seq_lens_host"),
        ({"max_seq_len": 3}, "max_seq_len 3 is below 4"),
        (
            {"page_table": apart(torch.ones(2, 3).int())},
            r"page_table has strides \(6, 2\) \(expected stride\(-1\) 1\); call .contiguous\(\)",
        ),
        ({"page_table": torch.ones(3, 2).int().T}, r"page_table has strides \(1, 2\)"),
        ({"seq_lens": apart(int32(4, 4))}, r"seq_lens has strides \(2,\) \(expected contiguous"),
        ({"out_cache_loc": apart(torch.zeros(4).long())}, r"out_cache_loc has strides \(2,\)"),
    ],
)
def test_a_view_refuses(changes, message):
    with pytest.raises(BatchError, match=message):
        view(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seq_lens_host": None},
        {"max_seq_len": 99},
        {"seq_lens_host": (0, 4)},
        {"b": 0},
        {"page_table": torch.ones(5, 9).int()[:2, :3]},  # a slice of a static buffer
        {"page_table": torch.ones(1, 3).int().expand(2, 3)},
    ],
)
def test_a_view_takes(changes):
    assert view(**changes).max_seq_len >= 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": torch.zeros(3)}, "cu_seqlens_q is torch.float32"),
        ({"cu_seqlens_q": int32(), "query_lens_host": None}, "cu_seqlens_q is empty"),
        ({"positions": torch.zeros(4).int()}, "positions is torch.int32"),
        ({"positions": torch.zeros(4, 1).long()}, r"positions has shape \(4, 1\)"),
        ({"views": {"full": view(3)}}, "view 'full' has 3 requests, the batch 2"),
        ({"state_slots": torch.zeros(2).long()}, "state_slots is torch.int64"),
        ({"state_slots": int32(0)}, r"state_slots has shape \(1,\) \(expected \(2,\)"),
        ({"state_slots": int32(0, 1).to("meta")}, "a batch on several devices"),
        ({"views": {"full": view(device="meta")}}, "a batch on several devices"),
        ({"mode": ForwardMode.IDLE}, "an idle pass with 4 tokens"),
        ({"mode": ForwardMode.DECODE}, r"decode: 4 tokens for 2 requests \(one each\)"),
        ({"mode": ForwardMode.DRAFT_DECODE}, r"draft_decode: 4 tokens for 2 requests"),
        ({"query_lens_host": (4,)}, "query_lens_host has 1 lengths for 2 requests"),
        ({"query_lens_host": (5, -1)}, "negative length -1 in query_lens_host"),
        ({"query_lens_host": (1, 2)}, "query lengths add up to 3, positions hold 4"),
        ({"max_q_len": 1}, "max_q_len 1 is below 2"),
        (
            {"views": {"window": view(seq_lens_host=(4, 1))}},
            "view 'window', request 1: length 1 < its 2 queries",
        ),
        ({"mode": ForwardMode.TARGET_VERIFY}, "target_verify without spec"),
        ({"cu_seqlens_q": apart(int32(0, 2, 4))}, r"cu_seqlens_q has strides \(2,\)"),
        ({"positions": apart(torch.zeros(4).long())}, r"positions has strides \(2,\)"),
        ({"state_slots": apart(int32(0, 1))}, r"state_slots has strides \(2,\)"),
        (
            {"mode": ForwardMode.DECODE, "t": 2, "query_lens_host": (2, 0)},
            r"decode of 2 tokens \(one each\)",
        ),
        (
            {"max_q_len": 1, "query_lens_host": None},
            "4 tokens of 2 requests: more than max_q_len 1 each",
        ),
        (
            {"views": {"full": view(), "window": view(seq_lens_host=(4, 3))}},
            r"views of one batch with different lengths: .*'window': \(4, 3\)",
        ),
        (
            {"views": {"full": view(seq_lens_host=(3, 1)), "window": view(seq_lens_host=None)}},
            "view 'full', request 1: length 1 < its 2 queries",
        ),
    ],
)
def test_a_batch_refuses(changes, message):
    with pytest.raises(BatchError, match=message):
        batch(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mode": ForwardMode.MIXED},
        {"mode": ForwardMode.DRAFT_EXTEND},
        {"mode": ForwardMode.DECODE, "t": 2},
        {"mode": ForwardMode.DRAFT_DECODE, "t": 2},
        {"mode": ForwardMode.IDLE, "b": 0, "t": 0},
        {"state_slots": int32(-1, 0)},
        {"query_lens_host": None},
        {"max_q_len": 17},
        {"views": {"full": view(), "cross": view(seq_lens_host=(4, 1))}},  # an encoder's length
        {"views": {"full": view(), "window": view(seq_lens_host=None)}},
        {"views": {}},
        {"mode": ForwardMode.DRAFT_EXTEND, "spec": SpecInfo(topk=4, num_draft_tokens=8)},
    ],
)
def test_a_batch_takes(changes):
    made = batch(**changes)
    assert (made.batch_size, made.num_tokens) == (changes.get("b", 2), changes.get("t", 4))


def tree(b, n, dtype=torch.bool, device="cpu"):
    return torch.ones(b, n, n, dtype=dtype, device=device).tril()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SpecInfo(topk=1, num_draft_tokens=3), "4 tokens for 2 requests of 3 drafts"),
        (SpecInfo(topk=2, num_draft_tokens=2), "topk 2 without a tree_mask"),
        (SpecInfo(topk=2, num_draft_tokens=2, tree_mask=tree(2, 2, torch.uint8)), "torch.uint8"),
        (SpecInfo(topk=2, num_draft_tokens=2, tree_mask=tree(2, 3)), r"tree_mask has shape"),
        (SpecInfo(topk=1, num_draft_tokens=2, tree_mask=tree(1, 2)), r"\(1, 2, 2\)"),
        (
            SpecInfo(topk=2, num_draft_tokens=2, tree_mask=tree(2, 2, device="meta")),
            "tree_mask on meta",
        ),
        (
            SpecInfo(topk=2, num_draft_tokens=2, tree_mask=tree(1, 2).expand(2, 2, 2)),
            r"tree_mask has strides \(0, 2, 1\)",
        ),
    ],
)
def test_a_verify_pass_refuses(spec, message):
    with pytest.raises(BatchError, match=message):
        batch(ForwardMode.TARGET_VERIFY, spec=spec)


def test_a_tree_of_no_requests_is_a_batch():
    batch = ForwardBatch.build(
        ForwardMode.TARGET_VERIFY,
        query_lens=[],
        seq_lens=[],
        page_table=torch.zeros(0, 3, dtype=torch.int32),
        page_size=4,
        spec=SpecInfo(topk=2, num_draft_tokens=2, tree_mask=tree(0, 2)),
    )
    assert (batch.batch_size, batch.num_tokens) == (0, 0)


def test_a_verify_pass_takes_a_chain_or_a_tree():
    chain = SpecInfo(topk=1, num_draft_tokens=2)
    for spec in (chain, dataclasses.replace(chain, topk=2, tree_mask=tree(2, 2))):
        assert batch(ForwardMode.TARGET_VERIFY, spec=spec).spec is spec


@pytest.mark.parametrize("mode", [m for m in ForwardMode if m is not ForwardMode.TARGET_VERIFY])
def test_only_a_verify_pass_takes_a_tree(mode):
    n = {ForwardMode.IDLE: 0, ForwardMode.DECODE: 1, ForwardMode.DRAFT_DECODE: 1}.get(mode, 2)
    spec = SpecInfo(topk=2, num_draft_tokens=2, tree_mask=tree(2, 2))
    message = rf"{mode.value} with a tree_mask \(only target_verify takes one\)"
    with pytest.raises(BatchError, match=message):
        batch(mode, t=2 * n, spec=spec)
    with pytest.raises(BatchError, match=message):
        ForwardBatch.build(
            mode,
            query_lens=[n, n],
            seq_lens=[3, 4],
            page_table=TABLE,
            page_size=4,
            spec=spec,
        )


TABLE = torch.tensor([[5, 2, 0], [7, 1, 3]], dtype=torch.int32)


def test_build_lays_new_tokens_behind_the_prefix():
    made = ForwardBatch.build(
        ForwardMode.EXTEND, query_lens=[3, 1], seq_lens=[6, 9], page_table=TABLE, page_size=4
    )
    full = made.views["full"]
    assert made.cu_seqlens_q.tolist() == [0, 3, 4]
    assert made.positions.tolist() == [3, 4, 5, 8]
    assert full.out_cache_loc.tolist() == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 3 * 4]
    assert full.seq_lens.tolist() == [6, 9]
    assert (full.seq_lens_host, made.query_lens_host) == ((6, 9), (3, 1))
    assert (made.max_q_len, full.max_seq_len) == (3, 9)


def test_build_gives_a_tree_the_positions_of_its_depths():
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()  # a root with two children
    made = ForwardBatch.build(
        ForwardMode.TARGET_VERIFY,
        query_lens=[3, 3],
        seq_lens=[8, 5],
        page_table=TABLE,
        page_size=4,
        spec=SpecInfo(topk=2, num_draft_tokens=3, tree_mask=torch.stack([mask, mask])),
    )
    assert made.positions.tolist() == [5, 6, 6, 2, 3, 3]
    # every draft has a slot of its own
    assert made.views["full"].out_cache_loc.tolist() == [9, 10, 11, 30, 31, 4]


@pytest.mark.parametrize(
    ("order", "positions"), [((0, 1, 2), [5, 6, 7]), ((2, 1, 0), [7, 6, 5]), ((1, 0, 2), [6, 5, 7])]
)
def test_build_takes_the_drafts_of_a_tree_in_any_order(order, positions):
    chain = torch.ones(3, 3).tril().bool()[list(order)][:, list(order)]
    made = ForwardBatch.build(
        ForwardMode.TARGET_VERIFY,
        query_lens=[3],
        seq_lens=[8],
        page_table=TABLE[:1],
        page_size=4,
        spec=SpecInfo(topk=2, num_draft_tokens=3, tree_mask=chain[None]),
    )
    assert made.positions.tolist() == positions


def test_a_draft_that_does_not_see_itself_has_the_position_of_one_that_does():
    """Its position counts the other drafts that it sees."""
    others = torch.ones(3, 3, dtype=torch.bool).tril(-1)
    for tree in (others, others | torch.eye(3, dtype=torch.bool)):
        spec = SpecInfo(topk=2, num_draft_tokens=3, tree_mask=tree[None])
        made = ForwardBatch.build(
            ForwardMode.TARGET_VERIFY, query_lens=[3], seq_lens=[8], page_table=TABLE[:1],
            page_size=4, spec=spec,
        )  # fmt: skip
        assert made.positions.tolist() == [5, 6, 7]


def test_build_of_nothing_is_idle():
    made = ForwardBatch.build(
        ForwardMode.IDLE, query_lens=[], seq_lens=[], page_table=TABLE[:0], page_size=4
    )
    assert (made.batch_size, made.num_tokens, made.max_q_len) == (0, 0, 0)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "message"),
    [
        ([1], [2], "one length per table row"),
        ([1, 1], [2, 13], "seq_len 13 > 12"),
        ([1, 5], [2, 4], "5 new tokens in a length of 4"),
        ([1, -1], [2, 4], "-1 new tokens in a length of 4"),
        ([1, -3], [2, -2], "-3 new tokens in a length of -2"),
        ([1, 1.5], [2, 4], r"query lengths \[1, 1.5\] .expected integers"),
        ([1, 1], [2, 4.0], r"lengths \[2, 4.0\] .expected integers"),
    ],
)
def test_build_refuses(query_lens, seq_lens, message):
    with pytest.raises(BatchError, match=message):
        ForwardBatch.build(
            ForwardMode.EXTEND,
            query_lens=query_lens,
            seq_lens=seq_lens,
            page_table=TABLE,
            page_size=4,
        )


@pytest.mark.parametrize(
    ("table", "size", "message"),
    [
        (TABLE[0], 4, "page_table"),
        (TABLE, 4.0, r"page_size \[4.0\] .expected integers"),
        (TABLE, 0, "page_size 0 .expected 1 or more"),
        (TABLE, -4, "page_size -4 .expected 1 or more"),
    ],
)
def test_build_refuses_tables_and_pages_that_are_none(table, size, message):
    with pytest.raises(BatchError, match=message):
        ForwardBatch.build(
            ForwardMode.EXTEND, query_lens=[1], seq_lens=[2], page_table=table, page_size=size
        )


def test_build_takes_integers_of_any_kind():
    """What the host copies hold are plain ones: backends compare and hash them."""
    plain = ForwardBatch.build(
        ForwardMode.EXTEND, query_lens=[1, 2], seq_lens=[2, 4], page_table=TABLE, page_size=4
    )
    for make in (torch.tensor, np.array):
        batch = ForwardBatch.build(
            ForwardMode.EXTEND,
            query_lens=make([1, 2]),
            seq_lens=make([2, 4]),
            page_table=TABLE,
            page_size=4,
        )
        view = batch.views["full"]
        assert {type(n) for n in (*batch.query_lens_host, *view.seq_lens_host)} == {int}
        assert (type(batch.max_q_len), type(view.max_seq_len)) == (int, int)
        assert torch.equal(batch.cu_seqlens_q, plain.cu_seqlens_q)
        assert torch.equal(view.out_cache_loc, plain.views["full"].out_cache_loc)


def test_construction_never_syncs():
    """A meta tensor has no values: .item, .tolist, .cpu and bool() of one raise."""
    probe = torch.zeros(2, device="meta")
    for read in (probe.sum().item, probe.tolist, probe.cpu, lambda: bool(probe.any())):
        with pytest.raises((NotImplementedError, RuntimeError)):
            read()
    spec = SpecInfo(topk=2, num_draft_tokens=2, tree_mask=tree(2, 2, device="meta"))
    state = torch.zeros(2, dtype=torch.int32, device="meta")
    views = {"full": view(device="meta"), "window": view(device="meta")}
    modes = ((ForwardMode.EXTEND, None), (ForwardMode.TARGET_VERIFY, spec))
    for mode, s in modes:
        batch(mode, device="meta", spec=s, state_slots=state, views=views)
    for mode, s in modes:
        ForwardBatch.build(
            mode,
            query_lens=[2, 2],
            seq_lens=[5, 9],
            page_table=TABLE.to("meta"),
            page_size=4,
            spec=s,
            state_slots=state,
        )


LAYER = {
    "layer_id": 7,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "v_head_dim": 64,
    "scale": 0.125,
}
SHAPE = {k: v for k, v in LAYER.items() if k not in ("layer_id", "scale")}
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sliding_window": 0},
            r"sliding_window 0 \(expected an integer of 1 or more; None is off\)",
        ),
        (
            {"sliding_window": -1},
            r"sliding_window -1 \(expected an integer of 1 or more; None is off\)",
        ),
        (
            {"logit_cap": 0.0},
            r"logit_cap 0.0 \(expected a number above 0 that float32 holds; None is",
        ),
        ({"logit_cap": -30.0}, r"logit_cap -30.0"),
        ({"logit_cap": NAN}, r"logit_cap nan"),
        ({"logit_cap": INF}, r"logit_cap inf"),
        ({"logit_cap": 3.5e38}, r"logit_cap 3.5e\+38"),
        ({"logit_cap": 1e-46}, r"logit_cap 1e-46"),
        ({"num_q_heads": 0}, r"num_q_heads 0 \(expected an integer of 1 or more\)"),
        ({"head_dim": 64.5}, r"head_dim 64.5 \(expected an integer of 1 or more\)"),
        ({"sliding_window": 4096.0}, r"sliding_window 4096.0 \(expected an integer"),
        ({"logit_cap": "30"}, r"logit_cap '30' \(expected a number above 0"),
        ({"num_kv_heads": 0}, r"num_kv_heads 0"),
        ({"num_kv_heads": 3}, r"4 query heads are no multiple of 3 KV heads"),
        ({"head_dim": 0}, r"head_dim 0"),
        ({"v_head_dim": -64}, r"v_head_dim -64"),
    ],
)
def test_off_is_none_and_nothing_else(changes, message):
    with pytest.raises(UsageError, match=f"layer 7: {message}"):
        AttentionLayer(**LAYER | changes)
    with pytest.raises(UsageError, match=message):
        LayerRequirements(**SHAPE | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": NAN}, r"scale nan \(expected a finite number above 0\)"),
        ({"scale": INF}, "scale inf"),
        ({"scale": 0.0}, "scale 0.0"),
        ({"scale": -0.125}, "scale -0.125"),
        ({"scale": None}, "scale None"),
        ({"scale": torch.tensor(0.125)}, r"scale tensor\(0.1250\) \(expected a finite number"),
        ({"sinks": [0.0] * 4}, r"sinks list \(expected a tensor of \[4\] floats\)"),
        ({"index_topk": 2.5}, r"index_topk 2.5 \(expected an integer of 1 or more\)"),
        ({"sinks": torch.zeros(2)}, r"sinks torch.float32 .*2.* \(expected \[4\] floats\)"),
        ({"sinks": torch.zeros(1, 4)}, r"sinks torch.float32 .*\[1, 4\]"),
        ({"sinks": torch.zeros(4, dtype=torch.int32)}, "sinks torch.int32"),
        ({"sinks": apart(torch.zeros(4))}, r"sinks .*strides \(2,\)"),
        ({"sinks": torch.zeros(1).expand(4)}, r"sinks .*strides \(0,\)"),
    ],
)
def test_a_layer_refuses(changes, message):
    with pytest.raises(UsageError, match=f"layer 7: {message}"):
        AttentionLayer(**LAYER | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 1, "logit_cap": 1e-3, "sinks": torch.zeros(4, dtype=torch.bfloat16)},
        {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 1, "v_head_dim": 1},
        {"num_q_heads": 4, "num_kv_heads": 8},  # a linear layer: value heads outnumber query heads
    ],
)
def test_a_layer_takes(changes):
    assert AttentionLayer(**LAYER | changes).layer_id == 7


@pytest.mark.parametrize("window", [1, 2**30, 2**31, 2**62])
def test_windows_fit_the_32_bits_of_kernels(window):
    """With a window of 64 bits Triton compiled no kernel, and libraries would cut it."""
    shape = {"layer_id": 0, "num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8, "v_head_dim": 8}
    layer = AttentionLayer(**shape, scale=1.0, sliding_window=window)
    assert layer.sliding_window == layer.group.window == min(window, 2**30)


def test_query_heads_of_softmax_layers_are_a_multiple_of_their_kv_heads():
    with pytest.raises(UsageError, match="4 query heads are no multiple of 8 KV heads"):
        LayerRequirements(num_q_heads=4, num_kv_heads=8)
    assert LayerRequirements(kind="gdn", num_q_heads=4, num_kv_heads=8).family == "linear"


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, {}),
        ({"v_head_dim": 32, "num_kv_heads": 1}, {"v_head_dim": 32, "num_kv_heads": 1}),
        ({"sliding_window": 9, "logit_cap": 3.0}, {"sliding_window": 9, "logit_cap": 3.0}),
        ({"sinks": torch.zeros(4)}, {"sinks": True}),
        ({"is_causal": False}, {"encoder": True}),
        ({"is_cross": True}, {"cross": True}),
        ({"is_cross": True, "is_causal": False}, {"cross": True}),  # it needs no encoder layer
    ],
)
def test_requirements_of_a_layer(changes, needs):
    layer = AttentionLayer(**LAYER | changes)
    assert LayerRequirements.of(layer, "mla") == LayerRequirements(kind="mla", **SHAPE | needs)
    assert LayerRequirements.of(layer).kind == "mha"


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([1, 2, 4], r"cu_seqlens_q \[1, 2, 4\] .expected to rise from 0 to at most 4"),
        ([0, 3, 2], "expected to rise from 0"),
        ([0, 2, 5], "to at most 4"),
        ([0, 1, 4], r"cu_seqlens_q \[0, 1, 4\] of other lengths than \[2, 2\], on the host"),
    ],
)
def test_starts_that_cut_other_requests_are_refused_on_a_cpu(starts, message):
    good = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        cu_seqlens_q=torch.tensor([0, 2, 4], dtype=torch.int32),
        positions=torch.tensor([0, 1, 0, 1]),
        max_q_len=4,
        query_lens_host=(2, 2),
    )
    with pytest.raises(BatchError, match=message):
        dataclasses.replace(good, cu_seqlens_q=torch.tensor(starts, dtype=torch.int32))
    padded = torch.tensor([0, 1, 3], dtype=torch.int32)  # a token behind the last request
    dataclasses.replace(good, cu_seqlens_q=padded, query_lens_host=None)


def test_a_mode_by_its_name_is_refused():
    with pytest.raises(BatchError, match=r"forward_mode is str .expected ForwardMode"):
        batch(mode="extend")
