"""`attn tune` measures what is right, says what is wrong, and loses nothing."""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import json
import math
import os
import statistics
import sys
import threading
import time
import types
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from attn_core import cli
from attn_core.backends.torch_native.backend import TorchNative
from attn_core.cli.app import build_app
from attn_core.costs import store
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.settings import workload
from attn_core.costs.shapes import Form, Pass
from attn_core.costs.workload import Workload
from attn_core.errors import UsageError
from attn_core.measure import compiling, inputs
from attn_core.measure import prepare as preparing
from attn_core.measure import session as sessions
from attn_core.measure.candidates import Job, jobs
from attn_core.measure.inputs import build
from attn_core.measure.session import session
from attn_core.measure.spent import Spent
from attn_core.measure.spread import (
    LONGEST,
    MOST_WORK,
    MOST_WORK_ELSEWHERE,
    POINTS,
    REQUESTS,
    lengths,
    spread,
    work,
)
from attn_core.measure.timing import FEWEST, MOST, TRIES, certain, cost_of, measure
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.selection.result import NoBackendError, Overrides
from attn_core.spec.device import probe_device
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from attn_core.testing.tolerance import CheckFailed
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

CPU = torch.device("cpu")
SMALL = Workload(prompts={20: 1, 70: 1}, requests={1: 1, 3: 1}, output=8)
MHA = LayerRequirements(num_q_heads=4, num_kv_heads=2, head_dim=32)
NEEDS = Requirements(layers=(MHA,), dtype="fp32")


class Wrong(TorchNative):
    """A backend whose scale is 2 % too large, in decode alone."""

    def forward(self, q, *args, **kwargs):
        return super().forward(q * 1.02, *args, **kwargs)


class Broken(TorchNative):
    def init_forward_metadata(self, batch):
        raise RuntimeError("no kernel\nfor this shape")


class PlansOnce(TorchNative):
    """A backend whose second plan fails."""

    planned = False

    def init_forward_metadata(self, batch):
        if self.planned:
            raise RuntimeError("no second plan")
        self.planned = True
        return super().init_forward_metadata(batch)


@pytest.fixture
def registry(monkeypatch):
    """Torch_native, and two backends with its rows that are wrong and that raise."""
    module = types.ModuleType("faulty_backends")
    module.Wrong, module.Broken = Wrong, Broken
    monkeypatch.setitem(sys.modules, "faulty_backends", module)
    good = load_plugins().get("torch_native")
    rows = [replace(r, create=None) for r in good.capabilities]
    specs = [good] + [
        replace(good, name=n.lower(), capabilities=rows, create=f"faulty_backends:{n}", aliases=())
        for n in ("Wrong", "Broken")
    ]
    return Registry(backends={("softmax", s.name): s for s in specs})


def planned(registry, needs=NEEDS, **options):
    here = probe_device()
    return jobs(needs, here, registry, {}, Overrides(), SMALL, **{"grid": False} | options)


def run(todo, known=None, minutes=1.0, env=None):
    found = session(
        todo, known or Profile(), env or {"device": "x"}, CPU, arch=None, minutes=minutes
    )
    steps, profile = list(found), known or Profile()
    for step in steps:
        profile = profile.merged(step.profile)
    return steps, profile


def test_what_is_wrong_or_fails_is_listed_and_has_no_times(registry):
    _, profile = run(planned(registry))
    assert {key.backend for key in profile.costs} == {"torch_native"}
    reasons = {key.backend: why for key, why in profile.bad.items()}
    assert reasons.keys() == {"wrong", "broken"}
    assert reasons["wrong"].startswith("wrong: ")
    assert "allowed" in reasons["wrong"]
    assert reasons["broken"] == "RuntimeError: no kernel for this shape"
    assert all(cost.us > 0 and cost.low <= cost.us <= cost.high for cost in profile.costs.values())


def test_a_plan_that_fails_when_it_is_timed_ends_no_tuning(registry):
    sys.modules["faulty_backends"].Broken = PlansOnce
    _, profile = run(planned(registry))
    assert {key.backend for key in profile.costs} == {"torch_native"}
    assert {why for key, why in profile.bad.items() if key.backend == "broken"} == {
        "RuntimeError: no second plan"
    }


