"""Probe rows in a process of their own, so that a crash or a hang is an answer."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import IO

from attn_core.costs.shapes import row_key
from attn_core.errors import BackendError
from attn_core.formatting import printable
from attn_core.plugins.registry import Registry, RowName
from attn_core.selection.compatibility import mismatches
from attn_core.spec.capabilities import BackendSpec
from attn_core.spec.device import Device
from attn_core.spec.kinds import Phase
from attn_core.spec.requirements import Requirements

SECONDS = 120.0
START_SECONDS = 300.0  # imports torch and all plugins
HERE = ("device", "runtime", "library")  # what decides whether a row can run on this machine


@dataclass(frozen=True)
class Target:
    """A row to probe: `index` is its place in the rows of its backend."""

    spec: BackendSpec
    index: int

    @property
    def name(self) -> RowName:
        return self.spec.family, self.spec.name, row_key(self.spec.capabilities[self.index])


@dataclass(frozen=True)
class Probed:
    """What became of a target. failed: why, "" where it passed. unknown: why it was not probed."""

    target: Target
    failed: str = ""
    unknown: str = ""


def targets(registry: Registry, device: Device) -> list[Target]:
    """List every implemented row that can run on this machine."""
    libraries, no_layers = registry.installed_libraries(), Requirements(layers=())
    return [
        Target(spec, i)
        for _, spec in sorted(registry.backends.items())
        for i, row in enumerate(spec.capabilities)
        if spec.creator(row)
        and not any(
            mismatch.need in HERE
            for mismatch in mismatches(row, no_layers, device, libraries, Phase.PREFILL)
        )
    ]


def probe(pending: Iterable[Target], device: Device, seconds: float = SECONDS) -> Iterator[Probed]:
    """Run small passes on each row, and yield what became of it.

    Rows share a process until one fails: its device context may be lost. seconds: the most that one
    row may take. Raises BackendError if the process cannot start.
    """
    remaining = list(pending)
    while remaining:
        for probed in _shared(remaining, device, seconds):
            yield probed
        remaining = remaining[remaining.index(probed.target) + 1 :]


def _shared(remaining: list[Target], device: Device, seconds: float) -> Iterator[Probed]:
    """Probe rows in one new process, up to and with the first that fails: at least one."""
    request = {
        "device": asdict(device),
        "rows": [[t.spec.family, t.spec.name, t.index] for t in remaining],
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "attn_core.testing.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,  # compilers that it starts end with it
        )
        lines: queue.Queue[str] = queue.Queue()
        assert process.stdin is not None
        assert process.stdout is not None
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it died: the end of its output says so
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()  # it stays open: its end tells the process that we died
            try:
                started = lines.get(timeout=START_SECONDS) != ""
            except queue.Empty:
                started = False
            if not started:
                raise BackendError(
                    f"the process of the probes cannot start: {_end(process, stderr)}"
                )
            for target in remaining:
                try:
                    line = lines.get(timeout=seconds)
                except queue.Empty:
                    yield Probed(target, failed=f"no answer within {seconds:g} s")
                    return
                if not line:
                    yield Probed(target, failed=_end(process, stderr))
                    return
                probed = Probed(target, **json.loads(line))
                yield probed
                if probed.failed:
                    return
        finally:
            _kill(process)


def _read(stream: IO[str], lines: queue.Queue[str]) -> None:
    """Hand lines on; an empty one is the end."""
    for line in stream:
        lines.put(line)
    lines.put("")


def _end(process: subprocess.Popen[str], stderr: IO[str]) -> str:
    """Say how a process ended, with the last line that it wrote."""
    try:
        code = process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        return "its process closed its output and did not end"
    if code < 0:
        try:
            return f"its process was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"its process was killed by signal {-code}"
    stderr.seek(0)
    last = next((x.strip() for x in reversed(stderr.readlines()[-50:]) if x.strip()), "")
    ending = f"its process ended with exit code {code}"
    return f"{ending}: {printable(last, 300)}" if last else ending


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
