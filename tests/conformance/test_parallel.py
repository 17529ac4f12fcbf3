"""Checks in several processes: one that dies fails alone, and what needs memory runs alone."""

import threading
import time

import pytest
from attn_core.spec.device import Device
from attn_core.testing import parallel
from attn_core.testing.parallel import SuiteOptions, run_parallel
from attn_core.testing.tolerance import Measure
from dying import DEADLY, serve

ASKED = SuiteOptions(backend="torch_native", device=Device("cpu"), kinds=("mha",), reduced=True)


def test_a_process_that_dies_fails_its_check_by_name_and_no_other(monkeypatch):
    monkeypatch.setattr(parallel, "_serve", serve)
    _, planned = ASKED.plan()
    few = [p for p in planned if p.row is not None]
    few = [p for p in few if p.check.id.startswith((DEADLY, "twice-whole", "decode", "sinks"))]
    kept = {p.check.id for p in few}
    skipped = [p for p in planned if p.check.id not in kept]
    for p in skipped:
        object.__setattr__(p, "row", None)
    monkeypatch.setattr(SuiteOptions, "plan", lambda self: (None, planned))
    seen = []
    outcomes = run_parallel(ASKED, 2, lambda p: seen.append(p.check.id))
    assert sorted(seen) == sorted(p.check.id for p in few)
    for outcome in outcomes:
        name = outcome.planned.check.id
        if name not in kept:
            assert outcome.status == "skipped"
        elif name.startswith((DEADLY, "twice-")):
            how = "signal SIGKILL" if name.startswith(DEADLY) else "exit code 3"
            assert outcome.status == "failed"
            assert outcome.detail == f"{name}: the process that ran it died ({how})"
        else:
            assert outcome.status == "passed"
    assert {o.status for o in outcomes} == {"passed", "failed", "skipped"}


@pytest.mark.parametrize("alone", [False, True])
def test_what_takes_the_memory_of_a_device_runs_alone(alone, monkeypatch):
    inside, most = [], []
    lock = threading.Lock()

    def run(self, index, name):
        with lock:
            inside.append(index)
            most.append(len(inside))
        time.sleep(0.05)
        with lock:
            inside.remove(index)
        return "passed", Measure(), ""

    _, planned = ASKED.plan()
    picked = [p for p in planned if p.check.id.startswith("far-pages") and p.row is not None]
    assert all(p.check.alone for p in picked)
    for p in picked:
        object.__setattr__(p.check, "alone", alone)
    monkeypatch.setattr(SuiteOptions, "plan", lambda self: (None, picked * 2))
    monkeypatch.setattr(parallel._Worker, "run", run)
    run_parallel(ASKED, 3, lambda p: None)
    assert (max(most) == 1) == alone