FORMS = {
    "window-cap-sinks": replace(
        NEEDS, layers=(MHA, replace(MHA, sliding_window=16, logit_cap=30.0, sinks=True))
    ),
    "tree": replace(NEEDS, speculation=Speculation(topk=2, num_draft_tokens=5, mode="decode")),
    "chain": replace(NEEDS, speculation=Speculation(topk=1, num_draft_tokens=3, mode="prefill")),
    "fp8": replace(NEEDS, dtype="bf16", kv_cache_dtype="fp8_e4m3"),
    "mla": Requirements(
        layers=(
            LayerRequirements(
                kind="mla", num_q_heads=4, num_kv_heads=1, head_dim=576, v_head_dim=512
            ),
        )
    ),
}


@pytest.mark.parametrize(
    "name",
    ["tree", *(pytest.param(n, marks=pytest.mark.long) for n in FORMS if n != "tree")],
)
def test_every_form_is_checked_against_the_oracle(name):
    """The registry's own backends are right here, so nothing is bad and every pass has times."""
    todo = planned(load_plugins(), FORMS[name])
    todo = [
        replace(j, candidates=tuple(c for c in j.candidates if c.spec.name == "torch_native"))
        for j in todo
    ]
    steps, profile = run(todo)
    assert not profile.bad
    assert len(profile.costs) == len(todo) == len(steps)


def test_the_check_sees_one_key_too_few(registry):
    """A window that is off by one fails, in prefill and in decode, and so does a NaN."""
    job = planned(registry)[0]
    (native,) = [c for c in job.candidates if c.spec.name == "torch_native"]
    for size in (Pass.even("prefill", 2, 40, 10), Pass.even("decode", 3, 17)):
        inputs = build(replace(job.form, window=8), size, CPU)
        good = preparing.prepare(native, inputs, None, Spent()).call().clone()
        inputs.check(good, rounds=False)
        short = replace(inputs, layer=replace(inputs.layer, sliding_window=7))
        wrong = preparing.prepare(native, short, None, Spent()).call()
        with pytest.raises(CheckFailed, match="error"):
            inputs.check(wrong, rounds=False)
        good[-1, 0, 0] = torch.nan
        with pytest.raises(CheckFailed, match="finite"):
            inputs.check(good, rounds=False)


def test_a_ragged_pass_has_its_longest_request():
    size = Pass(phase="decode", requests=4, kv_tokens=103, longest=50, queries=4)
    found = lengths(size)
    assert (sum(found), found[0]) == (103, 50)
    steps = [math.log(a / b) for a, b in pairwise(found)]
    assert steps[0] == pytest.approx(steps[2], rel=0.15)  # log-normal: symmetric
    assert steps[1] < steps[0]
    inputs = build(Form(q_heads=1, kv_heads=1, head_dim=16), size, CPU)
    assert sorted(inputs.batch.views["full"].seq_lens_host) == sorted(found)
    whole = replace(size, phase="prefill", queries=103)
    starts = build(Form(q_heads=1, kv_heads=1, head_dim=16), whole, CPU).batch.cu_seqlens_q
    assert sorted(starts.diff().tolist()) == sorted(found)


@given(st.integers(1, 300), st.integers(1, 5000), st.floats(0, 1), st.integers(1, 8))
def test_any_lengths_sum_up_and_have_room_for_what_is_new(n, longest, part, new):
    new = min(new, longest)
    tokens = longest + round((n - 1) * (new + part * (longest - new)))
    size = Pass(phase="decode", requests=n, kv_tokens=tokens, longest=longest, queries=n * new)
    found = lengths(size)
    assert (len(found), sum(found), max(found)) == (n, tokens, longest)
    assert min(found) >= (1 if size.queries == tokens else new)


