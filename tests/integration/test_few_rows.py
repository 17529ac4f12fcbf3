"""A model's linear layers take the class of a backend, and are plain ones again."""

import pytest
import torch
from attn_core.integrations.transformers.few_rows import slow_down_linear, speed_up_linear
from torch import nn


class Fast(nn.Linear):
    """What a backend brings."""


class Adapted(nn.Linear):
    """A layer that does more than its class's own."""


class Backend:
    """All that is asked of a backend."""

    def __init__(self, kind):
        self.linear_class = lambda: kind


@pytest.fixture
def model():
    shared, wrapped = nn.Linear(8, 8), nn.Linear(8, 8)
    wrapped.forward = lambda x: x
    return nn.ModuleDict(
        {
            "one": nn.Sequential(shared),
            "two": nn.Sequential(shared, nn.LayerNorm(8)),
            "adapted": Adapted(8, 8),
            "wrapped": wrapped,
        }
    )


def test_plain_layers_alone_change_and_are_put_back(model):
    weights = model.state_dict()
    changed = speed_up_linear(model, Backend(Fast))
    assert changed == [model["one"][0]]
    assert type(model["two"][0]) is Fast
    assert type(model["adapted"]) is Adapted
    assert type(model["wrapped"]) is nn.Linear
    slow_down_linear(changed)
    assert type(model["one"][0]) is nn.Linear
    after = model.state_dict()
    assert all(after[name].data_ptr() == x.data_ptr() for name, x in weights.items())


def test_a_backend_without_a_class_changes_nothing(model):
    assert speed_up_linear(model, Backend(None)) == []
    assert type(model["one"][0]) is nn.Linear
    assert torch.equal(model["one"](x := torch.randn(2, 8)), model["one"][0](x))
