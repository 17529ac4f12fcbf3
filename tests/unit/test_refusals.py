"""What the chosen row does not honour is refused, in words, before anything runs."""

import dataclasses
import functools

import pytest
import torch
from attn_core.cache.pool import KVPool
from attn_core.errors import BackendError, UnsupportedError, UsageError
from attn_core.runtime.batch import SpecInfo
from attn_core.runtime.contract_checks import refuse_unplanned, refuse_window
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.spec.capabilities import ANY_TOPK
from recording import DV, HQ, LAYERS, M, batch, make, qkv, recorder


@pytest.mark.parametrize(
    ("change", "flag", "message"),
    [
        ({"sinks": torch.zeros(HQ)}, "sinks", "sinks"),
        ({"logit_cap": 30.0}, "logit_cap", "logit_cap 30"),
        ({"sliding_window": 128}, "sliding_window", "sliding_window 128"),
        ({"is_cross": True, "is_causal": False}, "cross_attention", "cross"),
        ({"is_causal": False}, "encoder", "encoder"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_field_that_a_row_does_not_honour_is_refused_at_construction(role, change, flag, message):
    layers = (LAYERS[0], dataclasses.replace(LAYERS[1], **change))
    with pytest.raises(
        UnsupportedError, match=rf"layer 1 needs {message} \(not supported\), .* of picky"
    ):
        make(**{role: recorder("picky", layers=layers)})
    make(**{role: recorder("able", layers=layers, **{flag: True})})


@pytest.mark.parametrize("name", ["is_causal", "is_cross"])
def test_an_unknown_direction_is_refused(name):
    """None is no direction: taken for False, a layer would attend to later tokens."""
    with pytest.raises(UsageError, match=f"layer 0: {name} None .expected a bool"):
        dataclasses.replace(LAYERS[0], **{name: None})


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_in_a_tensor_is_refused_at_construction(name):
    def dispatcher(scale, *, tensor_scales):
        scales = {0: (scale, 1.0) if name == "k_scale" else (1.0, scale)}
        pool = KVPool(LAYERS, num_pages=5, page_size=4, kv_cache_dtype="fp8_e4m3", scales=scales)
        routes = {
            "prefill": recorder("able", tensor_scales=True),
            "decode": recorder("picky", tensor_scales=tensor_scales),
        }
        for backend in routes.values():
            backend.config = dataclasses.replace(backend.config, kv_cache_dtype="fp8_e4m3")
        return HybridDispatcher(routes, pool)

    with pytest.raises(UnsupportedError, match=rf"layer 0: {name} is a tensor, .* of picky has no"):
        dispatcher(torch.ones(1), tensor_scales=False)
    dispatcher(torch.ones(1), tensor_scales=True)
    dispatcher(2.0, tensor_scales=False)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"head_dim_pairs": frozenset()}, r"head_dim 8/4 \(supports equal dims\)"),
        ({"head_dim_pairs": {(8, 8)}}, r"head_dim 8/4 \(supports equal dims, 8/8\)"),
        ({"q_heads": {16}}, r"num_q_heads 4 \(supports 16\)"),
        ({"group_sizes": {1, 4}}, r"group_size 2 \(supports 1, 4\)"),
    ],
)
def test_a_shape_that_a_row_does_not_take_is_refused_at_construction(row, message):
    with pytest.raises(UnsupportedError, match=f"layer 0 needs {message}, .* of picky"):
        make(decode=recorder("picky", **row))


@pytest.mark.parametrize(
    ("change", "causal", "refused"),
    [
        ({}, None, False),
        ({"is_causal": False}, None, True),
        ({"is_cross": True}, None, True),
        ({}, False, True),
        ({"is_causal": False}, True, False),
        ({"is_causal": False, "sliding_window": None}, None, False),
    ],
)
def test_a_window_without_causal_order_is_refused(change, causal, refused):
    layer = dataclasses.replace(LAYERS[1], **{"sliding_window": 4} | change)
    if not refused:
        refuse_window("mine", layer, causal=causal)
        return
    message = "layer 1: a sliding window of 4 without causal order; mine windows only causal"
    with pytest.raises(UnsupportedError, match=message):
        refuse_window("mine", layer, causal=causal)


def test_a_layer_without_a_plan_is_named_beside_what_is_planned():
    message = r"layer 1 \(view 'window'\) was not planned: .*; planned: \['a', 'b'\]$"
    with pytest.raises(BackendError, match=message):
        refuse_unplanned(LAYERS[1], {"a": 1, "b": 2})


