"""Compile what a tuning will call before its clock starts, in many processes at once."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any, TypeVar

import torch

from attn_core.costs.profile import Profile
from attn_core.measure.candidates import Job
from attn_core.measure.inputs import build, bytes_of
from attn_core.measure.prepare import prepare
from attn_core.measure.session import known_in, memory, release, series
from attn_core.measure.spent import Spent
from attn_core.measure.spread import work

# Passes of each series, from the least work to the most: a GPU's kernels are chosen by size
SIZES, SIZES_OF_CPU = 24, 1
MOST_PROCESSES = 32
OF_CORES = 4  # a compiler of one library takes a fourth of the cores: several run at a time
_T = TypeVar("_T")


def calls(jobs: Sequence[Job], known: Profile, most_bytes: float, sizes: int = SIZES) -> list[Job]:
    """Return what has to be called once, a candidate each, so that all kernels are compiled.

    These are passes of at most `most_bytes` of each form and kind of pass that `known` lacks. First
    is one for each library, head dim and phase: later ones would wait for the same kernels.
    """
    kinds: dict[object, list[Job]] = {}
    for job in jobs:
        for candidate in job.candidates:
            if not known_in(known, job, candidate) and bytes_of(job.form, job.size) <= most_bytes:
                kinds.setdefault(series(job, candidate), []).append(
                    replace(job, candidates=(candidate,))
                )
    result: list[Job] = []
    for group in kinds.values():
        group.sort(key=lambda job: work(job.form, job.size))
        last = len(group) - 1
        result += [group[i] for i in sorted({k * last // max(1, sizes - 1) for k in range(sizes)})]
    counts: Counter[object] = Counter()
    turns = []
    for job in result:
        turns.append(counts[_library(job)])
        counts[_library(job)] += 1
    return [result[i] for i in sorted(range(len(result)), key=turns.__getitem__)]


def compile_kernels(
    jobs: Sequence[Job],
    known: Profile,
    device: torch.device,
    *,
    arch: str | None,
    step: Callable[[int, int], None] = lambda done, total: None,
    sizes: int = SIZES,
) -> str:
    """Call what a session would call, so that its kernels are in the caches of their libraries.

    step(calls done, all calls). sizes: of each kind of pass, on a GPU. Returns "" or why some are
    not compiled; what a backend raises is not said here, as the session finds it again. On a CPU
    all calls are made in this process.
    """
    cpu = device.type == "cpu"
    processes = 1 if cpu else min(MOST_PROCESSES, cores())
    share = 2 * memory(device) / processes  # half of a GPU's free memory: one shape takes a fourth
    listed = calls(jobs, known, share, SIZES_OF_CPU if cpu else sizes)
    try:
        for done, _ in enumerate(_called(listed, device, arch, processes), 1):
            step(done, len(listed))
    except BrokenProcessPool as broken:
        return f"a process that compiles ended: {broken}; the rest is compiled when it is measured"
    return ""


def _called(
    listed: Sequence[Job], device: torch.device, arch: str | None, processes: int
) -> Iterator[None]:
    if processes == 1 or len(listed) < 2:
        for job in listed:
            call_once(job, device, arch)
            yield
        return
    context = multiprocessing.get_context("spawn")
    count = min(processes, len(listed))
    with concurrent.futures.ProcessPoolExecutor(count, context, leave_cores) as pool:
        try:
            yield from in_turns(listed, lambda job: pool.submit(call_once, job, device, arch))
        except BaseException:  # a run that is ended compiles nothing further
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _library(job: Job) -> object:
    """Return what jobs have in common that are likely to need the same kernels."""
    form, size = job.form, job.size
    name = job.candidates[0].spec.name
    return name, form.kind, form.head_dim, form.store, size.phase, size.tree


def in_turns(
    listed: Sequence[_T],
    submit: Callable[[_T], Future[None]],
    library: Callable[[Any], object] = _library,
) -> Iterator[None]:
    """Submit every job; the first of each library alone, the others of it when that is done.

    They would wait for the same compiler, and processes that wait compile nothing else.
    """
    waiting: dict[object, list[_T]] = {}
    for job in listed:
        waiting.setdefault(library(job), []).append(job)
    running = {submit(jobs.pop(0)): name for name, jobs in waiting.items()}
    while running:
        done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            for job in waiting.pop(running.pop(future), []):
                running[submit(job)] = None
            yield future.result()


def cores() -> int:
    """Return the cores that this process may use: two runs may have half of a machine each."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def leave_cores() -> None:
    """Leave cores to the other processes' compilers: ninja's callers', and torch's own."""
    os.environ.setdefault("MAX_JOBS", str(max(1, cores() // OF_CORES)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(1)


def call_once(job: Job, device: torch.device, arch: str | None) -> None:
    """Prepare a pass and call it once; a failure is the session's to find."""
    try:
        with torch.no_grad():
            prepare(job.candidates[0], build(job.form, job.size, device), arch, Spent()).call()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
    except Exception:  # a plugin's code: the session says what it raises
        return
    finally:
        release(device)