FORM = Form(q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128, page_size=64)


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
def test_passes_are_spread_over_what_serving_runs(phase):
    """Any first half has few and many requests, short and long, even and uneven ones."""
    drafts = 5 if phase == "verify" else 0
    found = spread(FORM, phase, "cuda", drafts=drafts)
    assert found == spread(FORM, phase, "cuda", drafts=drafts)
    assert len(set(found)) == POINTS
    for part in (found[: POINTS // 2], found[POINTS // 2 :]):
        means = [x.kv_tokens / x.requests for x in part]
        assert min(x.requests for x in part) <= 2
        assert max(x.requests for x in part) > REQUESTS[phase] / 2
        assert min(means) < 300
        assert max(means) > 3000
        assert 0 < sum(x.longest > mean for x, mean in zip(part, means, strict=True)) < len(part)
    for size in found:
        assert work(FORM, size) <= MOST_WORK_ELSEWHERE
        assert size.longest <= LONGEST
        assert size.drafts == drafts
        assert min(lengths(size)) >= (
            1 if size.queries == size.kv_tokens else size.queries // size.requests
        )
        assert Profile.from_json(
            Profile(costs={Key("a", "", FORM, size): Cost(1.0, 1.0, 1.0, 0.0)}).to_json()
        )
    other = spread(replace(FORM, q_heads=16), phase, "cuda", drafts=drafts)
    assert len(set(found) & set(other)) < POINTS / 2  # forms fill each other's gaps
    assert max(work(FORM, x) for x in spread(FORM, phase, "cpu", drafts=drafts)) <= MOST_WORK["cpu"]


def test_what_is_far_slower_six_times_in_a_row_is_measured_no_more(registry, monkeypatch):
    """Whatever the heads and pages; what was fast once has its chances again."""
    native = registry.get("torch_native")
    specs = [replace(native, name=n, aliases=()) for n in ("apple", "berry", "cherry")]
    fruit = Registry(backends={("softmax", s.name): s for s in specs})
    times = {"apple": 1.0, "berry": 10.0, "cherry": 10.0}
    done = []

    def run_(form, size, candidates, *args, **kwargs):
        names = [c.spec.name for c in candidates]
        us = times | ({"cherry": 2.0} if len(done) == 2 else {})
        done.append(names)
        keys = [Key(c.spec.name, c.digest, form, size) for c in candidates]
        costs = {k: Cost(us[k.backend], us[k.backend], us[k.backend], 0.0) for k in keys}
        return costs, {}, Spent()

    monkeypatch.setattr(sessions, "run", run_)
    todo = [j for j in planned(fruit, grid=True) if j.size.phase == "decode"][:12]
    todo = [replace(j, form=replace(j.form, q_heads=4 << i % 2)) for i, j in enumerate(todo)]
    _, profile = run(todo)
    assert done[:6] == [["apple", "berry", "cherry"]] * 6
    assert done[6:9] == [["apple", "cherry"]] * 3
    assert done[9:] == [["apple"]] * (len(todo) - 9)
    assert run(todo, profile)[0] == []  # a run that goes on leaves it out as well


def test_an_interrupted_run_goes_on_where_it_ended(registry, tmp_path, monkeypatch):
    """What is measured is in the file at once; the next run measures the rest alone."""
    path, env, todo = tmp_path / "p.json", {"device": "x"}, planned(registry)
    left = iter(range(3))

    def stop(*args, **kwargs):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return kept(*args, **kwargs)

    kept = sessions.run
    monkeypatch.setattr(sessions, "run", stop)
    steps = session(todo, Profile(), env, CPU, arch=None, minutes=1)
    with pytest.raises(KeyboardInterrupt):
        [store.write(path, step.profile) for step in steps]
    assert len(store.read_profile(path).costs) == 3
    monkeypatch.setattr(sessions, "run", kept)
    steps, profile = run(todo, store.read_profile(path), env=env)
    assert len(steps) == len(todo) - 3
    assert {key.size for key in profile.costs} == {job.size for job in todo}
    assert run(todo, profile)[0] == []


def test_no_shape_begins_after_the_minutes(registry):
    steps, profile = run(planned(registry), minutes=1e-9)
    assert not profile.costs
    assert {step.skipped for step in steps} == {sessions.SPENT}


def test_a_block_of_nan_is_left_before_each_first_call(registry, monkeypatch):
    """A kernel that writes nothing would return what the backend before it wrote there."""
    seen = []
    kept = TorchNative.forward

    def forward(*args, **kwargs):
        seen.append("call")
        return kept(*args, **kwargs)

    monkeypatch.setattr(TorchNative, "forward", forward)
    monkeypatch.setattr(inputs.Inputs, "poison", lambda self: seen.append("poison"))
    (step,), _ = run(planned(registry)[:1])
    tried = [c.spec.name for c in step.job.candidates if c.spec.name != "broken"]
    assert seen[: 2 * len(tried)] == ["poison", "call"] * len(tried)
    assert seen.count("poison") == len(tried)


def test_what_fails_in_pass_after_pass_is_not_tried_on(registry, monkeypatch):
    """A library that compiles for a minute before it fails would take the whole time."""
    monkeypatch.setattr(sessions, "HOPELESS", 2)
    todo = planned(registry)
    _, profile = run(todo)
    tried = Counter((key.backend, key.size.phase) for key in profile.bad)
    assert sorted(Counter(job.size.phase for job in todo).values()) == [2, 3]
    assert tried == {(n, p): 2 for n in ("wrong", "broken") for p in ("prefill", "decode")}
    assert not run(todo, profile)[1].bad.keys() - profile.bad.keys()


def test_preparing_draws_once_checks_once_and_collects_nothing(registry, monkeypatch):
    """Seconds are the machine's; these are what they were spent on."""
    calls: Counter[str] = Counter()

    def counted(module, name):
        kept = getattr(module, name)

        def call(*args, **kwargs):
            calls[name] += 1
            return kept(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    native = registry.get("torch_native")
    twin = Registry(
        backends={
            ("softmax", name): replace(native, name=name, capabilities=native.capabilities)
            for name in ("torch_native", "twin")
        }
    )
    todo = planned(twin)
    inputs._drawn.cache_clear()
    sampled, sample = [], inputs.sample
    monkeypatch.setattr(inputs, "sample", lambda *x: sampled.append(sample(*x)) or sampled[-1])
    for module, name in ((torch, "randn"), (gc, "collect"), (inputs, "attend_request")):
        counted(module, name)
    steps, profile = run(todo)
    assert len(profile.costs) == 2 * len(todo) == 10
    assert calls["randn"] == 1  # of one dtype
    assert calls["collect"] == 0  # nothing refers to a shape that is done
    assert len(sampled) == len(todo)  # once for all backends
    requests = sum(map(len, sampled))
    assert calls["attend_request"] == 4 * requests  # fp32: the truth and three yardsticks
    assert len(steps) == len(todo)


def test_what_each_part_of_preparing_takes_is_told_apart(registry, monkeypatch):
    kept = preparing.create_backend

    def slow(*args):
        time.sleep(0.2)
        return kept(*args)

    monkeypatch.setattr(preparing, "create_backend", slow)
    (step,), _ = run(planned(registry)[:1])
    taken = step.spent.by_backend()
    names = {c.spec.name for c in step.job.candidates}
    assert taken.keys() == names | {"all"}
    assert {*taken.pop("all")} == {"inputs", "compare", "rounds", "plans", "release"}
    assert {*taken["torch_native"]} == {"create", "plan", "first call", "check"}
    assert all(0.2 <= taken[name]["create"] < 20 for name in names)


def test_what_took_half_a_second_is_said_the_slowest_backend_first():
    spent = Spent({("all", "rounds"): 1.0, ("a", "check"): 0.2, ("b", "plan"): 3.04})
    spent.add(Spent({("a", "first call"): 0.7, ("b", "check"): 0.4}))
    assert str(spent) == "b (plan 3.0 s), all (rounds 1.0 s), a (first call 0.7 s)"
    assert str(Spent()) == "no part of it half a second"


def test_each_kernel_is_called_at_several_sizes_before_the_clock_starts(registry):
    """The first calls are of different libraries and phases; what is known is not called."""
    todo = planned(registry, grid=True)
    listed = compiling.calls(todo, Profile(), 1e9)
    assert all(len(job.candidates) == 1 for job in listed)
    kinds = {(job.candidates[0].spec.name, job.form, job.size.phase) for job in listed}
    assert kinds == {(c.spec.name, j.form, j.size.phase) for j in todo for c in j.candidates}
    names = [(job.candidates[0].spec.name, job.size.phase) for job in listed]
    libraries = len(set(names))
    assert len(set(names[:libraries])) == libraries
    for kind in kinds:
        alike = [j for j in listed if (j.candidates[0].spec.name, j.form, j.size.phase) == kind]
        amounts = [work(j.form, j.size) for j in alike]
        every = [work(j.form, j.size) for j in todo if (j.form, j.size.phase) == kind[1:]]
        assert len(alike) == compiling.SIZES
        assert len({j.size for j in alike}) == len(alike)
        assert (min(amounts), max(amounts)) == (min(every), max(every))
    least = compiling.calls(todo, Profile(), 1e9, 1)  # as on a CPU
    assert least == [job for job in listed if job in least]
    assert len(least) == len(kinds)
    costs = {
        Key(c.spec.name, c.digest, job.form, job.size): Cost(1.0, 1.0, 1.0, 0.0)
        for job in todo
        for c in job.candidates
    }
    assert compiling.calls(todo, Profile(costs=costs), 1e9) == []
    assert compiling.calls(todo, Profile(), 1.0) == []


def test_what_fails_ends_no_compiling_and_is_found_by_the_session(registry):
    done = []
    said = compiling.compile_kernels(
        planned(registry), Profile(), CPU, arch=None, step=lambda *x: done.append(x)
    )
    assert said == ""
    assert done == [(i, len(done)) for i in range(1, len(done) + 1)]
    assert len(done) > 3


def test_no_process_waits_for_what_another_compiles(registry):
    """The first call of a library is alone; then the others of it are called side by side."""
    todo = compiling.calls(planned(registry, grid=True), Profile(), 1e9)
    submitted: list[Job] = []
    waiting: list[Future[None]] = []

    def submit(job):
        submitted.append(job)
        waiting.append(Future())
        return waiting[-1]

    steps = compiling.in_turns(todo, submit)
    libraries = {compiling._library(job) for job in todo}
    first = Future()
    thread = threading.Thread(target=lambda: (next(steps), first.set_result(None)))
    thread.start()
    while not waiting:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(submitted) == len(libraries) < len(todo)
    assert {compiling._library(job) for job in submitted} == libraries
    waiting[0].set_result(None)
    first.result(timeout=10)
    more = submitted[len(libraries) :]
    assert {compiling._library(job) for job in more} == {compiling._library(submitted[0])}
    for one in waiting[1:]:
        one.set_result(None)

    def at_once(job):
        submitted.append(job)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    every: list[Job] = []
    submitted = every
    assert len(list(compiling.in_turns(todo, at_once))) == len(todo)
    assert sorted(map(id, every)) == sorted(map(id, todo))


def test_kernels_are_compiled_in_processes(monkeypatch):
    todo = compiling.calls(planned(load_plugins()), Profile(), 1e9)
    todo = [job for job in todo if job.candidates[0].spec.name == "torch_native"][:2]
    assert len(list(compiling._called(todo, CPU, None, 2))) == 2


def test_a_run_that_is_ended_compiles_nothing_further(monkeypatch):
    """Its queue of calls is dropped: a pool waits for all of them by itself."""
    submitted = []

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, count, *_):
            super().__init__(1)

        def submit(self, *arguments):
            submitted.append(future := super().submit(lambda: time.sleep(0.2)))
            return future

    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", Pool)
    todo = compiling.calls(planned(load_plugins(), grid=True), Profile(), 1e9)
    steps = compiling._called(todo, CPU, None, 2)
    next(steps)
    with pytest.raises(SystemExit):
        steps.throw(SystemExit())
    assert len(submitted) > 3
    assert sum(future.cancelled() for future in submitted) >= len(submitted) - 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no process")
def test_a_run_that_is_bound_to_cores_compiles_on_those():
    every = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(every)})
        assert compiling.cores() == 1
    finally:
        os.sched_setaffinity(0, every)
    assert compiling.cores() == len(every)


