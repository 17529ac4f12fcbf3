"""Groups of equal layers of one model go to several backends in one pass, where that pays."""

from __future__ import annotations

import itertools
import random
import sys
import types
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from attn_core.backends.torch_native.backend import TorchNative
from attn_core.cache.pool import KVPool
from attn_core.costs.model import CostModel
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form, Pass
from attn_core.costs.table import _Times, bucket_of, table
from attn_core.costs.workload import Workload
from attn_core.integrations.ranks import decision
from attn_core.plugins.registry import Registry
from attn_core.runtime.adaptive import GroupPlans, digest, pruned
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.graphs import GraphRunner
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.picks import picks
from attn_core.runtime.warmup import warmup
from attn_core.selection.result import Overrides
from attn_core.selection.solver import select
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device
from attn_core.spec.requirements import LayerRequirements, Requirements
from attn_core.trust.shadow import Shadow
from graph_passes import passing
from recording import M

SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
W, FULL, WINDOW = 4, 2, 6  # the window, and how many layers are without and with it
LAYERS = [
    AttentionLayer(
        layer_id=i, **SHAPE, v_head_dim=16, scale=0.25, sliding_window=None if i % 4 == 3 else W
    )
    for i in range(FULL + WINDOW)
]
NEEDS = Requirements(layers=LayerRequirements.counted(LAYERS), dtype="fp32", page_size=4)
ROW = Capabilities(
    kind="mha", device="any", dtypes={"fp32"}, kv_dtypes={"fp32"}, priority=1, cuda_graph="uniform",
    sliding_window=True, lse=True,
)  # fmt: skip
SIZES = [Pass.even("decode", b, n) for b in (1, 8) for n in (4, 64)]
SIZES += [Pass.even("prefill", b, n, q) for b in (1, 8) for n in (4, 64) for q in (1, n)]
WORKLOAD = Workload(prompts={8: 1}, requests={1: 1}, output=4)
NAMES = {"wide": {None: 10.0, W: 20.0}, "narrow": {None: 20.0, W: 10.0}}  # µs, by the window


def form(window):
    return Form(q_heads=4, kv_heads=2, head_dim=16, v_head_dim=16, window=window, page_size=4,
                dtype="fp32", store="fp32")  # fmt: skip


GROUPS = tuple(form(window).layer for window in (W, None))  # in the order of the layers


def profile(plan=1.0, names=NAMES):
    return Profile(
        date="2026-11-26T10:00:00+00:00",
        costs={
            Key(name, "", form(window), x): Cost(us, us, us, 0.0, plan)
            for name, times in names.items()
            for window, us in times.items()
            for x in SIZES
        },
    )


class Noting(TorchNative):
    """Notes which layers each of its instances ran, and its plans."""

    ran: ClassVar[Counter] = Counter()
    wrong: ClassVar[set] = set()

    def _note(self, what):
        self.ran[self.config.name, what] += 1

    def init_forward_metadata(self, batch):
        self._note("plan")
        return super().init_forward_metadata(batch)

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        self._note("replay")
        super().init_forward_metadata_replay_cuda_graph(batch, metadata)

    def forward(self, q, k, v, layer, cache, batch, metadata, **more):
        self._note(layer.sliding_window)
        out = super().forward(q, k, v, layer, cache, batch, metadata, **more)
        return out + 1 if (self.config.name, layer.sliding_window) in self.wrong else out


@pytest.fixture(autouse=True)
def noted(monkeypatch):
    module = types.ModuleType("noting_backend")
    module.Noting = Noting
    monkeypatch.setitem(sys.modules, "noting_backend", module)
    monkeypatch.setattr(Noting, "ran", Counter())
    monkeypatch.setattr(Noting, "wrong", set())
    return Noting.ran


def registry(row=ROW):
    specs = [BackendSpec(name=n, capabilities=[row], create="noting_backend:Noting") for n in NAMES]
    return Registry(backends={("softmax", s.name): s for s in specs})


def chosen(needs=NEEDS, overrides=None, row=ROW, costs=None):
    return select(
        needs, Device("cpu"), registry(row), {}, overrides, costs or profile(), workload=WORKLOAD,
        advise=False,
    )  # fmt: skip


def create(selection, *, adaptive=True, **more):
    pool = KVPool(LAYERS, num_pages=13, page_size=4, kv_cache_dtype="fp32")
    return HybridDispatcher.from_selection(
        selection, registry(), LAYERS, pool, adaptive=adaptive, **more
    )


