"""What the chosen row does not honour is refused, in words, before anything runs."""

import dataclasses

import pytest
import torch
from attn_core.capabilities import TREES
from attn_core.errors import UnsupportedError
from attn_core.forward import SpecInfo
from recording import HQ, LAYERS, M, batch, make, qkv, recorder


@pytest.mark.parametrize(
    ("change", "flag", "message"),
    [
        ({"sinks": torch.zeros(HQ)}, "sinks", "attention sinks"),
        ({"logit_cap": 30.0}, "logit_cap", "logit_cap 30.0"),
        ({"sliding_window": 128}, "sliding_window", "window 128"),
        ({"is_cross": True, "is_causal": False}, "cross_attention", "cross attention"),
        ({"is_causal": False}, "encoder", "attention that is not causal"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_field_that_a_row_does_not_honour_is_refused_at_construction(role, change, flag, message):
    layers = (LAYERS[0], dataclasses.replace(LAYERS[1], **change))
    with pytest.raises(UnsupportedError, match=f"layer 1 needs {message}, .* of picky"):
        make(**{role: recorder("picky", layers=layers)})
    make(**{role: recorder("able", layers=layers, **{flag: True})})


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
        (TREES, 64, True, None),
    ],
)
def test_drafts_that_a_row_cannot_verify_are_refused(limit, topk, tree, message):
    dispatcher, pre, _ = make(prefill=recorder("p", max_topk=limit))
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