def test_a_process_that_ends_is_said(registry, monkeypatch):
    def breaks(*args):
        yield
        raise compiling.BrokenProcessPool("abruptly")

    monkeypatch.setattr(compiling, "_called", breaks)
    said = compiling.compile_kernels(planned(registry), Profile(), CPU, arch=None)
    assert "abruptly" in said
    assert "compiled when it is measured" in said


def test_the_fastest_is_certain_where_quartiles_are_apart_or_medians_equal():
    form, sizes = Form(), [Pass.even("decode", n, 10) for n in (1, 2, 3, 4)]
    times = [
        {"a": (10, 9, 11), "b": (13, 12, 14)},
        {"a": (10, 9, 12), "b": (11.5, 11, 14)},
        {"a": (10, 9, 12), "b": (10.05, 9, 12), "c": (30, 20, 40)},
        {"a": (10, 9, 12)},
    ]
    costs = {
        Key(name, "", form, size): Cost(*map(float, us), 0.0)
        for size, row in zip(sizes, times, strict=True)
        for name, us in row.items()
    }
    assert Profile(costs=costs).certain() == (2, 3)


def test_a_shape_that_takes_too_much_memory_is_left_out(registry, monkeypatch):
    monkeypatch.setattr(sessions, "HOST_BYTES", 40_000)
    steps, profile = run(planned(registry))
    assert 0 < len(profile.costs) < len(steps)
    assert any("GB" in step.skipped for step in steps)


