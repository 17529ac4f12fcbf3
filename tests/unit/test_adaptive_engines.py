"""What engines get of adaptive dispatch: variables, locks, failures, counters and ranges."""

from __future__ import annotations

import gc
import json
import logging
import sys
import types
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from attn_core.backends.torch_native.backend import TorchNative
from attn_core.cache.pool import KVPool
from attn_core.costs import store
from attn_core.costs.environment import environment
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form, Pass
from attn_core.costs.workload import Workload
from attn_core.errors import LockError, UnknownBackendError, UsageError
from attn_core.integrations import choice
from attn_core.integrations.metrics import Sender, export
from attn_core.integrations.ranks import decision
from attn_core.plugins.registry import Registry
from attn_core.runtime.adaptive import digest, pruned
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.picks import picks
from attn_core.runtime.trace import Trace
from attn_core.selection.lock import Lock
from attn_core.selection.result import Overrides
from attn_core.selection.solver import select
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device, probe_cpu
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from graph_passes import passing
from recording import M

CPU = torch.device("cpu")
SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
NEEDS = Requirements(layers=(LayerRequirements(**SHAPE),), dtype="fp32", page_size=4)
FORM = Form(q_heads=4, kv_heads=2, head_dim=16, v_head_dim=16, page_size=4, dtype="fp32",
            store="fp32")  # fmt: skip
ROW = Capabilities(
    kind="mha", device="any", dtypes={"fp32"}, kv_dtypes={"fp32"}, priority=1, cuda_graph="uniform",
    max_verify_topk=1, lse=True,
)  # fmt: skip
SIZES = [Pass.even("decode", b, n) for b in (1, 8, 64) for n in (16, 256, 4096)]
SIZES += [Pass.even("verify", b, n, 4) for b in (1, 8, 64) for n in (16, 256, 4096)]
SIZES += [Pass.even("prefill", 1, n, q) for n in (16, 256, 4096) for q in (1, 16, 256) if q <= n]
WORKLOAD = Workload(prompts={200: 1}, requests={1: 1, 8: 1}, output=16)
TIMES = {
    "short": lambda x: 10.0 + x.kv_tokens / 50,
    "long": lambda x: 20.0 + x.kv_tokens / 500,
    "never": lambda x: 1000.0 + x.kv_tokens,
}


class Made(TorchNative):
    """Keeps the names of its instances, and fails where a test says so."""

    names: ClassVar[list[str]] = []
    broken: ClassVar[set[str]] = set()

    def __init__(self, config):
        super().__init__(config)
        if config.name in self.broken:
            raise RuntimeError("a library that does not load")
        self.names.append(config.name)


@pytest.fixture(autouse=True)
def made(monkeypatch):
    module = types.ModuleType("made_backend")
    module.Made = Made
    monkeypatch.setitem(sys.modules, "made_backend", module)
    monkeypatch.setattr(Made, "names", [])
    monkeypatch.setattr(Made, "broken", set())
    return Made


def registry(**rows):
    rows = rows or dict.fromkeys(TIMES, ROW)
    specs = [BackendSpec(name=n, capabilities=[r], create="made_backend:Made")
             for n, r in rows.items()]  # fmt: skip
    return Registry(backends={("softmax", s.name): s for s in specs})


def profile(env=None, faster=1.0, form=FORM):
    return Profile(
        environment=env or {},
        date="2026-11-20T10:00:00+00:00",
        costs={
            Key(name, "", form, x): Cost(us, us * 0.99, us * 1.01, 0.0)
            for name, time in TIMES.items()
            for x in SIZES
            if (us := time(x) * faster)
        },
    )


def chosen(needs=NEEDS, overrides=None, **rows):
    return select(
        needs, Device("cpu"), registry(**rows), {}, overrides, profile(), workload=WORKLOAD,
        advise=False,
    )  # fmt: skip


def create(selection, **more):
    layer = AttentionLayer(layer_id=0, **SHAPE, v_head_dim=16, scale=0.25)
    pool = KVPool([layer], num_pages=13, page_size=4, kv_cache_dtype="fp32")
    return HybridDispatcher.from_selection(
        selection, registry(), [layer], pool, adaptive=True, **more
    )


def names(selection, role="decode"):
    return [c.backend for c in selection.alternatives.get(role, ())]