def run(dispatcher, batch, x, metadata=None):
    metadata = dispatcher.init_forward_metadata(batch) if metadata is None else metadata
    return [
        dispatcher.forward(x[i], x[i][:, :2], x[i][:, :2], layer, batch, metadata)
        for i, layer in enumerate(LAYERS)
    ]


def queries(tokens, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(len(LAYERS), tokens, 4, 16, generator=rng)


ROWS = [("narrow", "", True), ("wide", "", True)]
FORMS = (form(W), form(None))


@pytest.mark.parametrize(
    ("plan", "numbers", "mixed"),
    [
        (1.0, (WINDOW, FULL), ((0, 1),)),
        (9.0, (WINDOW, FULL), ()),  # 18 µs more for a second plan, 20 less in two layers
        (None, (WINDOW, FULL), ()),  # nobody knows what a second plan takes
        (1.0, (), ()),  # nor how many layers share it
        (1.0, (1, 0), ()),  # one group gains nothing
    ],
)
def test_a_second_plan_has_to_pay_in_the_layers_of_the_pass(plan, numbers, mixed):
    made = table(CostModel(profile(plan)), ROWS, FORMS, "decode", WORKLOAD, numbers=numbers)
    assert made.mixed == mixed
    cell, graph = made.cells[bucket_of(1, 6, 1)], made.graphs[1]
    assert (cell.best, graph) == ((2, 2) if mixed else (0, 0))
    assert len(cell.near) == 2 + len(mixed)


def test_layers_weigh_as_many_as_there_are():
    """`narrow` is faster in six of eight layers; with as many of each there is no difference."""
    many = chosen()
    assert many.backend("decode") == many.backend("prefill") == "narrow"
    costs = profile(names={**NAMES, "narrow": {None: 21.0, W: 10.0}})
    assert chosen(costs=costs).backend("decode") == "narrow"
    equal = replace(NEEDS, layers=tuple(replace(x, num_layers=1) for x in NEEDS.layers))
    assert chosen(equal, costs=costs).backend("decode") == "wide"
    unknown = replace(NEEDS, layers=tuple(replace(x, num_layers=None) for x in NEEDS.layers))
    assert chosen(unknown, costs=costs).backend("decode") == "wide"


def test_the_fastest_pick_of_several_is_the_fastest_of_all():
    """Subsets of the candidates are as good as every assignment of groups, which are many more."""
    rng = random.Random(0)
    for _ in range(200):
        candidates, groups = rng.randint(2, 4), rng.randint(2, 4)
        us = [[rng.uniform(1, 50) for _ in range(groups)] for _ in range(candidates)]
        times = _Times(us, [rng.uniform(0, 20) for _ in range(candidates)])
        every = itertools.product(range(candidates), repeat=groups)
        best = min(every, key=times.of)
        got = times.mixed(1.0)
        if len(set(best)) == 1:
            assert got is None
        else:
            assert got is not None
            assert times.of(got) == pytest.approx(times.of(best))


def test_each_group_runs_on_its_backend_with_the_numbers_of_one(noted):
    found = chosen()
    own, other = found.backend("decode"), found.alternatives["decode"][0].backend
    assert (own, other) == ("narrow", "wide")
    fixed, dispatcher = create(found, adaptive=False), create(found)
    prompt, step = passing(M.EXTEND, [0, 2], [5, 5], new=5, views=("full",)), None
    for batch, tokens in ((prompt, 10), (step, 2)):
        batch = batch or passing(M.DECODE, [0, 2], [6, 6], views=("full",))
        expected = run(fixed, batch, queries(tokens))
        noted.clear()
        metadata = dispatcher.init_forward_metadata(batch)
        assert type(metadata) is GroupPlans
        for a, b in zip(run(dispatcher, batch, queries(tokens), metadata), expected, strict=True):
            assert torch.equal(a, b)
        assert noted == {
            ("narrow", "plan"): 1, ("wide", "plan"): 1,
            ("narrow", W): WINDOW, ("wide", None): FULL,
        }  # fmt: skip
    kinds = {(k.role, k.backend, k.group): n for k, n in dispatcher.passes.items()}
    assert kinds == {
        (role, name, group): 1
        for role in ("prefill", "decode")
        for name, group in zip(("narrow", "wide"), GROUPS, strict=True)
    }
    assert not any(k.captured for k in dispatcher.passes)


def test_a_layer_that_the_config_does_not_list_runs_on_the_first_group(noted):
    dispatcher = create(chosen())
    batch = passing(M.DECODE, [0], [6], views=("full",))
    metadata = dispatcher.init_forward_metadata(batch)
    assert metadata.of(99).route.backend.config.name == "narrow"


def test_a_captured_size_keeps_its_backends_and_plans_each_again(noted):
    """As engines capture: one graph for a batch size, whatever the lengths."""
    dispatcher = create(chosen())
    dispatcher.init_cuda_graph_state(2, 2)
    batch = passing(M.DECODE, [1], [7], views=("full",))
    metadata = dispatcher.init_forward_metadata_capture_cuda_graph(batch)
    assert type(metadata) is GroupPlans
    assert {b.config.name for b in dispatcher.captured} == set(NAMES)
    noted.clear()
    dispatcher.init_forward_metadata_replay_cuda_graph(batch, metadata)
    assert noted == {("narrow", "replay"): 1, ("wide", "replay"): 1}
    counted = {(k.backend, k.group, k.captured): n for k, n in dispatcher.passes.items()}
    assert counted == {
        (name, group, True): 1 for name, group in zip(("narrow", "wide"), GROUPS, strict=True)
    }


def test_graphs_of_several_backends_give_what_one_gives():
    found, outs = chosen(), []
    for adaptive in (False, True):
        dispatcher = create(found, adaptive=adaptive)
        runner = GraphRunner(dispatcher, batch_sizes=[1, 4], max_seq_len=12)

        def step(batch, metadata, *x, dispatcher=dispatcher):
            return torch.stack(run(dispatcher, batch, x, metadata), 1)

        runner.capture(M.DECODE, step, inputs=[torch.empty(1, 4, 16)] * len(LAYERS))
        taken = []
        for requests, lengths in (([0], [3]), ([1, 0, 2], [9, 4, 1]), ([3], [12])):
            batch = passing(M.DECODE, requests, lengths, views=("full",))
            taken.append(runner.replay(batch, *queries(len(requests), lengths[0])).clone())
        outs.append(taken)
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a, b)
    assert {k.backend for k in dispatcher.passes if k.group} == set(NAMES)


