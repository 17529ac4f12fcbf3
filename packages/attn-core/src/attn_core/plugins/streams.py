"""Keep standard output for the command: redirect what plugins print to standard error."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

OUT, ERR = 1, 2  # file descriptors


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error: Python's, the file descriptor's and C's.

    A plugin, a compiler that it starts or a C library may write to any of the three.
    """
    with contextlib.redirect_stdout(sys.stderr):
        try:
            saved = os.dup(OUT)
        except OSError:  # it is closed: nobody can write there
            yield
            return
        _flush()
        try:
            _redirect_stdout(ERR)
            yield
        finally:
            _flush()
            os.dup2(saved, OUT)
            os.close(saved)


def _redirect_stdout(target: int) -> None:
    try:
        os.dup2(target, OUT)
    except OSError:  # standard error is closed
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), OUT)


def _flush() -> None:
    """Write out what Python and the C library still hold back for standard output."""
    if sys.__stdout__ is not None:
        with contextlib.suppress(OSError, ValueError):  # full or closed: the command will say so
            sys.__stdout__.flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no such library on Windows
        ctypes.CDLL(None).fflush(None)
