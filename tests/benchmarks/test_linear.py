"""Linear attention's benchmark: inputs fit each contestant, and none of them ends a run."""

import contextlib
import fcntl
import json
import sys
import time

import pytest
import torch

pytest.importorskip("triton")

import triton

from benchmarks import linear
from benchmarks.linear_cases import CASES, LinearCase, build
from benchmarks.peers.linear import LINEAR_PEERS, OURS, LinearContestant
from benchmarks.sweep import SWEEPS, candidates
from benchmarks.timing import Ceilings, Timing, WallTimer

CPU = torch.device("cpu")
SMALL = {"heads": (1, 2), "dims": (32, 32)}


@pytest.fixture(autouse=True)
def one_call(monkeypatch):
    """Time nothing: a call is made once."""

    class Once(WallTimer):
        def measure(self, call):
            call()
            return Timing.of([10.0])

    monkeypatch.setattr(linear, "timer_for", lambda device: Once())
    monkeypatch.setattr(linear, "host_us", lambda call: 1.0)
    ceilings = Ceilings(copy_gbs=100.0, matmul_tflops=1.0)
    monkeypatch.setattr(linear, "measure_ceilings", lambda *_: ceilings)


def run(tmp_path, cases, *arguments, contestants=None):
    out = tmp_path / "linear.json"
    words = ["--device", "cpu", "--out", str(out), "--rounds", "2", *arguments]
    code = linear.main(words, cases=cases, contestants=contestants)
    return code, json.loads(out.read_text())


def contestant(name, prepare):
    return LinearContestant(
        name=name, distribution="torch", modules=("torch",), takes=lambda c: True, prepare=prepare
    )


def right(inputs, _):
    return lambda: inputs.reference[0], lambda: inputs.reference[1]


def test_names_are_apart_and_cover_the_table():
    names = [case.name for case in CASES]
    assert len({*names}) == len(names)
    assert "gdn prefill 1x32768 heads 16/32 fp32" in names
    assert "gdn verify 64x8 tree heads 16/32 fp32" in names


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("op", ["prefill", "decode", "verify", "commit"])
def test_ours_is_right(op, kind, tmp_path):
    tokens = {"prefill": 70, "decode": 1}.get(op, 3)
    case = LinearCase(op=op, batch=2, tokens=tokens, kind=kind, tree=op == "verify", **SMALL)
    code, record = run(tmp_path, [case], contestants=[OURS])
    assert not code
    [entry] = record["cases"][0]["entries"]
    assert "error" not in entry, entry
    assert entry["wrong"] is False
    assert ("state_error" in entry) == (op != "verify")


def test_ratios_to_the_best_peer():
    def timed(name, us):
        return {"name": name, "wrong": us < 0, "us": us}

    entries = [timed("one kernel", 8.0), timed("two kernels", 12.0), timed("broken", -1.0)]
    peers = [timed("fla", 16.0), timed("flashinfer-prefill", 10.0), timed("sglang-chunk", -2.0)]
    assert linear.ratios({"entries": entries + peers}) == {
        "one kernel / flashinfer-prefill": 0.8, "two kernels / flashinfer-prefill": 1.2,
    }  # fmt: skip
    assert linear.ratios({"entries": entries}) == {}


def test_a_sweep_is_recorded_where_it_is_told_to(tmp_path, monkeypatch):
    case = LinearCase(op="prefill", batch=1, tokens=5, kind="gdn", **SMALL)
    contestants = [contestant("one kernel", right), contestant("fla", right)]
    _, record = run(tmp_path, [case], "--sweep", "fused", contestants=contestants)
    assert record["sweep"] == "fused"
    [found] = record["cases"]
    assert [x["name"] for x in found["entries"]] == ["one kernel", "fla"]
    assert found["ratios"] == {"one kernel / fla": 1.0}
    assert "best_peer" not in found

    monkeypatch.setattr(linear, "FOLDER", tmp_path / "results")
    words = ["--device", "cpu", "--rounds", "1", "--sweep", "fused"]
    linear.main(words, cases=[case], contestants=contestants)
    assert not (tmp_path / "results").exists()


