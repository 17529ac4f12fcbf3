"""Packed linear layers: the same numbers as torch's own, and what is left as it is."""

import copy
import pickle

import pytest
import torch
from attn_core.integrations.transformers import packed
from attn_core.integrations.transformers.packed import PackedLinear, pack_linear, unpack_linear
from attn_core.spec.device import probe_cpu
from torch import nn

AMX = probe_cpu().arch == "amx"


@pytest.fixture
def anywhere(monkeypatch):
    """Pack on every CPU whose torch can, as on one with AMX."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch has no bf16 products of oneDNN on this CPU")
    monkeypatch.setattr(packed, "_gains", lambda: True)


@pytest.mark.parametrize("shape", [(1, 64), (3, 2, 64), (0, 64), (100, 64), (64,)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_multiplies_as_a_plain_one(anywhere, shape, bias):
    plain = nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16)
    with torch.inference_mode():
        x = torch.randn(shape).bfloat16()
        exact = x.double() @ plain.weight.double().T + (plain.bias.double() if bias else 0)
        got = PackedLinear(plain)(x)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=2**-8)


def test_strided_rows_and_the_plain_weights(anywhere):
    plain = nn.Linear(64, 48, dtype=torch.bfloat16)
    layer = PackedLinear(plain)
    assert torch.equal(layer.weight, plain.weight)
    with torch.inference_mode():
        for x in (torch.randn(5, 2, 64)[:, 1], torch.randn(64, 5).T):
            x = x.bfloat16()
            torch.testing.assert_close(layer(x), plain(x), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_is_saved_copied_and_pickled_as_a_plain_one(anywhere, bias):
    plain = nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16)
    layer = nn.Sequential(PackedLinear(plain))
    saved, want = layer.state_dict(), nn.Sequential(plain).state_dict()
    assert saved.keys() == want.keys()
    assert all(torch.equal(saved[name], want[name]) for name in want)
    x = torch.randn(3, 64).bfloat16()
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(again[0], PackedLinear)
        with torch.inference_mode():
            assert torch.equal(again(x), layer(x))


class Adapted(nn.Linear):
    """A layer that does more than its class's own."""


def test_only_plain_layers_in_bf16_are_packed_and_put_back(anywhere):
    shared = nn.Linear(8, 8, dtype=torch.bfloat16)
    wrapped = nn.Linear(8, 8, dtype=torch.bfloat16)
    wrapped.forward = lambda x: x
    model = nn.ModuleDict(
        {
            "one": nn.Sequential(shared),
            "two": nn.Sequential(shared, nn.LayerNorm(8)),
            "fp32": nn.Linear(8, 8),
            "adapted": Adapted(8, 8, dtype=torch.bfloat16),
            "wrapped": wrapped,
        }
    )
    before = dict(model.named_modules(remove_duplicate=False))
    replaced = pack_linear(model)
    assert isinstance(model["one"][0], PackedLinear)
    assert model["one"][0] is model["two"][0]
    assert [name for _, name, _ in replaced] == ["0", "0"]
    unpack_linear(replaced)
    assert dict(model.named_modules(remove_duplicate=False)) == before


def test_nothing_is_packed_where_nothing_is_gained(monkeypatch):
    monkeypatch.setattr(packed, "_gains", lambda: False)
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16))
    assert not pack_linear(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.skipif(not AMX, reason="packs on a CPU with AMX alone")
def test_a_cpu_with_amx_packs():
    assert pack_linear(nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16)))
