"""Run the checks of a backend in several processes: compiling is what takes the time on a GPU."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from attn_core.capabilities import BackendSpec, Device, Kind
from attn_core.plugins import load_plugins
from attn_core.testing.budget import Measure
from attn_core.testing.plan import KINDS, Planned, plan
from attn_core.testing.runner import Outcome, Status, run_all, torch_device


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a process needs to plan the same checks again: a plan itself holds functions."""

    backend: str
    device: Device
    kinds: tuple[Kind, ...] = KINDS
    reduced: bool = False

    def plan(self) -> tuple[BackendSpec, list[Planned]]:
        """Plan the checks of the installed backend of this name."""
        registry = load_plugins()
        spec, libraries = registry.get(self.backend), registry.installed_libraries()
        return spec, plan(spec, self.device, libraries, kinds=self.kinds, reduced=self.reduced)


def run_parallel(asked: Asked, jobs: int, step: Callable[[Planned], None]) -> list[Outcome]:
    """Run every check that has a row in `jobs` processes; `step` is called after each.

    The checks are those of `asked.plan()`, in its order. Raises BrokenProcessPool where a process
    dies, as with a fault in a kernel that its driver does not survive.
    """
    _, planned = asked.plan()
    outcomes = [Outcome(planned=p, status="skipped", detail=p.reason) for p in planned]
    context = multiprocessing.get_context("spawn")  # a device does not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread) as pool:
        ran = {pool.submit(_run, asked, i): i for i, p in enumerate(planned) if p.row is not None}
        for done in as_completed(ran):
            i = ran[done]
            status, measure, detail = done.result()
            outcomes[i] = Outcome(planned=planned[i], status=status, measure=measure, detail=detail)
            step(planned[i])
    return outcomes


def _one_thread() -> None:
    torch.set_num_threads(1)  # the processes share the cores


_planned = functools.cache(Asked.plan)


def _run(asked: Asked, index: int) -> tuple[Status, Measure, str]:
    spec, planned = _planned(asked)
    on, arch = torch_device(asked.device), asked.device.arch
    [outcome] = run_all([planned[index]], spec, on, arch=arch)
    return outcome.status, outcome.measure, outcome.detail
