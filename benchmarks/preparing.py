"""Preparing a contestant: say when it begins and ends, end what takes too long, wait for a turn."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import pathlib
import signal
import sys
import time
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

    limit_s: seconds, or None. Raises TimeoutError where it takes longer. What does not come back to
    Python is not ended; every 60 seconds the stacks that it hangs in go to stderr. A limit needs
    the main thread.
    """

    armed = True  # another thread may take the signal, and its handler then runs here later

    def over(number: int, frame: FrameType | None) -> None:
        if armed:
            raise _OverLimit

    say(f"{name}: preparing")
    start, ended = time.perf_counter(), "failed after"
    before = None if limit_s is None else signal.signal(signal.SIGALRM, over)
    faulthandler.dump_traceback_later(STACKS_S, repeat=True, file=sys.__stderr__ or 2)
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
        raise TimeoutError(f"preparing took more than {limit_s:g} s (--prepare-limit)") from None
    finally:
        if limit_s is not None:
            signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()
        say(f"{name}: {ended} {time.perf_counter() - start:.1f} s")


def say(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def turn(file: pathlib.Path | None) -> Iterator[None]:
    """Hold the lock of a file, if one is named: the device is this run's alone meanwhile."""
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