def test_the_workloads_own_passes_come_first_evenly_from_little_to_much_work(registry):
    """A run that is cut short knows long requests too."""
    workload = Workload(prompts={16 * 2**n: 1 for n in range(8)}, requests={1: 1}, output=8)
    todo = jobs(NEEDS, probe_device(), registry, {}, Overrides(), workload, grid=False)
    for phase in ("prefill", "decode"):
        own = [job for job in todo if job.size.phase == phase]
        by_work = sorted(own, key=lambda job: work(job.form, job.size))
        assert [by_work.index(job) for job in own] == [0, 4, 2, 6, 1, 5, 3, 7]
    todo = planned(registry, grid=True)
    own = {size for phase in Phase for size, _ in SMALL.passes(phase, None)}
    usual = [j for j in todo if j.size in own]
    assert todo[: len(usual)] == usual


@pytest.mark.parametrize(
    ("layer", "fault"),
    [
        (LayerRequirements(), "head_dim None, num_q_heads None"),
        (LayerRequirements(kind="dsa"), "nothing to tune"),
        (replace(MHA, encoder=True), "nothing to tune"),
    ],
)
def test_what_cannot_be_measured_is_said(registry, layer, fault):
    with pytest.raises(UsageError, match=fault):
        planned(registry, replace(NEEDS, layers=(layer,)))


