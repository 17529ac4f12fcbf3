"""`attn tune` in parts and ended from outside, `attn bench` with bars, prompts beside drafts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter

import pytest
from attn_core.cli.app import build_app
from attn_core.cli.bench import WIDTH, bar
from attn_core.cli.measurement import part_of, terminable
from attn_core.costs import store
from attn_core.costs.profile import Cost, Key, Profile
from attn_core.costs.shapes import Form, Pass
from attn_core.costs.workload import Workload
from attn_core.errors import UsageError
from attn_core.measure.candidates import Job, jobs
from attn_core.measure.session import Step
from attn_core.plugins.dependencies import alternatives
from attn_core.plugins.registry import load_plugins
from attn_core.selection.result import Overrides
from attn_core.spec.device import parse_device
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from typer.testing import CliRunner

SHAPE = ["--head-dim", "32", "--num-q-heads", "4", "--num-kv-heads", "2", "--dtype", "fp32"]
SHAPE += ["--allow", "torch_native", "--page-size", "16"]
SMALL = '{"prompts": {"20": 1, "70": 1}, "requests": {"2": 1, "3": 1}, "output": 8}'
LAYER = LayerRequirements(num_q_heads=32, num_kv_heads=8, head_dim=128)


def attn(*arguments):
    done = CliRunner().invoke(build_app(), [*arguments, *SHAPE, "--workload", SMALL])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_prompts_and_verification_are_measured_in_turns(mode):
    """Cut short at any place, each phase has had its share: none comes after all of another."""
    registry = load_plugins()
    libraries = {w.name: None for group in registry.requires() for w in alternatives(group)}
    needs = Requirements(layers=(LAYER,), speculation=Speculation(mode=mode), page_size=1)
    device, allow = parse_device("h100", "13.0"), Overrides(allow=("fa3", "triton"))
    todo = jobs(needs, device, registry, libraries, allow, Workload())
    whole = Counter(job.size.phase for job in todo)
    half = Counter(job.size.phase for job in todo[: len(todo) // 2])
    for phase, number in whole.items():
        if number > 10:  # the workload's own passes come first, all of them
            assert half[phase] == pytest.approx(number / 2, abs=number / 6), phase


def test_parts_measure_every_shape_once_into_one_file(tmp_path):
    whole, shared = tmp_path / "whole.json", tmp_path / "shared.json"
    measured = ("tune", "--quick", "--json", "--minutes", "1")
    every = json.loads(attn(*measured, "--out", str(whole)))
    listed = 0
    for part in ("1/2", "2/2"):
        done = json.loads(attn(*measured, "--out", str(shared), "--part", part))
        assert done["passes"]["measured"] == done["passes"]["listed"] > 0
        listed += done["passes"]["listed"]
    assert listed == every["passes"]["listed"] == 4
    assert store.read_profile(shared).costs.keys() == store.read_profile(whole).costs.keys()


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/-2", "a/b", "1/99999", "²/2", "1/2/3"])
def test_a_part_that_is_none_is_refused(text):
    assert part_of("2/3") == (2, 3)
    with pytest.raises(UsageError, match='as in "1/2"'):
        part_of(text)


@pytest.mark.parametrize(
    "how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_run_that_is_ended_keeps_what_it_measured_and_says_where(tmp_path, how):
    """A scheduler ends a job with SIGTERM, a user with Ctrl-C, which background jobs ignore."""
    out = tmp_path / "p.json"
    many = {"prompts": {str(20 + n): 1 for n in range(60)}, "requests": {"2": 1}, "output": 8}
    arguments = ["tune", "--quick", "--minutes", "5", "--out", str(out), *SHAPE]
    arguments += ["--workload", json.dumps(many)]
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from attn_core.cli import main; import attn_core.cli.tune as t; "
        "t.KEEP_S = 1e9; from attn_core.measure import session as s; kept = s.run\n"
        "def run(*a, **k):\n    found = kept(*a, **k)\n"
        "    print('measured', file=sys.stderr, flush=True)\n    return found\n"
        "s.run = run; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE)
    assert process.stderr is not None
    for _ in range(3):
        while b"measured" not in (line := process.stderr.readline()):
            assert line, "it ended by itself"
    process.send_signal(how)
    said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 128 + how
    assert len(store.read_profile(out).costs) >= 2
    assert f"passes were measured and are kept in {out}; run again to go on" in said
    assert "Traceback" not in said


def test_the_handler_of_a_signal_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, terminable():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_bench_draws_each_time_beside_the_slowest_of_its_pass(monkeypatch):
    form, size = Form(q_heads=4, kv_heads=2, head_dim=32), Pass.even("decode", 2, 20)
    us = {"apple": 10.0, "berry": 40.0}
    costs = {Key(n, "", form, size): Cost(x, x, x, 0.0) for n, x in us.items()}
    step = Step(Job(form, size, ()), Profile(costs=costs))
    monkeypatch.setattr("attn_core.measure.session.session", lambda *_, **__: iter([step]))
    monkeypatch.setenv("COLUMNS", "220")
    lines = attn("bench").splitlines()
    drawn = {name: line.count("█") for name in us for line in lines if name in line}
    assert drawn == {"apple": WIDTH // 4, "berry": WIDTH}
    assert "of the slowest" in "".join(lines)


def test_bars_are_plain_where_the_terminal_has_no_blocks(monkeypatch):
    assert bar(1e-9) == "█"

    class Plain:
        encoding = "ascii"

    monkeypatch.setattr("sys.stdout", Plain())
    assert bar(0.5) == "#" * (WIDTH // 2)
