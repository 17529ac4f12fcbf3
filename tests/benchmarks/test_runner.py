"""Contestants are called right, checked, timed and recorded; nothing that one does ends a run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
import types

import fake_peers
import noting
import pytest
import torch
from attn_core.plugins.registry import load_plugins
from small_cases import CASES

from benchmarks import attention, timing
from benchmarks.cases import build
from benchmarks.compiling import Field, compile_kernels
from benchmarks.contestant import Contestant
from benchmarks.ours import our_backend
from benchmarks.peers import PEERS
from benchmarks.results import FOLDER, default_path, load
from benchmarks.runner import measure, measure_all
from benchmarks.suites import grid
from benchmarks.timing import Ceilings, Timing, WallTimer, measure_ceilings, repetitions

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy_gbs=100.0, matmul_tflops=1.0)


class OnceTimer(WallTimer):
    def measure(self, call):
        call()
        return Timing.of([10.0, 20.0, 30.0])


def contestant(name, prepare, **more):
    return Contestant(
        name=name,
        distribution="torch",
        module="torch",
        phases=frozenset({"decode"}),
        prepare=prepare,
        **more,
    )


@pytest.fixture(scope="module")
def ours():
    return our_backend("torch_native", load_plugins(), CPU)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_our_backend_is_right_on_every_phase(ours, case):
    entry = measure(ours, build(case, CPU), OnceTimer(), floor_us=5.0)
    assert entry.error is None
    assert entry.counts
    assert entry.rel_err < 1e-2
    assert entry.roofline == pytest.approx(5 / 20)
    assert entry.gbs == pytest.approx(case.kv_bytes / 20 / 1e3)
    assert entry.tflops == pytest.approx(case.flops / 20 / 1e6)


def test_a_backend_that_cannot_says_why():
    triton = our_backend("triton", load_plugins(), CPU)
    entry = measure(triton, build(CASES[0], CPU), OnceTimer(), floor_us=5.0)
    assert entry.us is None
    assert "triton" in entry.error


PAIRS = [
    (peer, case)
    for peer in PEERS
    if peer.name not in ("sdpa-cudnn", "flex")  # a kernel of a GPU, and a compiler
    for case in CASES
    if case.phase in peer.phases and not peer.refuses(case)
]


@pytest.mark.parametrize(("peer", "case"), PAIRS, ids=lambda x: x.name)
def test_every_peer_gets_what_its_documentation_asks_for(monkeypatch, peer, case):
    if peer.module != "torch":
        fake_peers.install(monkeypatch)
    assert peer.available()
    entry = measure(peer, build(case, CPU), OnceTimer(), floor_us=5.0)
    assert entry.error is None
    assert not entry.wrong
    # a stand-in is exact in float32; where q is rounded to e4m3, by up to 2^-4, that shows
    assert entry.rel_err < (8e-2 if case.phase == "fp8" else 6e-3)


def test_every_peer_is_asked_something_here():
    assert {p.name for p, _ in PAIRS} == {p.name for p in PEERS} - {"sdpa-cudnn", "flex"}


def test_what_is_refused_or_missing_is_said():
    by_name = {p.name: p for p in PEERS}
    tree = next(c for c in CASES if c.tree)
    odd = dataclasses.replace(CASES[0], page_size=1)
    assert "tree" in by_name["fa3"].refuses(tree)
    assert "tree" in by_name["flashinfer-fa3"].refuses(tree)
    assert by_name["flashinfer-fa2"].refuses(tree) == ""
    assert by_name["fa4"].refuses(odd) == "page_size 1 (takes 128)"
    assert by_name["flashinfer-xqa"].refuses(odd) == "page_size 1 (takes 16, 32, 64)"
    assert "ragged" in by_name["sdpa-flash"].refuses(CASES[5])
    if not by_name["fa4"].available():
        entry = measure(by_name["fa4"], build(CASES[1], CPU), OnceTimer(), floor_us=5.0)
        assert entry.error == "flash_attn.cute is not installed"


def test_failures_and_wrong_results_are_recorded_and_never_best(ours):
    def wrong(inputs):
        return lambda: torch.ones(inputs.case.tokens, inputs.case.q_heads, inputs.case.v_head_dim)

    def broken(inputs):
        raise ValueError("no kernel\nfor this")

    def stops_late(inputs):
        def call():
            raise RuntimeError("launch failed")

        return call

    def leaves_it_unwritten(inputs):
        out = torch.full(
            (inputs.case.tokens, inputs.case.q_heads, inputs.case.v_head_dim), torch.nan
        )
        return lambda: out

    def right(inputs):
        call = ours.prepare(inputs)
        return lambda: call().clone()

    peers = [
        contestant("wrong", wrong),
        contestant("broken", broken),
        contestant("late", stops_late),
        contestant("unwritten", leaves_it_unwritten),
        contestant("right", right),
        contestant("choosy", right, refuses=lambda case: "page_size 3 (takes 4)"),
    ]
    lines = []
    (result,) = measure_all(
        CASES[:1],
        ours,
        lambda case: peers,
        device=CPU,
        timer=OnceTimer(),
        ceilings=CEILINGS,
        say=lines.append,
    )
    by_name = {e.name: e for e in result.peers}
    assert by_name["wrong"].wrong
    assert by_name["wrong"].us == 20
    assert by_name["broken"].error == "ValueError: no kernel for this"
    assert by_name["late"].error == "RuntimeError: launch failed"
    assert by_name["unwritten"].wrong
    assert by_name["choosy"].error == "refuses page_size 3 (takes 4)"
    assert result.best_peer.name == "right"
    assert result.ratio == 1.0
    assert result.floor_us == pytest.approx(CASES[0].bytes / 100 / 1e3)
    assert any("WRONG" in line for line in lines)
    assert "ours / best peer (right): 1.000" in lines[-1]


def test_a_peer_over_its_limit_is_recorded():
    slow = contestant("slow", lambda inputs: time.sleep(30))
    inputs = build(next(c for c in CASES if c.phase == "decode"), CPU)
    entry = measure(slow, inputs, OnceTimer(), floor_us=5.0, prepare_limit_s=0.2)
    assert entry.error == "TimeoutError: preparing took more than 0.2 s (--prepare-limit)"
    assert entry.us is None


def test_every_peer_is_timed_however_long_the_others_take(ours, monkeypatch):
    """A record says who is the best: nobody is left out because the clock ran on."""
    hours = itertools.count(step=3600.0)
    for clock in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: next(hours))
    (result,) = measure_all(
        CASES[:1],
        ours,
        lambda case: [contestant("slow", ours.prepare), contestant("last", ours.prepare)],
        device=CPU,
        timer=OnceTimer(),
        ceilings=CEILINGS,
        say=lambda line: None,
    )
    assert [e.us for e in result.peers] == [20, 20]
    assert result.untimed == ()
    assert result.ratio == 1.0


def test_timing_arithmetic():
    result = Timing.of([float(x) for x in range(1, 12)])
    assert (result.us, result.p20, result.p80, result.reps) == (6, 3, 9, 11)
    assert Timing.of([4.0]) == Timing(us=4.0, p20=4.0, p80=4.0, reps=1)
    assert [repetitions(ms) for ms in (0.0, 0.012, 4.0, 1000.0)] == [30, 30, 15, 5]
    ceilings = Ceilings(copy_gbs=4000, matmul_tflops=800)
    assert ceilings.floor_us(4 * 10**9, 1) == pytest.approx(1000)
    assert ceilings.floor_us(1, 8 * 10**11) == pytest.approx(1000)


def test_the_wall_timer_and_ceilings_measure_this_machine():
    calls = []
    result = WallTimer().measure(lambda: calls.append(sum(range(20000))))
    assert len(calls) == result.reps + 2
    assert 0 < result.p20 <= result.us <= result.p80
    small = measure_ceilings(WallTimer(), CPU)
    assert small.copy_gbs > 0
    assert small.matmul_tflops > 0


class Clock:
    """A GPU of one queue: what is queued runs in order, never before it was queued."""

    def __init__(self):
        self.host = self.gpu = 0.0

    def queue(self, host_s, gpu_s):
        self.host += host_s
        self.gpu = max(self.gpu, self.host) + gpu_s


def test_a_kernel_shorter_than_its_launch_is_timed_without_the_gap(monkeypatch):
    clock, flushed = Clock(), []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = max(clock.gpu, clock.host)

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at)

    def zero(buffer):
        flushed.append(buffer.numel())
        clock.queue(5e-6, 60e-6)

    def wait():
        clock.host = clock.gpu = max(clock.host, clock.gpu)

    properties = types.SimpleNamespace(L2_cache_size=1 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.Tensor, "zero_", zero)
    monkeypatch.setattr(timing, "LEAST_FLUSH", 1 << 10)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.host)
    timer = timing.CudaTimer(CPU)
    for host_us, flushes in ((20, 1), (200, 5)):
        flushed.clear()
        result = timer.measure(lambda host_us=host_us: clock.queue(host_us * 1e-6, 12e-6))
        assert result.us == pytest.approx(12), "the launch gap is in the figure"
        assert result.reps == 30
        assert flushed == [2 << 20] * 30 * flushes
    read = []
    monkeypatch.setattr(torch.Tensor, "sum", lambda x: read.append(x.numel()))
    timing.CudaTimer(CPU, clean=True).measure(lambda: clock.queue(20e-6, 12e-6))
    assert read == [2 << 20] * 30, "once before each repetition"


@pytest.mark.parametrize(
    ("spreads", "taken"), [([1.05], 0), ([1.2, 1.02], 1), ([3.0, 1.2, 1.15, 1.0], 2)]
)
def test_what_disturbed_is_measured_again(spreads, taken, monkeypatch):
    """Three times at most, and the narrowest counts."""
    rounds = [
        timing.Timing(us=float(i), p20=10.0, p80=10 * x, reps=5) for i, x in enumerate(spreads)
    ]
    each = iter(rounds)
    timer = object.__new__(timing.CudaTimer)
    monkeypatch.setattr(timing.CudaTimer, "_round", lambda self, call: next(each))
    assert timer.measure(lambda: None) == rounds[taken]


def test_the_command_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention, "cases_of", lambda phase: CASES[:2])
    monkeypatch.setattr(attention, "measure_ceilings", lambda timer, device: CEILINGS)
    path = tmp_path / "new" / "out.json"
    code = attention.main(["--device", "cpu", "--phase", "decode", "--out", str(path)])
    assert code == 0
    report = load(path)
    assert [m.name for m in report.cases] == [c.name for c in CASES[:2]]
    assert all(m.ours.counts and m.ours.name == "torch_native" for m in report.cases)
    assert report.versions["torch"] == torch.__version__
    assert report.versions["attn-core"]
    assert report.command == "python -m benchmarks.attention --device cpu --phase decode"
    assert "not installed: fa3" in capsys.readouterr().out
    raw = json.loads(path.read_text())
    assert raw["cases"][0]["shape"]["page_size"] == 16
    assert "worst" in raw


def test_parts_of_a_run_write_one_record(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "cases_of", lambda phase: CASES[:3])
    monkeypatch.setattr(attention, "measure_ceilings", lambda timer, device: CEILINGS)
    path = tmp_path / "out.json"
    run = ["--device", "cpu", "--phase", "decode", "--peers", "none", "--out", str(path)]
    assert attention.main([*run, "--part", "2/2"]) == 0
    assert [m.name for m in load(path).cases] == [CASES[1].name]
    assert attention.main([*run, "--part", "1/2"]) == 0
    joined = load(path)
    assert [m.name for m in joined.cases] == [c.name for c in CASES[:3]]
    assert all(m.ours.counts for m in joined.cases)
    full = "python -m benchmarks.attention --device cpu --phase decode --peers none"
    assert joined.command == full
    # another run's file is replaced
    other = dataclasses.replace(joined, versions={"commit": "another"})
    other.save(path)
    dataclasses.replace(joined, cases=joined.cases[:1]).join(path, [c.name for c in CASES])
    assert [m.name for m in load(path).cases] == [CASES[0].name]


def beside(full, path):
    """Yield the first case when another part of the run has written the last one."""
    dataclasses.replace(full, cases=full.cases[2:]).join(path, [m.name for m in full.cases])
    yield full.cases[0]


def test_a_run_that_was_cut_off_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention, "cases_of", lambda phase: CASES[:3])
    monkeypatch.setattr(attention, "measure_ceilings", lambda timer, device: CEILINGS)
    path = tmp_path / "out.json"
    run = ["--device", "cpu", "--phase", "decode", "--peers", "none", "--out", str(path)]
    assert attention.main(run) == 0
    full = load(path)
    earlier = {**full.versions, "commit": "a1b2c3"}
    kept = [
        dataclasses.replace(m, ours=dataclasses.replace(m.ours, p20=9.0, p80=x))
        for m, x in zip(full.cases[1:], (9.5, 20.0), strict=True)
    ]  # the second was disturbed
    part = dataclasses.replace(full, cases=tuple(kept), versions=earlier)
    part.save(path)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "measure_all", lambda *a, **k: iter(full.cases[:1]))
        assert attention.main([*run, "--resume"]) == 0
    cut_off = [dataclasses.replace(m, commit="a1b2c3") for m in kept]
    assert load(path).cases == (full.cases[0], *cut_off), "what it did not reach is lost"
    part.save(path)
    with monkeypatch.context() as patch:  # the other part times a case before this one writes
        patch.setattr(attention, "measure_all", lambda *a, **k: beside(full, path))
        assert attention.main([*run, "--resume", "--part", "1/2"]) == 0
    assert load(path).cases == (full.cases[0], cut_off[0], full.cases[2])
    part.save(path)
    assert attention.main([*run, "--resume"]) == 0
    result = load(path)
    assert [m.name for m in result.cases] == [c.name for c in CASES[:3]]
    assert result.cases[1] == cut_off[0], "not timed again"
    assert result.cases[2].ours != kept[1].ours
    assert [m.commit for m in result.cases] == [None, "a1b2c3", None]
    assert (result.notes, result.command) == (full.notes, full.command)
    capsys.readouterr()
    dataclasses.replace(
        result, cases=tuple(dataclasses.replace(m, ours=kept[0].ours) for m in result.cases)
    ).save(path)
    assert attention.main([*run, "--resume"]) == 0
    assert "has all cases" in capsys.readouterr().out
    dataclasses.replace(part, versions={**earlier, "torch": "2.0"}).save(path)
    with pytest.raises(SystemExit, match="libraries"):
        attention.main([*run, "--resume"])


@pytest.mark.long
def test_everyone_is_called_before_anything_is_timed(tmp_path):
    """Ours and PyTorch's with each case, others with the least of a kind; a fault ends nothing."""
    cases = [CASES[0], dataclasses.replace(CASES[0], batch=1), CASES[2], CASES[4]]
    field, said = Field(noting.make, (str(tmp_path), "ours,each,peer,faulty")), []
    compile_kernels(cases, field, CPU, said.append)
    wanted = {f"{name} {c.name}" for name in ("ours", "each") for c in (*cases[:3],)}
    wanted |= {f"{name} {c.name}" for name in ("peer", "faulty") for c in cases[1:3]}
    wanted.add(f"ours {CASES[4].name}")  # of a phase that no peer has
    assert {x.name for x in tmp_path.iterdir()} == {x.replace("/", "-") for x in wanted}
    assert said[-1] == f"compiled: {len(wanted)} of {len(wanted)} calls"