class Ticks:
    """A clock whose calls say what they take."""

    def __init__(self):
        self.order = []

    def sample(self, call):
        name, us = call()
        self.order.append(name)
        return us, 1.0


def test_rounds_are_interleaved_and_end_when_the_order_is_certain():
    clock = Ticks()
    measure({"a": lambda: ("a", 1.0), "b": lambda: ("b", 2.0)}, clock, seconds=60)
    assert clock.order[:4] == ["a", "b", "b", "a"]
    assert len(clock.order) == 2 * FEWEST
    noisy = iter([2.0, 2.2] * MOST)
    clock = Ticks()
    measure({"a": lambda: ("a", next(noisy)), "b": lambda: ("b", 2.15)}, clock, seconds=60)
    assert len(clock.order) == 2 * MOST
    clock = Ticks()
    slow = {"a": lambda: ("a", 1.0), "b": lambda: ("b", 2.0), "c": lambda: ("c", 9.0)}
    assert measure(slow, clock, seconds=60)["c"].us == 9.0
    assert clock.order.count("c") == TRIES
    assert clock.order.count("a") == FEWEST
    clock = Ticks()
    measure({"a": lambda: ("a", 1.0), "b": lambda: ("b", 2.0)}, clock, seconds=0)
    assert len(clock.order) == 2 * 3
    assert measure({}, Ticks(), seconds=0) == {}


def test_rounds_that_were_disturbed_are_repeated_once_and_the_calmer_ones_count():
    """Another program on the device doubles a few calls: their median would say nothing."""
    first = [1.0, 9.0, 9.0] * MOST
    for again, us in (([1.0], 1.0), ([1.0, 1.0, 30.0, 30.0], 9.0)):
        taken = itertools.chain(first[:FEWEST], itertools.cycle(again))
        clock = Ticks()
        found = measure({"a": lambda taken=taken: ("a", next(taken))}, clock, seconds=60)
        assert found["a"].us == us
        assert len(clock.order) == 2 * FEWEST


def test_a_cost_is_the_median_with_its_quartiles():
    samples = [(float(x), 2.0) for x in (5, 1, 9, 2, 3)]
    assert cost_of(samples) == Cost(3.0, 2.0, 5.0, 2.0)
    assert cost_of([(1.0, 5.0), (1.0, 3.0), (1.0, 9.0)]).host_us == 3.0
    assert statistics.median(x for x, _ in samples) == 3.0
    assert not certain({"a": [(1.0, 0)] * 4, "b": [(2.0, 0)] * 4})
    assert certain({"a": [(1.0, 0)] * FEWEST, "b": [(2.0, 0)] * FEWEST})


ARGUMENTS = ["--head-dim", "32", "--num-q-heads", "4", "--num-kv-heads", "2", "--dtype", "fp32"]
ARGUMENTS += ["--allow", "torch_native", "--workload"]
ARGUMENTS += ['{"prompts": {"20": 1}, "requests": {"2": 1}, "output": 8}']


