"""Preparing a contestant: say when it begins and ends, end what takes too long, wait for a turn."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

import torch

_T = TypeVar("_T")
STACKS_S = 60.0  # of preparing, after which the stacks of all threads are printed, and again


class _OverLimit(BaseException):  # no Exception: libraries swallow those
    """The alarm of a limit went off."""


def prepared(name: str, prepare: Callable[[], _T], limit_s: float | None = None) -> _T:
    """Return what `prepare` returns; stderr says that it begins, and after how long it ended.

    limit_s: seconds, or None. Raises TimeoutError where it takes longer; compilers that it started
    are killed. What does not come back to Python is not ended; every 60 seconds the stacks that it
    hangs in go to stderr. A limit needs the main thread.
    """

    armed = True  # another thread may take the signal, and its handler then runs here later
    others: set[int] = set()
    started: set[int] = set()

    def over(number: int, frame: FrameType | None) -> None:
        if armed:
            started.update(children() - others)  # what a killed tool has called is nobody's then
            raise _OverLimit

    say(f"{name}: preparing")
    start, ended = time.perf_counter(), "failed after"
    before = None if limit_s is None else signal.signal(signal.SIGALRM, over)
    others.update(children() if limit_s else ())
    done = threading.Event()
    watcher = threading.Thread(target=print_stacks, args=(done,), daemon=True)
    watcher.start()
    try:
        try:
            if limit_s is not None:
                signal.setitimer(signal.ITIMER_REAL, limit_s)
            result = prepare()
        finally:  # the alarm may come here, too: the outer `try` has it
            armed = False
            if limit_s is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
        ended = "prepared in"
        return result
    except _OverLimit:
        ended = "over its limit after"
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        raise TimeoutError(f"preparing took more than {limit_s:g} s (--prepare-limit)") from None
    finally:
        if limit_s is not None:
            signal.signal(signal.SIGALRM, before)
        done.set()
        watcher.join()
        say(f"{name}: {ended} {time.perf_counter() - start:.1f} s")


def print_stacks(done: threading.Event) -> None:
    """Print the stacks of all other threads to stderr every 60 seconds, until `done` is set.

    This thread holds the GIL while it reads them. faulthandler.dump_traceback_later does not, and
    it has crashed processes that compiled.
    """
    while not done.wait(STACKS_S):
        for thread, frame in sys._current_frames().items():
            if thread != threading.get_ident():
                say(f"thread {thread:#x}:\n{''.join(traceback.format_stack(frame))}")


def children() -> set[int]:
    """Return the processes below this one; none where there is no /proc."""
    below: dict[int, list[int]] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            below.setdefault(parent, []).append(int(stat.parent.name))
    result: set[int] = set()
    todo = [os.getpid()]
    while todo:
        own = below.get(todo.pop(), [])
        todo += [x for x in own if x not in result]
        result.update(own)
    return result


def say(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def turn(file: pathlib.Path | None) -> Iterator[None]:
    """Hold the lock of a file, if one is named: no other run times meanwhile; it may prepare."""
    if file is None:
        yield
        return
    with file.open("w") as opened:  # closing gives the lock back
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def usable(device: torch.device) -> bool:
    """Say whether the device still computes: a contestant may have left it unusable."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True