def test_what_wins_no_pass_is_not_created(made):
    found = chosen()
    assert set(names(found)) == {"long", "never"}
    assert names(pruned(found)) == ["long"]
    dispatcher = create(found)
    assert made.names.count("short") == made.names.count("long") == 1
    assert "never" not in made.names
    assert {b.config.name for _, b in dispatcher.pickers.items()} == {"short", "long"}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_alternative_that_cannot_be_created_is_left_out_on_all_ranks(made, caplog, elsewhere):
    """Elsewhere: it fails on another rank, which `agree` says."""
    found, asked = chosen(), []
    assert found.backend("decode") == "short"
    made.broken = set() if elsewhere else {"long"}

    def agree(failed):
        asked.append(failed)
        return failed | {"long"}

    rows = replace(found, roles={**found.roles, "prefill": found.roles["decode"]},
                   alternatives={"decode": found.alternatives["decode"]})  # fmt: skip
    with caplog.at_level(logging.WARNING, "attn_core"):
        dispatcher = create(rows, agree=agree)
    assert asked == [frozenset() if elsewhere else {"long"}]
    assert not dispatcher.pickers.items()
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("long takes no passes of others: ")
    assert ("another rank" in said) == elsewhere
    assert ("a library that does not load" in said) != elsewhere


def test_the_chosen_backend_has_to_work(made):
    made.broken = {"short"}
    with pytest.raises(Exception, match="a library that does not load"):
        create(chosen())


def test_ranks_compare_what_is_picked():
    """Equal words on two ranks are equal picks; other costs are other words."""
    found = pruned(chosen())
    assert digest(found) == digest(pruned(chosen()))
    assert decision(found)["picks"] == digest(found)
    steeper = replace(found.costs, model=type(found.costs.model)(slower()))
    assert digest(replace(found, costs=steeper)) not in ("", digest(found))
    assert digest(replace(found, alternatives={})) == ""
    assert "picks" not in decision(replace(found, alternatives={}))


def slower():
    whole = profile()
    costs = {
        key: cost._replace(us=cost.us * 9, high=cost.high * 9) if key.backend == "long" else cost
        for key, cost in whole.costs.items()
    }
    return replace(whole, costs=costs)


SPECULATION = Speculation(topk=1, num_draft_tokens=4, mode="decode")


@pytest.mark.parametrize(
    ("needs", "row", "admitted"),
    [
        ({}, {}, {"prefill", "decode", "verify"}),
        ({}, {"max_verify_topk": 0}, {"prefill"}),
        ({"graphs": True}, {"cuda_graph": "decode"}, set()),  # a verification is no decode
        ({"shared_prefix": True}, {}, {"prefill"}),
        ({"shared_prefix": True}, {"shared_prefix": True}, {"prefill", "decode", "verify"}),
        ({}, {"layouts": {"HND"}}, set()),
        ({}, {"page_sizes": {8}}, set()),
        ({}, {"kv_dtypes": {"bf16"}}, set()),
        ({}, {"lse": False}, set()),
    ],
)
def test_an_alternative_serves_all_that_its_role_serves(needs, row, admitted):
    """`short` is chosen for all roles; drafts stay with it, and so does what `long` cannot do."""
    own = replace(ROW, shared_prefix=True)
    found = chosen(
        replace(NEEDS, speculation=SPECULATION, **needs), None, short=own, long=replace(ROW, **row)
    )
    roles = {role for role in found.alternatives if "long" in names(found, role)}
    first = {role: c.backend for role, c in found.roles.items()}
    if first["prefill"] == "long":  # the cheaper one of prefill, where it fits
        roles |= {"prefill"}
    assert roles == admitted
    assert first["decode"] == first["verify"] == first["draft"] == "short"
    assert "draft" not in found.alternatives


def test_what_another_phase_demands_anyway_may_be_demanded():
    """flashinfer asks for lengths on the host: where it prefills it may decode, too."""
    asks = replace(ROW, needs_host_lengths=True)
    found = chosen(short=ROW, long=asks)
    assert names(found) == []
    long_prompts = Overrides(prefill_attention_backend="long")
    found = chosen(NEEDS, long_prompts, short=ROW, long=asks)
    assert found.backend("prefill") == "long"
    assert (found.backend("decode"), names(found)) == ("short", ["long"])


def test_finite_padding_may_be_required_of_any():
    """fa3 requires it: caches of engines that pick are made of zeros."""
    found = chosen(short=ROW, long=replace(ROW, requires_finite_padding=True))
    assert (found.backend("decode"), names(found)) == ("short", ["long"])


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """A machine on which both were measured: a registry, the file, and select's own inputs."""
    every = registry()
    monkeypatch.setattr(choice, "load_plugins", lambda: every)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    env = environment(every, probe_cpu())
    file = tmp_path / "tuned.json"
    store.write(file, profile(env))
    monkeypatch.setenv("ATTN_PROFILE", str(file))
    monkeypatch.setenv("ATTN_WORKLOAD", json.dumps({
        "prompts": {"200": 1}, "requests": {"1": 1, "8": 1}, "output": 16,
    }))  # fmt: skip
    return every, file


