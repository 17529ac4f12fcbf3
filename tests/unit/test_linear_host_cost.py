"""What the host does in a call of linear attention, counted as in test_host_cost.py."""

import dataclasses
import importlib

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from attn_core.backends.triton.linear import launch as linear
from attn_core.backends.triton.linear import prefill
from forms import FORMS, shifted
from frozen_launches import recorded_launches
from linear_reference import make_linear_layer
from operators import Operators

CASES = [
    *(("gdn", x) for x in ("decode", "verify", "tree", "commit", "prefill", "fused", "ahead")),
    *(("kda", x) for x in ("decode", "verify", "tree", "commit", "prefill")),
]


class Linear:
    """A layer of linear attention over states, as its backend calls the kernels."""

    def __init__(self, kind="gdn"):
        self.layer = make_linear_layer(kind=kind, heads=(2, 4), dims=(128, 128), gate="softplus")
        self.g_dims = (4, 128) if kind == "kda" else (4,)
        self.kept = linear.LinearArguments.of(self.layer, "sm90")
        self.state = torch.zeros(2, 40, 4, 128, 128)
        dims = ((4, 128), (2, 128), self.g_dims)
        self.records = tuple(torch.zeros(2, 40, 4, *x) for x in dims)

    def run(
        self, operation, requests, *, change=lambda x: x, slots_of=lambda x: x, state=None, **more
    ):
        """Run an operation for so many requests, with inputs and slots of some form."""
        drafts = {"decode": 1, "prefill": 70, "fused": 70, "ahead": 70}.get(operation, 4)
        tokens = requests * drafts
        q, k, v = (torch.zeros(tokens, h, 128, dtype=torch.bfloat16) for h in (2, 2, 4))
        f = torch.zeros(tokens, *self.g_dims, dtype=torch.bfloat16)
        b = torch.zeros(tokens, 4, dtype=torch.bfloat16)
        inputs = [change(x) for x in (q, k, v, f, b)]
        slots = slots_of(torch.arange(requests, dtype=torch.int32))
        mask = torch.ones(requests, 4, 4, dtype=torch.bool) if operation == "tree" else None
        state = self.state[0] if state is None else state
        if operation == "decode":
            return linear.decode(self.kept, *inputs, state, slots, **more)
        if operation in ("verify", "tree"):
            records = tuple(x[0] for x in self.records)
            return linear.verify(self.kept, *inputs, state, records, slots, tree_mask=mask, **more)
        if operation == "commit":
            return linear.commit(self.kept, self.state, self.records, slots, slots, **more)
        plan = prefill.plan_prefill(
            self.kept, [drafts] * requests, dtype=torch.bfloat16, device=q.device
        )
        plan = dataclasses.replace(
            plan, processors=132, fused=operation == "fused", ahead=operation == "ahead"
        )
        with Operators() as ran:
            out = prefill.prefill(self.kept, *inputs, state, slots, plan, **more)
        assert ran.names == ["empty"]
        return out


@pytest.fixture
def launches():
    with torch.no_grad(), recorded_launches() as recorded:
        yield recorded


@pytest.fixture
def on_hopper(monkeypatch):
    """Let prefill take Hopper's kernels, as outside of Triton's interpreter."""
    own = importlib.import_module("attn_core.backends.triton.linear.hopper.launch")
    monkeypatch.setattr(prefill, "_kernels_of", lambda arch: own)


@pytest.mark.parametrize(("kind", "operation"), CASES)
def test_linear_attention_is_launched_again(kind, operation, launches, on_hopper):
    made = Linear(kind)
    made.run(operation, 3)
    count = len(launches.names(slow=True))
    assert count == (2 if operation in ("prefill", "ahead") else 1)
    for requests in (3, 4, 1):
        with Operators() as ran:
            made.run(operation, requests)
        assert len(launches.names(slow=False)) == count
        if operation == "decode":
            assert ran.names[-1] == "new_empty"


@pytest.mark.parametrize(("kind", "operation"), CASES)
def test_other_forms_of_linear_inputs_are_other_launches(kind, operation, launches, on_hopper):
    made = Linear(kind)
    bf16 = made.state[0].bfloat16()
    for form in (lambda x: x, *FORMS):
        made.run(operation, 3, change=form)
        made.run(operation, 3, slots_of=shifted, change=form)
        if operation != "commit":
            made.run(operation, 3, change=form, state=bf16)
        made.run(operation, 3)
    slots, fresh = torch.arange(3, dtype=torch.int32), torch.zeros(3, dtype=torch.bool)
    for places in (
        {"slots_out": slots}, {"slots_out": shifted(slots)},
        {"fresh": fresh}, {"fresh": shifted(fresh)},
        {"slots_out": shifted(slots), "fresh": shifted(fresh)},
    ):  # fmt: skip
        made.run(operation, 3, **places)
    assert launches