@pytest.mark.parametrize(
    "change",
    [
        {"overrides": Overrides(attention_backend="wide")},
        {"overrides": Overrides(decode_attention_backend="wide",
                                prefill_attention_backend="narrow")},
        {"overrides": Overrides(prefer=("wide",))},
        {"needs": replace(NEEDS, deterministic=True), "row": replace(ROW, deterministic=True)},
        {"costs": profile(None)},
    ],
)  # fmt: skip
def test_what_decides_for_one_backend_decides_for_every_group(change):
    found = pruned(chosen(**change))
    assert not found.alternatives
    assert digest(found) == ""


def test_ranks_and_the_log_know_the_groups():
    found = pruned(chosen())
    assert [c.backend for c in found.alternatives["decode"]] == ["wide"]
    fewer = tuple(replace(x, num_layers=n) for x, n in zip(NEEDS.layers, (40, 1), strict=True))
    other = chosen(replace(NEEDS, layers=fewer))
    assert decision(found)["picks"] not in ("", digest(other))
    narrow, wide = GROUPS
    assert f"3 narrow ({narrow}) and wide ({wide})" in picks(found)
    assert digest(other) == ""  # a layer in 41 is not worth a plan


def test_a_warm_up_runs_every_layer_on_both(noted):
    dispatcher = create(chosen())
    assert {x.backend for x in warmup(dispatcher, max_bs=1)} == set(NAMES)
    for name, window in itertools.product(NAMES, (None, W)):
        assert noted[name, window]


@pytest.mark.parametrize("wrong", [("wide", None), ("narrow", W)])
def test_a_shadow_watches_every_group_of_a_pass(tmp_path, wrong):
    plugins = registry()
    plugins.backends["softmax", "watcher"] = BackendSpec(
        name="watcher", capabilities=[ROW],
        create="attn_core.backends.torch_native.backend:TorchNative",
    )  # fmt: skip
    shadow = Shadow("watcher", every=2, folder=tmp_path, registry=plugins)
    dispatcher = create(chosen(), shadow=shadow)
    for number in range(4):
        batch = passing(M.DECODE, [1], [5], views=("full",))
        run(dispatcher, batch, queries(1, number))
        if number == 1:
            Noting.wrong.add(wrong)
    assert shadow.passes == 4
    assert not shadow.problem
    assert shadow.difference.number == 2  # a pass counts once: every second is compared
    assert shadow.compared > len(LAYERS)
    assert [n for n, v in shadow.difference.verdicts.items() if v.wrong] == [wrong[0]]
