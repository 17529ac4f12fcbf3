"""Servers that start beside one another and are timed in turns."""

import dataclasses
import json
import subprocess
import sys
import time

import pytest

from benchmarks.engines import record, sglang_engine, together, vllm_engine
from benchmarks.engines.configurations import CONFIGURATIONS, OURS, named
from benchmarks.engines.memory import gigabytes, pool_bytes, pool_tokens
from benchmarks.engines.processes import Settings

VERSIONS = {"sglang": "0.5.16"}
HYBRID = [name for name in CONFIGURATIONS if name.startswith("qwen3-next")]
# What benchmarks.engines.steps does, without an engine: it counts while it runs, and its child
# counts in a file of its own, so that a test sees who runs at the same time.
SERVER = """
import json, os, signal, subprocess, sys, time
from benchmarks.engines import record
said = json.loads(sys.stdin.readline())
os.dup2(os.open(said["log"], os.O_WRONLY | os.O_APPEND), 2)
name, backend, _, out, _, turns, *_ = said["arguments"]
count = (
    "import sys, time\\nwhile True: print(time.time(), flush=True); time.sleep(0.02)"
)
with open(f"{out}.{name}.{backend}.child", "w") as file:
    subprocess.Popen([sys.executable, "-c", count], stdout=file)
if backend == "dies":
    raise RuntimeError("no memory")
if backend == "hangs":
    print("compiling a kernel", file=sys.stderr, flush=True)
    time.sleep(600)
for number in range(1, int(turns) + 1):
    os.killpg(0, signal.SIGSTOP)
    with open(out + ".turns", "a") as file:
        print(json.dumps([name, backend, number, time.time(), time.time() + 0.4]), file=file)
    time.sleep(0.4)
    if backend == "dies in round 2" and number == 2:
        raise ValueError("lost")
    row = {"backend": backend, "case": "decode 16x4096", "round": number, "ms": 1.0}
    row |= {"spread_ms": [1.0, 1.0], "versions": {"sglang": "0.5.16"}}
    record.merge(__import__("pathlib").Path(out), row, configuration=name, device="Some GPU")
os.killpg(0, signal.SIGSTOP)
"""


def settings(tmp_path, **more):
    return Settings(
        end=time.monotonic() + 300,
        limit_s=60,
        again=False,
        logs=tmp_path / "logs",
        versions=VERSIONS,
        cases=["decode 16x4096"],
        **more,
    )


def run(tmp_path, backends, rounds=2, names=("tp2",), **more):
    paths = {name: tmp_path / f"{name}.json" for name in names}
    kwargs = dataclasses.replace(settings(tmp_path), **more)
    command = [sys.executable, "-c", SERVER]
    together.run(paths, backends, rounds, command, kwargs, 80.0)
    return {
        (r["backend"], r["round"]): r.get("error", r.get("ms"))
        for r in record.load(paths[names[0]]).get("rows", [])
    }


def test_rounds_alternate_and_a_configuration_is_done_before_the_next():
    group = [("tp2", OURS), ("tp2", "fa3"), ("pp2", OURS), ("pp2", "fa3")]
    order = [(name, backend, number) for (name, backend), number in together.turns(group, 3)]
    assert order[:6] == [
        ("tp2", OURS, 1), ("tp2", "fa3", 1), ("tp2", "fa3", 2), ("tp2", OURS, 2),
        ("tp2", OURS, 3), ("tp2", "fa3", 3),
    ]  # fmt: skip
    assert [name for name, *_ in order[6:]] == ["pp2"] * 6


def test_servers_start_together_as_far_as_the_memory_allows():
    servers = {"a": [OURS, "fa3"], "b": [OURS, "fa3"], "c": [OURS, "fa3"], "d": [OURS]}
    sizes = {"a": 15.0, "b": 20.0, "c": 50.0, "d": 10.0}
    assert [*together.groups(servers, sizes, 80.0)] == [
        [("a", OURS), ("a", "fa3"), ("b", OURS), ("b", "fa3")],
        [("c", OURS)],
        [("c", "fa3")],
        [("d", OURS)],
    ]
    assert [*together.groups({}, {}, 80.0)] == []


def test_one_server_runs_at_a_time_and_its_children_stand_still_meanwhile(tmp_path, capsys):
    result = run(tmp_path, [OURS, "fa3"])
    assert result == {(b, n): 1.0 for b in (OURS, "fa3") for n in (1, 2)}
    assert "2 servers together" in capsys.readouterr().out
    lines = (tmp_path / "tp2.json.turns").read_text().splitlines()
    made = [json.loads(line) for line in lines]
    assert [(b, n) for _, b, n, *_ in made] == [(OURS, 1), ("fa3", 1), ("fa3", 2), (OURS, 2)]
    for _, backend, _, start, end in made:
        other = OURS if backend == "fa3" else "fa3"
        ticks = {
            b: [float(x) for x in (tmp_path / f"tp2.json.tp2.{b}.child").read_text().split()]
            for b in (OURS, "fa3")
        }
        assert not [t for t in ticks[other] if start < t < end]
        assert [t for t in ticks[backend] if start < t < end]
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in left
    assert run(tmp_path, [OURS, "fa3"]) == result
    assert "recorded" in capsys.readouterr().out
    assert (tmp_path / "tp2.json.turns").read_text().splitlines() == lines