def test_a_process_that_does_not_end_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.compiling.MOST_PROCESSES", 1)
    field, start = Field(noting.make, (str(tmp_path), "staying,faulty")), time.monotonic()
    compile_kernels([CASES[0]], field, CPU, lambda line: None)
    assert len([*tmp_path.iterdir()]) == 2
    assert time.monotonic() - start < 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--peers", "fa33"], "fa3"),
        (["--device", "cpu", "--part", "3/2"], "2"),
        (["--device", "cpu", "--ours", "tritn"], "triton"),
        (["--device", "cpu", "--cases", "nothing such"], "no case"),
        *([] if torch.cuda.is_available() else [(["--phase", "decode"], "no GPU")]),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(arguments, message):
    with pytest.raises(SystemExit, match=message):
        attention.main(arguments)


def test_the_grid_asks_every_peer_of_a_phase():
    for case in grid():
        requested = attention.peers_of(case, PEERS)
        assert requested == [p for p in PEERS if case.phase in p.phases]
        assert any(not p.refuses(case) for p in requested), case.name


@pytest.mark.parametrize(
    "part", ["--cases=B1 ", "--peers=fa3", "--peers=none", "--prepare-limit=5"]
)
def test_a_part_of_a_run_is_no_record(part, tmp_path):
    """Its best peer is the best of some, so it does not take the place of the whole."""
    for more in ([], ["--out", str(FOLDER / "attention.x.decode.json")]):
        args = attention.parse(["--phase", "decode", part, *more])
        with pytest.raises(SystemExit, match="all installed peers"):
            attention.target(args, "NVIDIA H200")
    args = attention.parse(["--phase", "decode", part, "--out", str(tmp_path / "x.json")])
    assert attention.target(args, "NVIDIA H200") == tmp_path / "x.json"
    full = attention.parse(["--phase", "decode"])
    assert attention.target(full, "NVIDIA H200") == default_path("NVIDIA H200", "decode")
