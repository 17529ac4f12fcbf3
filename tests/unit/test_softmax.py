"""Weights of keys are as exact for large scores as for small ones."""

import math
from types import SimpleNamespace

import pytest
import torch
from attn_core.backends.torch_native import kernels
from attn_core.ops.merge import merge_states
from attn_core.ops.softmax import softmax_lse

CLOSE = {"rtol": 4e-7, "atol": 0.0}  # a few roundings; that of an lse of 1000 is 100 times as large


@pytest.mark.parametrize("score", [0.0, 1000.3, -1000.3])
def test_equal_scores_weigh_alike(score):
    weights, lse = softmax_lse(torch.full((2, 3), score))
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3), **CLOSE)
    torch.testing.assert_close(lse, torch.full((2,), score + math.log(3)))


def test_a_row_that_sees_no_key_weighs_nothing():
    weights, lse = softmax_lse(torch.tensor([[-math.inf, -math.inf], [-math.inf, 5.0]]))
    assert weights.tolist() == [[0.0, 0.0], [0.0, 1.0]]
    assert lse.tolist() == [-math.inf, 5.0]
    weights, lse = softmax_lse(torch.empty(2, 0))
    assert weights.shape == (2, 0)
    assert lse.tolist() == [-math.inf, -math.inf]


def test_formed_scores_of_equal_keys_give_their_value():
    q, k, v = torch.ones(1, 2, 1, 16), torch.ones(1, 1, 3, 16), torch.ones(1, 1, 3, 16)
    tile = SimpleNamespace(mask=None, causal=False, dead=None)
    rest = {"v_dim": 16, "logit_cap": 3000.0, "need_lse": True}
    out, _ = kernels.attend(q, k, v, tile, scale=1000.3 / 16, **rest)
    torch.testing.assert_close(out, torch.ones_like(out), **CLOSE)


def test_merged_parts_of_equal_weight_give_their_value():
    out, _ = merge_states(torch.ones(3, 1, 1, 8), torch.full((3, 1, 1), 1000.3))
    torch.testing.assert_close(out, torch.ones_like(out), **CLOSE)