def test_a_server_that_fails_leaves_an_error_and_the_others_their_times(tmp_path):
    result = run(tmp_path, [OURS, "dies", "dies in round 2"])
    assert result == {
        (OURS, 1): 1.0,
        (OURS, 2): 1.0,
        ("dies", 1): "RuntimeError: no memory",
        ("dies in round 2", 1): 1.0,
        ("dies in round 2", 2): "ValueError: lost",
    }


def test_a_server_that_hangs_is_killed_and_one_without_time_is_not_recorded(tmp_path, capsys):
    result = run(tmp_path, ["hangs"], rounds=1, limit_s=4.0)
    assert result["hangs", 1].startswith("killed after 4 s")
    (tmp_path / "more").mkdir()
    end = time.monotonic() + 2
    assert run(tmp_path / "more", ["hangs"], rounds=1, end=end) == {}
    said = capsys.readouterr().out
    assert "hangs round 1: stopped, no seconds left; it was at: compiling a kernel" in said


def test_servers_that_do_not_fit_run_one_after_the_other_and_say_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(together, "gigabytes", lambda _: 50.0)
    result = run(tmp_path, [OURS, "fa3"], rounds=1)
    assert result == {(OURS, 1): 1.0, ("fa3", 1): 1.0}
    said = capsys.readouterr().out
    assert "2 servers of 50 GB do not fit into 92% of 80 GB" in said
    assert said.count("1 servers together") == 2


def test_the_memory_of_a_server_follows_from_its_cases(tmp_path):
    tp2, dp2, pp2, dcp2 = (CONFIGURATIONS[n] for n in ("tp2", "dp2", "pp2", "dcp2"))
    token = 2 * 32 * 8 * 128 * 2  # bytes of all layers
    assert pool_tokens(tp2) == 16 * (4096 + 580)
    assert pool_bytes(tp2) == pool_bytes(pp2) == pool_tokens(tp2) * token // 2
    assert pool_tokens(dp2) == 8 * (32768 + 580)
    assert pool_bytes(dp2) == pool_tokens(dp2) * token
    assert pool_bytes(dcp2) == 16 * (32768 + 580) * token // 8 // 2
    assert 2 * gigabytes(tp2) < together.MOST * 80 < 2 * gigabytes(dp2)
    short = dataclasses.replace(dp2, cases=(*named("dp2", ["decode 16x8192"]),))
    assert 2 * gigabytes(short) < together.MOST * 80
    assert gigabytes(CONFIGURATIONS["mla"]) == float("inf")
    hybrid, drafted = (CONFIGURATIONS[n] for n in ("qwen3-next", "qwen3-next-tree"))
    state = 6 * 32 * 128 * 128 * 4  # bytes: 6 of 8 layers are linear
    token = 2 * 2 * 2 * 256 * 2
    assert pool_bytes(hybrid) == 64 * (4128 + 580) * token + 8 * 64 * state
    tokens = 64 * (2080 + 580)
    assert pool_bytes(drafted) == tokens * token * 3 // 2 + (8 + 8) * 64 * state
    (tmp_path / "hybrid").mkdir()
    requested = sglang_engine.arguments(hybrid, "fa3", tmp_path / "hybrid", 0)
    assert requested["max_mamba_cache_size"] == 8 * 64
    (tmp_path / "alone").mkdir()
    assert "max_mamba_cache_size" not in sglang_engine.arguments(hybrid, OURS, tmp_path / "alone")
    shared = named("shared-prefix", ["decode 64x8704 shared 64x8192"])
    asked_once = dataclasses.replace(CONFIGURATIONS["shared-prefix"], cases=(*shared,))
    assert pool_tokens(asked_once) == 8192 + 64 * (512 + 580)
    result = sglang_engine.arguments(dp2, "fa3", tmp_path, 3)
    assert result["max_total_tokens"] == pool_tokens(dp2)
    assert result["nccl_port"] > result["port"] > sglang_engine.ports(2)["nccl_port"]
    (tmp_path / "vllm").mkdir()
    vllm = CONFIGURATIONS["vllm-tp2"]
    requested = vllm_engine.arguments(vllm, OURS, tmp_path / "vllm", 0)
    assert requested["kv_cache_memory_bytes"] == pool_bytes(vllm)


@pytest.mark.parametrize(
    "name", ["tp2", "tp2-fp8", "tp2-eagle", "dcp2", "pp2", "vllm-tp2", *HYBRID]
)
def test_ours_and_a_peer_fit_on_gpus_of_80_gigabytes(name):
    assert 2 * gigabytes(CONFIGURATIONS[name]) < together.MOST * 79