def test_what_a_contestant_does_ends_no_run(tmp_path):
    def broken(inputs, _):
        raise RuntimeError("no kernel\nfor it")

    def late(inputs, _):
        calls = []

        def call():
            calls.append(1)
            if len(calls) > 1:
                raise ValueError("late")
            return inputs.reference[0]

        return call, None

    def wrong(inputs, _):
        return lambda: inputs.reference[0] * 1.1, None

    missing = LinearContestant(
        name="missing", distribution="no", modules=("no_such.module",), takes=lambda c: True,
        prepare=right,
    )  # fmt: skip
    case = LinearCase(op="decode", batch=2, **SMALL)
    all_ = [contestant("ours", right), contestant("right", right), contestant("broken", broken)]
    all_ += [contestant("late", late), contestant("wrong", wrong), missing]
    code, record = run(tmp_path, [case, case], contestants=all_)
    assert not code
    assert len(record["cases"]) == 2
    entries = {x["name"]: x for x in record["cases"][0]["entries"]}
    assert entries["broken"]["error"] == "RuntimeError: no kernel for it"
    assert entries["late"]["error"] == "ValueError: late"
    assert "no_such" in entries["missing"]["error"]
    assert entries["wrong"]["wrong"] is True
    assert entries["right"]["us"] == 10.0
    assert record["cases"][0]["best_peer"] == "right"
    assert record["cases"][0]["ratio"] == 1.0


def test_a_wrong_result_of_ours_fails_the_run(tmp_path, capsys):
    def wrong(inputs, _):
        return lambda: inputs.reference[0] * 1.1, None

    case = LinearCase(op="decode", batch=2, **SMALL)
    code, _ = run(tmp_path, [case], contestants=[contestant("ours", wrong)])
    assert code == 1
    assert f"ours is wrong: {case.name}" in capsys.readouterr().out


def test_a_contestant_that_takes_too_long_is_recorded(tmp_path):
    def slow(inputs, _):
        time.sleep(30)

    case = LinearCase(op="decode", batch=2, **SMALL)
    all_ = [contestant("ours", right), contestant("slow", slow), contestant("right", right)]
    _, record = run(tmp_path, [case], "--prepare-limit", "0.5", contestants=all_)
    entries = {x["name"]: x for x in record["cases"][0]["entries"]}
    assert "preparing took more than 0.5 s" in entries["slow"]["error"]
    assert entries["right"]["us"] == 10.0
    with pytest.raises(SystemExit):
        linear.parse(["--prepare-limit", "5"])


@pytest.mark.parametrize("ends", ["", "raise ValueError(1)"])
def test_an_import_that_replaces_a_function_of_triton_leaves_it(ends, tmp_path, monkeypatch):
    """As SGLang does: FLA's KDA kernels would not compile any more."""
    words = "import triton\ntriton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()\n"
    (tmp_path / "replacing.py").write_text(words + ends)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "replacing", raising=False)
    own = triton.next_power_of_2
    replacing = LinearContestant(
        name="x", distribution="x", modules=("replacing",), takes=lambda c: True, prepare=right
    )
    with pytest.raises(ValueError, match="1") if ends else contextlib.nullcontext():
        replacing.load()
    assert triton.next_power_of_2 is own


def test_seconds_end_a_run(tmp_path, capsys):
    case = LinearCase(op="decode", batch=2, **SMALL)
    out = tmp_path / "linear.json"
    words = ["--device", "cpu", "--out", str(out), "--seconds", "-1"]
    assert not linear.main(words, cases=[case], contestants=[contestant("ours", right)])
    assert "1 cases are left out" in capsys.readouterr().out
    assert not out.exists()


def test_only_and_peers_choose(tmp_path):
    with pytest.raises(SystemExit):
        linear.parse(["--peers", "none"])
    with pytest.raises(SystemExit):
        linear.parse(["--peers", "nobody", "--out", "x"])
    cases = [LinearCase(op=op, batch=1, tokens=1, **SMALL) for op in ("prefill", "decode")]
    _, record = run(tmp_path, cases, "--only", "decode", "--peers", "none")
    assert [x["op"] for x in record["cases"]] == ["decode"]
    assert [x["name"] for x in record["cases"][0]["entries"]] == ["ours"]


