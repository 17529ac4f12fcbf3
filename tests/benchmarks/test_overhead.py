"""The overhead benchmark sees the calls that a wrapper makes, and what comes on top of them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
import sys
import time
import types

import pytest
import torch
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device

from benchmarks import added, overhead
from benchmarks.added import Overhead, Pair, host_us, measure, serving
from benchmarks.cases import Case, build
from benchmarks.plain import plain
from benchmarks.recorded import PLANS, in_turn, recording

VENDOR = pathlib.Path(__file__).parents[1] / "emulators" / "vendor"
CPU, HOPPER = torch.device("cpu"), parse_device("cuda:sm90")
SMALL = Case(phase="decode", batch=2, length=30, q_heads=4, kv_heads=2, head_dim=64, v_head_dim=64)


@pytest.fixture
def vendor(monkeypatch):
    """Let the emulated libraries be found, and be gone afterwards."""
    monkeypatch.syspath_prepend(str(VENDOR))
    importlib.invalidate_caches()
    ours = {p.stem for p in VENDOR.iterdir()}
    before = {m: sys.modules.pop(m) for m in [*sys.modules] if m.partition(".")[0] in ours}
    yield
    for m in [*sys.modules]:
        if m.partition(".")[0] in ours:
            del sys.modules[m]
    sys.modules.update(before)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setitem(host_us.__kwdefaults__, "rounds", 3)
    monkeypatch.setitem(host_us.__kwdefaults__, "calls_each", 3)
    monkeypatch.setattr(added, "ROUNDS", 2)


def found_on(name, case=SMALL):
    with torch.no_grad():
        return measure(name, case, load_plugins(), CPU, HOPPER)


@pytest.mark.parametrize("name", overhead.BACKENDS)
def test_every_backend_is_measured_beside_its_library(vendor, short, name):
    registry = load_plugins()
    (first, *_) = cases = overhead.cases_of(name, registry, HOPPER)
    assert len({c.phase for c in cases}) == len(cases)
    if first.kind == "mla":
        case = dataclasses.replace(first, batch=2, length=30, q_heads=16)
    else:
        case = dataclasses.replace(SMALL, page_size=first.page_size)
    result = found_on(name, case)
    assert result.error is None
    assert result.host.direct > 0
    assert result.kernel is None, "no GPU, no kernel time"
    assert result.plan_us > 0
    # those without a plan of the library's own have nothing to be compared with
    assert (result.plan is None) == (name in ("fa4", "trtllm_mha"))
    assert (result.plan_from_host_us is None) == (name != "flashinfer")


def test_what_a_wrapper_adds_is_seen(vendor, short, monkeypatch):
    fa3 = importlib.import_module("attn_nvidia.fa3.backend").FA3
    for method, seconds in (("forward", 0.05), ("init_forward_metadata", 0.08)):
        real = getattr(fa3, method)

        def slow(*args, real=real, seconds=seconds, **more):
            time.sleep(seconds)
            return real(*args, **more)

        monkeypatch.setattr(fa3, method, slow)
    result = found_on("fa3")
    assert result.host.added > 40_000
    assert result.plan.added > 60_000
    assert not result.verdicts["host_us"][1]
    assert not result.verdicts["plan_ratio"][1]
    assert "OVER 8" in overhead.describe(result)


LATENT = dataclasses.replace(SMALL, phase="mla", kv_heads=1, head_dim=576, v_head_dim=512)
TENSOR_CORES = dataclasses.replace(SMALL, q_heads=8)


def planned(case):
    """Return the inputs, our output, and what stands beside our plan by FlashInfer."""
    registry, inputs = load_plugins(), build(case, CPU)
    importlib.import_module("flashinfer.mla")
    with recording(PLANS) as recorder:
        ours = serving("flashinfer", inputs, registry, HOPPER)
        metadata = ours.plan()
        (call,) = recorder.taken()
    return inputs, ours.layer(metadata)(), call, plain(call, inputs)


@pytest.mark.parametrize("way", ["plan", "from_host"])
@pytest.mark.parametrize(
    ("case", "name", "backend"),
    [
        (SMALL, "BatchDecodeWithPagedKVCacheWrapper", "auto"),
        (TENSOR_CORES, "BatchDecodeWithPagedKVCacheWrapper", "fa2"),
        (
            dataclasses.replace(TENSOR_CORES, phase="extend", queries=5),
            "BatchPrefillWithPagedKVCacheWrapper",
            "fa2",
        ),
        (
            dataclasses.replace(
                SMALL, phase="extend", batch=4, queries=250, length=300, q_heads=32, kv_heads=32
            ),
            "BatchPrefillWithPagedKVCacheWrapper",
            "fa3",
        ),
        (LATENT, "BatchMLAPagedAttentionWrapper", "fa3"),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else None,
)
def test_a_plain_wrapper_of_flashinfer_plans_the_same(vendor, case, name, backend, way):
    case = dataclasses.replace(case, ragged=True, length=max(case.length, 200), page_size=16)
    with torch.no_grad():
        inputs, ours, call, mine = planned(case)
        getattr(mine, way)()
        if case.kind == "mla":
            parts = (
                *inputs.q.split((512, 64), -1),
                *inputs.cache.k.squeeze(2).split((512, 64), -1),
            )
            out = mine.wrapper.run(*parts)
        else:
            out = mine.wrapper.run(inputs.q, (inputs.cache.k, inputs.cache.v))
    assert mine.wrapper is not call.args[0]
    assert (type(mine.wrapper).__name__, mine.wrapper._backend) == (name, backend)
    if "Decode" in name:
        assert mine.wrapper.use_tensor_cores == (backend == "fa2")
    torch.testing.assert_close(out, ours)
    assert inputs.error(out) < 0.02


def test_the_plan_beside_ours_is_that_of_the_wrapper_that_users_plan(vendor, short, monkeypatch):
    decode = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    real = decode.plan

    def slow(*args, **more):
        time.sleep(0.05)
        real(*args, **more)

    monkeypatch.setattr(decode, "plan", slow)  # on tensor cores ours is planned by prefill's
    result = found_on("flashinfer", TENSOR_CORES)
    assert result.error is None
    assert result.plan.ours < 50_000 < result.plan.direct
    assert result.plan_from_host_us > 50_000
    assert "or from the host" in overhead.describe(result)


def test_a_library_that_is_not_watched_is_an_error(vendor, short, monkeypatch):
    monkeypatch.setattr(added, "RUNS", {})
    result = found_on("fa3")
    assert result.error.startswith("RuntimeError: no call")
    assert "no call" in overhead.describe(result)


def test_calls_are_recorded_with_their_arguments():
    module, seen = types.ModuleType("vendor_of_test"), []

    def inner(x):
        seen.append(x)

    def outer(x, *, scale=1):
        module.inner(x * scale)
        return x

    class Wrapper:
        def run(self, q):
            module.outer(q)

    module.inner, module.outer, module.Wrapper = inner, outer, Wrapper
    sys.modules[module.__name__] = module
    table = {module.__name__: ("inner", "outer", "Wrapper.run"), "not.loaded": ("x",)}
    try:
        with recording(table) as recorder:
            assert module.outer(3, scale=2) == 3
            module.Wrapper().run(5)
            calls = recorder.taken()
            assert recorder.taken() == ()
        assert len(calls) == 2, "the calls within are the library's own"
        assert (module.outer, module.Wrapper.run) == (outer, Wrapper.run)
        seen.clear()
        in_turn(calls)()
        assert seen == [6, 5]
        assert calls[0]() == 3
    finally:
        del sys.modules[module.__name__]


def test_calls_are_timed_in_turn():
    made = []
    slow, fast = host_us(
        (lambda: (made.append("slow"), time.sleep(0.002)), lambda: made.append("fast")),
        CPU,
        rounds=3,
        calls_each=2,
    )
    assert made == ["slow", "fast"] + ["slow", "slow", "fast", "fast"] * 3
    assert slow.us > 2000 > fast.us
    assert slow.reps == 6


def test_limits_are_kept_or_not():
    result = Overhead(
        backend="fa3",
        case="c",
        host=Pair(ours=35.5, direct=28.0),
        plan=Pair(ours=120.0, direct=100.0),
        kernel=Pair(ours=10.1, direct=10.0),
        replay=Pair(ours=20.0, direct=19.0),
    )
    assert result.verdicts["host_us"] == (7.5, True)
    assert result.verdicts["plan_ratio"] == (1.2, False)
    assert {k for k, (_, good) in result.verdicts.items() if good} == {
        "host_us",
        "kernel_ratio",
        "replay_us",
    }
    text = overhead.describe(result)
    assert "plan_ratio 1.20 OVER 1.1" in text
    assert "call 35.5 µs, the library's 28.0" in text
    slower = dataclasses.replace(result, kernel=Pair(ours=10.3, direct=10.0))
    assert not slower.verdicts["kernel_ratio"][1]


def test_the_command_writes_what_it_found(vendor, short, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(overhead, "device_kind", lambda device: HOPPER)
    monkeypatch.setattr(overhead, "CASES", ((SMALL,),))
    path = tmp_path / "new" / "overhead.json"
    arguments = ["--device", "cpu", "--backends", "fa3,flashmla", "--out", str(path)]
    assert overhead.main(arguments) == 0
    out = capsys.readouterr().out
    assert "flashmla    serves no case here" in out
    assert "limits: host_us 8, plan_ratio 1.1, kernel_ratio 1.02" in out
    data = json.loads(path.read_text())
    (result,) = data["found"]
    assert (result["backend"], result["case"]) == ("fa3", SMALL.name)
    assert result["verdicts"].keys() == {"host_us", "plan_ratio"}
    assert data["versions"]["sglang-kernel"] == "0.4.5"
    assert data["limits"] == added.LIMITS
    assert data["command"] == "python -m benchmarks.overhead --device cpu --backends fa3,flashmla"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--backends", "fa33"], "fa3"),
        *([] if torch.cuda.is_available() else [([], "no GPU")]),
    ],
)
def test_mistakes_are_said(arguments, message):
    with pytest.raises(SystemExit, match=message):
        overhead.main(arguments)