def test_an_engine_picks_by_the_profile_that_a_variable_names(tuned, tmp_path, monkeypatch):
    found, _ = choice.choose(NEEDS, CPU)
    assert (found.backend("decode"), names(found)) == ("short", ["long"])
    said = choice.explained(found)
    assert "passes are picked by what was measured" in said
    assert found.costs.model.profile.digest in said
    monkeypatch.setenv("ATTN_PROFILE", "none")
    found, _ = choice.choose(NEEDS, CPU)
    assert names(found) == []
    assert "passes are picked" not in choice.explained(found)
    monkeypatch.delenv("ATTN_PROFILE")
    path = store.own_path(environment(tuned[0], probe_cpu()))
    store.write(path, store.read_profile(tuned[1]))  # where `attn tune` writes
    found, _ = choice.choose(NEEDS, CPU)
    assert names(found) == ["long"]
    store.write(tmp_path / "other.json", profile({"device": "another"}))
    monkeypatch.setenv("ATTN_PROFILE", str(tmp_path / "other.json"))
    with pytest.raises(UsageError, match=r"ATTN_PROFILE .*other.json: measured in another"):
        choice.choose(NEEDS, CPU)


def test_the_workload_of_a_variable_decides(tuned, monkeypatch):
    long = json.dumps({"prompts": {"4000": 1}, "requests": {"8": 1}, "output": 16})
    monkeypatch.setenv("ATTN_WORKLOAD", long)
    found, _ = choice.choose(NEEDS, CPU)
    assert (found.backend("decode"), names(found)) == ("long", ["short"])
    monkeypatch.setenv("ATTN_WORKLOAD", "{}}")
    with pytest.raises(UsageError, match="workload"):
        choice.choose(NEEDS, CPU)