def attn(*arguments):
    return CliRunner().invoke(build_app(), [*arguments, *ARGUMENTS])


def test_a_file_that_cannot_be_written_is_refused_before_the_minutes(monkeypatch, capsys):
    """What took minutes to measure would be lost."""
    monkeypatch.setattr("attn_core.cli.tune.Measurement", None)
    monkeypatch.setattr(sys, "argv", ["attn", "tune", "--out", "/proc/absent/profile.json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "--out /proc/absent: No such file" in capsys.readouterr().err


def test_the_commands_measure_keep_and_select(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = attn("tune", "--quick", "--json", "--minutes", "1")
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)
    assert data["points"] == 2
    assert data["selection"]["decode"].startswith("torch_native: measured")
    file = data["profile"]
    assert file.startswith(str(tmp_path))
    chosen = json.loads(attn("select", "--json").output)  # finds it by itself
    assert "measured" in chosen["why"]["decode"]
    assert chosen["why"]["prefill"].endswith("no other that fits was measured in these passes")
    without = json.loads(attn("select", "--json", "--profile", "none").output)
    assert "priority" in without["why"]["decode"]
    assert data["passes"] == {"listed": 2, "measured": 2}
    assert data["compile_s"] >= 0
    assert data["measure_s"] > 0
    assert data["fastest"] == {"certain": 0, "passes": 0}  # one backend alone
    text = attn("tune", "--quick", "--minutes", "1").output
    assert "2 points in" in text
    assert "s of compiling" in text
    only = ("tune", "--quick", "--json", "--compile-only", "--out", str(tmp_path / "none.json"))
    compiled = json.loads(attn(*only).output)
    assert (compiled["points"], compiled["passes"]["measured"]) == (0, 0)
    assert compiled["compile_s"] > 0
    assert not (tmp_path / "none.json").exists()
    bench = attn("bench", "--json", "--minutes", "1")
    assert {x["backend"] for x in json.loads(bench.output)["measured"]} == {"torch_native"}
    assert "torch_native" in attn("bench", "--minutes", "1").output


def test_a_profile_of_another_environment_is_refused_with_the_reason(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    env = {"device": "another", "torch": "1.0"}
    store.write(path, Profile(environment=env, date="2026-11-23T10:00:00+00:00"))
    for command in (["select", "--profile", str(path)], ["tune", "--out", str(path)]):
        done = attn(*command)
        assert isinstance(done.exception, UsageError)
        assert cli.exit_code(done.exception) == 2
        assert "environment" in str(done.exception)
        assert "torch was 1.0 and is " in str(done.exception)
    assert store.read_profile(path).environment == env


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["tune", "--minutes", "0"], "--minutes 0.0: above 0"),
        (["tune", "--minutes", "nan"], "--minutes nan: above 0"),
        (["tune", "--device", "cuda:sm90"], "a measurement runs kernels"),
        (["bench", "--assume-installed", "all"], "a measurement runs kernels"),
        (["select", "--profile", "/no/such/file"], "No such file"),
    ],
)
def test_wrong_arguments_are_said(arguments, fault):
    done = attn(*arguments)
    assert isinstance(done.exception, UsageError), done.output
    assert fault in str(done.exception)


@pytest.mark.parametrize("command", ["tune", "bench"])
def test_where_no_backend_fits_nothing_is_measured_and_the_reason_is_said(command):
    done = attn(command, "--deny", "torch_native", "--minutes", "1")
    assert isinstance(done.exception, NoBackendError), done.output
    assert "torch_native (--deny has it)" in str(done.exception)


@pytest.mark.parametrize(
    "content", [b"[]", b'{"prompt": 1}', b'{"a": 1', b"\xff\xfe\x00", b"[" * 200_000]
)
def test_what_is_wrong_with_a_file_of_a_workload_names_the_file(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "workload.json"
    file.write_bytes(content)
    with pytest.raises(UsageError) as error:
        workload(str(file))
    assert str(error.value).startswith(f"--workload {file}: ")


def test_a_list_is_no_file_of_a_workload():
    with pytest.raises(UsageError, match="a workload is a JSON object of prompts, requests"):
        workload("[1]")
    with pytest.raises(UsageError, match="it is no JSON: line 1"):
        workload(" [[")
