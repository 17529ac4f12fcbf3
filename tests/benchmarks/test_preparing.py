"""What is being prepared is said, and what takes too long is ended, whatever it catches."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from benchmarks import preparing
from benchmarks.preparing import prepared


def alarms():
    return signal.getitimer(signal.ITIMER_REAL)[0], signal.getsignal(signal.SIGALRM)


@pytest.fixture(autouse=True)
def _no_alarm_is_left():
    before = alarms()
    yield
    assert alarms() == before


def test_beginning_and_end_are_said(capsys):
    assert prepared("fla", lambda: capsys.readouterr().err) == "fla: preparing\n"
    assert capsys.readouterr().err.startswith("fla: prepared in 0.0 s")


def test_what_is_raised_passes(capsys):
    def broken():
        raise ValueError("no kernel")

    with pytest.raises(ValueError, match="no kernel"):
        prepared("fla", broken, 5)
    assert "fla: failed after" in capsys.readouterr().err


def test_a_library_that_swallows_every_exception_is_ended(capsys):
    start = time.perf_counter()

    def tuning():
        while time.perf_counter() - start < 20:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    with pytest.raises(TimeoutError, match=r"more than 0\.2 s"):
        prepared("fla", tuning, 0.2)
    assert time.perf_counter() - start < 10
    assert "fla: over its limit after 0." in capsys.readouterr().err


def test_a_compiler_that_hangs_is_ended():
    hangs = [sys.executable, "-c", "import time; time.sleep(30)"]
    start = time.perf_counter()
    with pytest.raises(TimeoutError):
        prepared("nvcc", lambda: subprocess.run(hangs, check=True), 0.3)
    assert time.perf_counter() - start < 20


def test_what_a_compiler_started_is_ended_too(tmp_path):
    """A build tool is killed by subprocess.run, and the compilers that it called are its own."""
    noted = tmp_path / "pid"
    write = f"pathlib.Path({str(noted)!r}).write_text(str(os.getpid()))"
    compiler = f"import os, pathlib, time; {write}; time.sleep(60)"
    tool = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {compiler!r}])"
    with pytest.raises(TimeoutError):
        prepared("ninja", lambda: subprocess.run([sys.executable, "-c", tool], check=True), 5.0)
    pid = int(noted.read_text())
    end = time.monotonic() + 10
    while pathlib.Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        assert not pathlib.Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("limit", [None, 5.0])
def test_what_hangs_shows_where_until_it_ends(monkeypatch, capsys, limit):
    monkeypatch.setattr(preparing, "STACKS_S", 0.01)
    unwound = 0

    def compile_deeply(depth=40):
        nonlocal unwound
        if depth:
            compile_deeply(depth - 1)
        else:
            time.sleep(1e-4)
        unwound += 1

    def hanging():
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:
            compile_deeply()

    prepared("x", hanging, limit)
    shown = capsys.readouterr().err
    assert unwound > 100
    assert shown.count(", in hanging") > 5
    assert "in print_stacks" not in shown
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_no_alarm_comes_after_the_end():
    assert prepared("fast", lambda: 1, 0.2) == 1
    time.sleep(0.4)


@pytest.mark.parametrize("alarms", [60, pytest.param(600, marks=pytest.mark.long)])
def test_an_alarm_at_any_instruction_is_a_time_out(alarms):
    ended = 0
    for n in range(alarms):
        try:
            prepared("x", lambda: time.sleep(1e-5), 1e-5 + n * 2e-4 / alarms)
        except TimeoutError:
            ended += 1
    assert 0 < ended < alarms


def test_without_a_limit_any_thread_prepares():
    result = []
    thread = threading.Thread(target=lambda: result.append(prepared("x", lambda: 1)))
    thread.start()
    thread.join()
    assert result == [1]
