"""A model with windowed layers beside full ones runs each kind on the backend that is faster there.

Costs are made up: what is tested is the way of a pass through transformers, and its tokens.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from attn_core.costs import store
from attn_core.costs.environment import environment
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Pass, forms
from attn_core.integrations.transformers import enable
from attn_core.model_config import requirements_from_config
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import probe_cpu
from tiny_models import MIXED, W, generate, inputs_of, tiny

PAGE, NEW = 16, 6
LAYERS = {"num_hidden_layers": 6, "layer_types": [*MIXED["layer_types"][:1] * 5, "full_attention"]}
SIZES = [Pass.even("decode", b, n) for b in (1, 8) for n in (8, 128)]
SIZES += [Pass.even("prefill", b, n, q) for b in (1, 8) for n in (8, 128) for q in (1, n)]


@pytest.fixture
def registry(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """torch_native, and the plain reference of the tests as a plugin; costs are in tuned.json."""
    monkeypatch.setenv("ATTN_PROFILE", str(tmp_path / "tuned.json"))
    workload = {"prompts": {"16": 1}, "requests": {"2": 1}, "output": NEW}
    monkeypatch.setenv("ATTN_WORKLOAD", json.dumps(workload))
    native = load_plugins().get("torch_native")
    row = Capabilities(
        kind="mha", device="any", dtypes={"fp32"}, kv_dtypes={"fp32"}, priority=1, lse=True,
        sliding_window=True, sinks=True, logit_cap=True, needs_host_lengths=True,
    )  # fmt: skip
    plain = BackendSpec(name="plain", capabilities=[row], create="reference:Reference")
    return Registry(backends={("softmax", s.name): s for s in (native, plain)})


def measured(path: Any, registry: Registry, model: Any, plan: float | None) -> None:
    """Write a profile: the reference is said to be fast in windows, torch_native without."""
    needs = requirements_from_config(model.config.to_dict(), dtype="fp32", page_size=PAGE)
    costs = {}
    for form in forms(needs, PAGE):
        for name in ("plain", "torch_native"):
            us = 10.0 if (name == "plain") == (form.window == W) else 40.0
            costs |= {Key(name, "", form, x): Cost(us, us, us, 0.0, plan) for x in SIZES}
    env = environment(registry, probe_cpu())
    store.write(path, Profile(environment=env, costs=costs, date="2026-11-26"))


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text"])
def test_tokens_are_those_of_one_backend_and_groups_are_counted(
    name: str, registry: Registry, tmp_path: Any
) -> None:
    model, inputs = tiny(name, **LAYERS), inputs_of(name)
    measured(tmp_path / "tuned.json", registry, model, plan=5.0)
    taken = {}
    for adaptive in (False, True):
        with enable(model, page_size=PAGE, adaptive=adaptive, registry=registry) as engine:
            tokens = generate(model, inputs, max_new_tokens=NEW)
            kinds = engine.dispatcher.passes
            taken[adaptive] = tokens, {(k.role, k.backend, "window" in k.group) for k in kinds}
            if adaptive:
                assert sum(kinds.values()) == 2 * NEW  # each pass once for each group
                assert all(k.group for k in kinds)
            else:
                assert sum(kinds.values()) == NEW
    assert torch.equal(taken[True][0], taken[False][0])
    assert taken[False][1] == {("prefill", "plain", False), ("decode", "plain", False)}
    assert taken[True][1] == {
        (role, backend, backend == "plain")
        for role in ("prefill", "decode")
        for backend in ("plain", "torch_native")
    }


@pytest.mark.parametrize("plan", [None, 100.0])
def test_one_backend_takes_all_layers_where_a_plan_costs_more_or_is_not_measured(
    plan: float | None, registry: Registry, tmp_path: Any
) -> None:
    model = tiny("gpt_oss", **LAYERS)
    measured(tmp_path / "tuned.json", registry, model, plan)
    with enable(model, page_size=PAGE, registry=registry) as engine:
        assert not engine.selection.alternatives
        generate(model, inputs_of("gpt_oss"), max_new_tokens=3)
        assert {(k.backend, k.group) for k in engine.dispatcher.passes} == {("plain", "")}
