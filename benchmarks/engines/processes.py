"""Processes that time engines: started ahead, killed with their children, their errors recorded."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.engines import record
from benchmarks.engines.configurations import Case

LINE = 300  # characters of an error that are kept
ERROR = re.compile(r"(?:^|[\s.])(\w*(?:Error|Exception|Interrupt)\b(?:: .*)?)$")
# what processes say of one another, after the one that failed has said why
CONSEQUENCES = ("scheduler died", "Initialization failed", "EOFError", "leaked", "KeyboardInter")


class Spare:
    """A process that has imported the engine already; it waits for its arguments.

    An engine takes long to import. The next process does so while the last one runs.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, process_group=0)

    def run(self, arguments: Sequence[str], log: pathlib.Path, limit_s: float) -> int | None:
        """Run a process: its exit code, None where it was stopped after limit_s seconds.

        log: what it prints. Its children end with it: schedulers outlive a crash.
        """
        process = self.start(arguments, log)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill(process)

    def start(self, arguments: Sequence[str], log: pathlib.Path) -> subprocess.Popen[bytes]:
        """Give the process that waits its arguments and return it; the next one imports."""
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        process, self._process = self._process, self._started()
        message = json.dumps({"arguments": list(arguments), "log": str(log)})
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(message.encode() + b"\n")
        return process

    def stop(self) -> None:
        """End the process that waits."""
        kill(self._process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_error(text: str) -> str:
    """Return the last error of a log that says why, else its last line."""
    printed = _lines(text)
    errors = [result[1] for line in printed if (result := ERROR.search(line))]
    causes = [error for error in errors if not any(word in error for word in CONSEQUENCES)]
    return (causes or errors or printed or ["it printed nothing"])[-1][:LINE]


def stopped(text: str) -> str:
    """Say that a process had no time left, and by its log what it was doing."""
    return f"stopped, no seconds left; it was at: {(_lines(text) or ['nothing'])[-1][:LINE]}"


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What holds for all processes. end: of the monotonic clock; limit_s: of one process."""

    end: float
    limit_s: float
    again: bool
    logs: pathlib.Path
    versions: Mapping[str, str | None]
    cases: Sequence[str] = ()
    costs: Sequence[str] = ()  # arguments of benchmarks.engines.steps


def note_error(
    path: pathlib.Path,
    configuration: str,
    cases: Iterable[Case],
    backend: str,
    number: int,
    error: str,
    versions: Mapping[str, str | None],
) -> None:
    """Record for cases of one round of a backend why they have no time."""
    for case in cases:
        row = {
            "backend": backend,
            "case": case.name,
            "round": number,
            "error": error,
            "date": datetime.date.today().isoformat(),
            "versions": versions,
        }
        record.merge(path, row, configuration=configuration)