@pytest.mark.parametrize(
    "variables",
    [
        {"ATTN_ADAPTIVE": "0"},
        {"ATTN_ATTENTION_BACKEND": "long"},
        {"ATTN_DECODE_ATTENTION_BACKEND": "short"},
        {"ATTN_PREFER": "short"},
        {"ATTN_ALLOW": "short"},
        {"ATTN_DENY": "long"},
    ],
)
def test_what_the_user_says_is_not_replaced(tuned, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found, _ = choice.choose(NEEDS, CPU)
    assert names(found) == []


def test_deterministic_mode_keeps_one_backend():
    every = registry(**dict.fromkeys(TIMES, replace(ROW, deterministic=True)))
    needs = replace(NEEDS, deterministic=True)
    costs = profile(form=replace(FORM, deterministic=True))
    found = select(needs, Device("cpu"), every, {}, None, costs, workload=WORKLOAD, advise=False)
    assert not choice.picking(found).alternatives


def test_a_switch_is_one_or_zero(tuned, monkeypatch):
    monkeypatch.setenv("ATTN_ADAPTIVE", "yes")
    with pytest.raises(UsageError, match=r"ATTN_ADAPTIVE=yes \(expected 1 or 0; without it 1\)"):
        choice.choose(NEEDS, CPU)


def test_a_lock_fixes_who_may_run_and_by_which_costs(tuned, tmp_path, monkeypatch, caplog):
    every, file = tuned
    here = probe_cpu()
    whole = select(NEEDS, here, every, {}, None, store.read_profile(file), workload=WORKLOAD)
    lock = Lock.of(whole, environment(every, here), store.read_profile(file), WORKLOAD)
    path = tmp_path / "a.lock"
    path.write_text(json.dumps(lock.to_json()))
    monkeypatch.setenv("ATTN_LOCKED", str(path))
    found, _ = choice.choose(NEEDS, CPU)
    assert names(found) == ["long"]
    again = tmp_path / "again.json"  # the same order, other times: picks may move
    store.write(again, profile(environment(every, here), faster=0.5))
    monkeypatch.setenv("ATTN_PROFILE", str(again))
    with caplog.at_level(logging.INFO, "attn_core"):
        found, _ = choice.choose(NEEDS, CPU)
    assert names(found) == []
    assert any("no passes are picked" in r.getMessage() for r in caplog.records)
    monkeypatch.setenv("ATTN_PROFILE", "none")  # nobody takes over: not what the lock says
    with pytest.raises(LockError):
        choice.choose(NEEDS, CPU)


def test_the_table_of_picks_has_every_size_and_the_graphs():
    said = picks(pruned(chosen())).split("\n")
    assert said[0].startswith("passes are picked by what was measured: profile ")
    head = next(i for i, line in enumerate(said) if line.startswith("  decode: "))
    assert said[head] == "  decode: 1 short, 2 long; not measured, so 1: ·"
    columns = said[head + 1].split()
    assert columns[:4] == ["requests", "|", "2", "4"]
    assert columns[-2:] == ["4k", "graphs"]
    one = said[head + 2].split()
    assert one[:2] == ["1", "|"]
    assert one[2] == "1"
    assert one[-2] == "2"


class Counter:
    """What is read of a Prometheus counter."""

    def __init__(self):
        self.values = {}

    def labels(self, *labels):
        return types.SimpleNamespace(inc=lambda n: self.add(labels, n))

    def add(self, labels, n):
        self.values[labels] = self.values.get(labels, 0) + n


def test_passes_are_sent_to_a_counter_once():
    trace, counter = Trace(), Counter()
    sender = Sender(trace, counter, "model")
    for _ in range(3):
        trace.count("decode", "fa3", (5, 11, 1), True)
    assert sender.send()
    assert sender.send()
    key = ("model", "decode", "fa3", "16", "1024", "1", "True", "")
    assert counter.values == {key: 3}
    trace.count("decode", "fa3", (5, 11, 1), True)
    sender.send()
    assert counter.values == {key: 4}
    del trace
    gc.collect()
    assert not sender.send()


def test_passes_are_exported_by_a_client_that_is_there():
    client = pytest.importorskip("prometheus_client")
    dispatcher = types.SimpleNamespace(trace=Trace())
    dispatcher.trace.count("prefill", "triton", (1, 3, 2), False)
    assert export(dispatcher, "a test")
    for _ in range(100):
        if "a test" in (text := client.generate_latest().decode()):
            break
        torch.ones(1000).sum()
    assert 'attn_core_passes_total{backend="triton",captured="False",layers="a test"' in text


def test_without_a_client_nothing_is_exported(monkeypatch):
    from attn_core.integrations import metrics

    monkeypatch.setattr(metrics, "_counter", lambda: None)
    assert not export(types.SimpleNamespace(trace=Trace()), "model")


def test_ranges_for_a_profiler_are_off_until_a_variable_asks(monkeypatch):
    said = []
    nvtx = types.SimpleNamespace(range_push=said.append, range_pop=lambda: said.append("end"))
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    batch, x = passing(M.DECODE, [0], [3], views=("full",)), torch.randn(1, 4, 16)

    def run():
        dispatcher = create(chosen())
        metadata = dispatcher.init_forward_metadata(batch)
        (layer,) = dispatcher.backend("decode").config.layers
        return dispatcher.forward(x, x[:, :2], x[:, :2], layer, batch, metadata)

    plain = run()
    assert said == []
    monkeypatch.setenv("ATTN_NVTX", "1")
    assert torch.equal(run(), plain)
    assert said == ["attn_core init_forward_metadata short", "end", "attn_core decode short", "end"]


def test_a_variable_that_no_engine_reads_is_named_once_in_the_log(monkeypatch, caplog):
    """A misspelt name would leave the choice as it is, without a word."""
    for name in choice.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ATTN_DECODE_BACKEND", "torch_native")
    monkeypatch.setenv("ATTN_DECODE_ATTENTION_BACKEND", "torch_native")
    layer = LayerRequirements(num_q_heads=4, num_kv_heads=2, head_dim=32)
    requirements = Requirements(layers=(layer,), dtype="fp32", page_size=16)
    choice.warn_of_unread.cache_clear()
    for _ in range(2):
        selection, _ = choice.choose(requirements, torch.device("cpu"))
        assert selection.roles["decode"].backend == "torch_native"
    [said] = [r.getMessage() for r in caplog.records if "not read" in r.getMessage()]
    assert said.startswith("environment variable ATTN_DECODE_BACKEND is not read by an engine")
    assert "ATTN_DECODE_ATTENTION_BACKEND" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [("ATTN_DECODE_ATTENTION_BACKEND", "tritn"), ("ATTN_DENY", "triton, tritn"),
     ("ATTN_MM_ATTENTION_BACKEND", "tritn")],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_the_variable_it_is_in(name, value, monkeypatch):
    layer = LayerRequirements(num_q_heads=4, num_kv_heads=2, head_dim=32)
    requirements = Requirements(layers=(layer,), dtype="fp32", page_size=16)
    monkeypatch.setenv(name, value)
    with pytest.raises(
        UnknownBackendError, match=f"^{name}: unknown backend 'tritn': did you mean"
    ):
        choice.choose(requirements, torch.device("cpu"))
