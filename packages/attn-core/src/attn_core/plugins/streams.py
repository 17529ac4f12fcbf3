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
            kept = os.dup(OUT)
        except OSError:  # it is closed: nobody can write there
            yield
            return
        _flush()
        try:
            _point_out_at(ERR)
            yield
        finally:
            _flush()
            os.dup2(kept, OUT)
            os.close(kept)


def _point_out_at(target: int) -> None:
    try:
        os.dup2(target, OUT)
    except OSError:  # standard error is closed
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), OUT)


def _flush() -> None:
    """Write out what Python and the C library still hold back for standard output."""
    if sys.__stdout__ is not None:
        with contextlib.suppress(OSError, ValueError):  # full or closed: the command will say so
            sys.__stdout__.flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no such library on Windows
        ctypes.CDLL(None).fflush(None)