def test_only_keeps_the_other_cases_of_a_record(tmp_path):
    cases = [LinearCase(op=op, batch=1, tokens=1, **SMALL) for op in ("prefill", "decode")]
    run(tmp_path, cases, "--peers", "none")
    _, record = run(tmp_path, cases, "--only", "decode", "--peers", "none")
    assert {x["op"] for x in record["cases"]} == {"prefill", "decode"}
    assert all(x["commit"] == record["versions"]["commit"] for x in record["cases"])
    path = tmp_path / "linear.json"
    older = {**record, "versions": {**record["versions"], "commit": "older"}}
    older["cases"] = [{k: v for k, v in x.items() if k != "commit"} for x in record["cases"]]
    path.write_text(json.dumps(older))
    _, record = run(tmp_path, cases, "--only", "decode", "--peers", "none")
    assert [x["commit"] for x in record["cases"]] == ["older", record["versions"]["commit"]]
    with pytest.raises(SystemExit, match=r"rounds 2, here 1"):
        run(tmp_path, cases, "--only", "decode", "--peers", "none", "--rounds", "1")


def test_runs_that_share_a_device_take_turns(tmp_path, monkeypatch):
    """What checks and times holds the lock, what prepares does not."""
    lock, seen = tmp_path / "turns", set()

    def held():
        with lock.open("w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def watched(inputs, _):
        seen.add(("prepare", held()))
        return lambda: inputs.reference[0], None

    def noting(name):
        own = getattr(linear, name)

        def noted(*args, **more):
            seen.add((name, held()))
            return own(*args, **more)

        monkeypatch.setattr(linear, name, noted)

    for name in ("check", "time_rounds", "measure_ceilings"):
        noting(name)
    case = LinearCase(op="decode", batch=2, **SMALL)
    _, record = run(
        tmp_path, [case], "--turns", str(lock), contestants=[contestant("ours", watched)]
    )
    assert record["cases"][0]["entries"][0]["us"] == 10.0
    names = ("check", "time_rounds", "measure_ceilings")
    assert seen == {("prepare", False), *((name, True) for name in names)}
    assert not held()


def test_commit_has_a_peer_that_is_always_there(tmp_path):
    case = LinearCase(op="commit", batch=2, tokens=3, **SMALL)
    _, record = run(tmp_path, [case], "--peers", "copied-states")
    assert record["cases"][0]["best_peer"] == "copied-states"
    assert not any(x["wrong"] for x in record["cases"][0]["entries"])


@pytest.mark.parametrize("peer", LINEAR_PEERS, ids=lambda x: x.name)
def test_each_peer_prepares_its_call(peer):
    """Of inputs of each case that it takes, without its library: the call is not made."""
    taken = 0
    for case in CASES:
        if peer.takes(case):
            taken += 1
            small = LinearCase(
                op=case.op, batch=2, tokens=min(case.tokens, 3), kind=case.kind, tree=case.tree,
                state=case.state, **(SMALL if case.kind == "gdn" else {**SMALL, "heads": (2, 2)}),
            )  # fmt: skip

            class Module:
                def __getattr__(self, name):
                    return lambda *args, **kwargs: None

            call, _ = peer.prepare(build(small, CPU), Module())
            assert callable(call)
    assert taken


@pytest.mark.parametrize("name", SWEEPS)
def test_candidates_launch_with_their_parameters(name):
    tokens = {"scan": 3, "prepare": 3, "decode": 1}.get(name, 2)
    op = SWEEPS[name][1]
    case = LinearCase(op=op, batch=1, tokens=tokens, heads=(1, 1), dims=(32, 128))
    inputs = build(case, CPU)
    first = candidates(name)[0]
    call, _ = first.prepare(inputs, first.load())
    call()