def test_an_lse_is_refused_where_the_row_has_none():
    dispatcher, pre, _ = make(prefill=recorder("p", lse=False))
    q, k, v = qkv(4)
    with pytest.raises(UnsupportedError, match="row of p returns no log-sum-exp"):
        dispatcher.forward(q, k, v, LAYERS[0], batch(M.EXTEND), None, return_lse=True)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="row of p returns no log-sum-exp"):
        dispatcher.forward_ragged(q, k, v, LAYERS[0], cu, cu, 4, 4, causal=True, return_lse=True)
    assert not pre.calls
    assert not dispatcher.caches.layer(0).k.any()
    dispatcher.forward(q, k, v, LAYERS[0], batch(M.EXTEND), None)


def test_topk_indices_are_for_sparse_rows():
    indices = torch.zeros(4, 2, dtype=torch.int32)
    q, k, v = qkv(4)
    dispatcher, _, _ = make()
    with pytest.raises(UnsupportedError, match="topk_indices: the chosen row of prefiller is of"):
        dispatcher.forward(q, k, v, LAYERS[0], batch(M.EXTEND), None, topk_indices=indices)
    dispatcher, pre, _ = make(prefill=recorder("sparse", kind="dsa"))
    dispatcher.forward(q, k, v, LAYERS[0], batch(M.EXTEND), None, topk_indices=indices)
    assert pre.calls[-1][2]["topk_indices"] is indices


@pytest.mark.parametrize(
    ("limit", "topk", "tree", "message"),
    [
        (0, 1, False, "asked to verify topk 1, its chosen row verifies no drafts"),
        (1, 1, False, None),
        (1, 1, True, "topk 1 with a tree_mask, .* chains, topk 1 without"),
        (1, 2, True, "topk 2 with a tree_mask, .* chains"),
        (4, 4, True, None),
        (4, 5, True, "trees up to topk 4"),
        (ANY_TOPK, 64, True, None),
    ],
)
def test_drafts_that_a_row_cannot_verify_are_refused(limit, topk, tree, message):
    dispatcher, pre, _ = make(prefill=recorder("p", max_verify_topk=limit))
    mask = torch.ones(2, 2, 2).tril().bool() if tree else None
    b = batch(M.TARGET_VERIFY, spec=SpecInfo(topk=topk, num_draft_tokens=2, tree_mask=mask))
    for plan in (
        dispatcher.init_forward_metadata,
        dispatcher.init_forward_metadata_capture_cuda_graph,
    ):
        if message is None:
            plan(b)
        else:
            with pytest.raises(UnsupportedError, match=message):
                plan(b)
    assert len(pre.calls) == (0 if message else 2)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda out, lse: out, r"1 value for layer 0 \(expected \(out, lse\)\)"),
        (lambda out, lse: (out, lse.double()), r"lse \[4, 4\] torch.float64 .*float32"),
        (lambda out, lse: (out, lse.T[:2]), r"lse \[2, 4\] .*expected \[4, 4\]"),
        (lambda out, lse: (out[:2], lse), r"out \[2, 4, 4\] .*expected \[4, 4, 4\]"),
        (lambda out, lse: (out.clone(), lse), "a new tensor .*the one given as `out`, filled"),
    ],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_an_output_that_breaks_the_contract_is_refused(returned, message, ragged):
    dispatcher, pre, _ = make()
    attend = pre._attend
    pre._attend = lambda *args: returned(*attend(*args))
    q, k, v = qkv(4)
    out, cu = torch.empty(4, HQ, DV), torch.tensor([0, 4], dtype=torch.int32)
    more = {"out": out, "return_lse": True}
    if ragged:
        args = (q, k, v, LAYERS[0], cu, cu, 4, 4)
        run = functools.partial(dispatcher.forward_ragged, *args, causal=True, **more)
    else:
        args = (q, k, v, LAYERS[0], batch(M.EXTEND), None)
        run = functools.partial(dispatcher.forward, *args, **more)
    with pytest.raises(BackendError, match=f"prefiller returned .*{message}"):
        run()


def test_outputs_are_checked_once_per_layer_and_method_not_in_every_pass(monkeypatch):
    checked = []
    monkeypatch.setattr(
        "attn_core.runtime.dispatcher.refuse_output", lambda *args: checked.append(args[3].layer_id)
    )
    dispatcher, _, _ = make()
    for _ in range(3):
        for layer in LAYERS:
            dispatcher.forward(*qkv(4), layer, batch(M.EXTEND), None)
            dispatcher.forward(*qkv(2), layer, batch(M.DECODE), None)
    assert checked == [0, 0, 1, 1]
