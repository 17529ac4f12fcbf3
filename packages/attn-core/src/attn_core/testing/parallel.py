"""Run a backend's checks in several processes, because compiling dominates the time on a GPU."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import torch

from attn_core.plugins.registry import load_plugins
from attn_core.spec.capabilities import BackendSpec
from attn_core.spec.device import Device
from attn_core.spec.kinds import Family, Kind
from attn_core.testing.plan import KINDS, PlannedCheck, plan
from attn_core.testing.runner import Outcome, Status, run_all, torch_device
from attn_core.testing.tolerance import Measure


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """What a process needs to plan the same checks again: a plan itself holds functions."""

    backend: str
    device: Device
    family: Family = "softmax"
    kinds: tuple[Kind, ...] = KINDS
    reduced: bool = False

    def plan(self) -> tuple[BackendSpec, list[PlannedCheck]]:
        """Plan the checks of the installed backend of this name."""
        registry = load_plugins()
        spec, libraries = registry.get(self.backend, self.family), registry.installed_libraries()
        return spec, plan(spec, self.device, libraries, kinds=self.kinds, reduced=self.reduced)


def run_parallel(
    options: SuiteOptions, jobs: int, step: Callable[[PlannedCheck], None]
) -> list[Outcome]:
    """Run every check that has a row in `jobs` processes; `step` is called after each.

    The checks are those of `options.plan()`, in its order. A check whose process dies, as with a
    fault in a kernel that its driver does not survive, has failed; the next gets a new process.
    """
    _, planned = options.plan()
    outcomes = [Outcome(planned=p, status="skipped", detail=p.reason) for p in planned]
    workers = [_Worker(options) for _ in range(jobs)]
    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)
    memory = threading.Lock()

    def run(i: int) -> Answer:
        with memory if planned[i].check.alone else contextlib.nullcontext():
            worker = free.get()
            try:
                return worker.run(i, planned[i].check.id)
            finally:
                free.put(worker)

    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run, i): i for i, p in enumerate(planned) if p.row is not None}
        try:
            for completed in as_completed(futures):
                i = futures[completed]
                status, measure, detail = completed.result()
                outcomes[i] = Outcome(
                    planned=planned[i], status=status, measure=measure, detail=detail
                )
                step(planned[i])
        finally:
            for future in futures:
                future.cancel()
            for worker in workers:
                worker.end()
    return outcomes


Answer = tuple[Status, Measure, str]


class _Worker:
    """A process that runs one check after another, started anew where it has died."""

    def __init__(self, options: SuiteOptions) -> None:
        self._options = options
        self._process: SpawnProcess | None = None
        self._connection: Connection[int, Answer] | None = None

    def run(self, index: int, name: str) -> Answer:
        """Run the check of this index in the process."""
        if self._process is None or self._connection is None:
            context = multiprocessing.get_context("spawn")  # a device does not survive a fork
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(self._options, theirs))
            self._process.start()
            theirs.close()
        try:
            self._connection.send(index)
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            self._process = None
            ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return "failed", Measure(), f"{name}: the process that ran it died ({ending})"

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.terminate()
            self._process.join()


def _serve(options: SuiteOptions, connection: Connection[Answer, int]) -> None:
    torch.set_num_threads(1)  # the processes share the cores
    with contextlib.suppress(EOFError):  # the process that asks has ended
        while True:
            connection.send(_run(options, connection.recv()))


_planned = functools.cache(SuiteOptions.plan)


def _run(options: SuiteOptions, index: int) -> Answer:
    spec, planned = _planned(options)
    device, arch = torch_device(options.device), options.device.arch
    [outcome] = run_all([planned[index]], spec, device, arch=arch)
    return outcome.status, outcome.measure, outcome.detail
