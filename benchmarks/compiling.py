"""Call contestants once, in many processes, so that a run that times them compiles nothing."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import torch
from attn_core.measure.compiling import MOST_PROCESSES, in_turns, leave_cores

from benchmarks.cases import Case, build
from benchmarks.contestant import Contestant


class Field(NamedTuple):
    """Who is measured, for another process: make(*arguments) returns ours and then the peers."""

    make: Callable[..., Sequence[Contestant]]
    arguments: tuple[str, ...]


class Job(NamedTuple):
    """A call. name: of a contestant. library: jobs that have it in common wait for one compiler."""

    case: Case
    name: str
    library: object


def jobs_of(cases: Sequence[Case], contestants: Sequence[Contestant]) -> list[Job]:
    """Return what has to be called, what other projects compile first: it takes longest.

    Ours and PyTorch's compile for sizes: each case. Other kernels are the same for all sizes: the
    smallest case of each kind.
    """
    ours, *peers = contestants
    kinds: dict[object, Job] = {}
    each = []
    for case in sorted(cases, key=lambda c: c.bytes):
        module = case.head_dim, case.v_head_dim, case.kv_dtype, case.tree, case.queries is None
        for one in peers:
            if case.phase not in one.phases or not one.available() or one.refuses(case):
                continue
            if one.module == "torch":
                each.append(Job(case, one.name, case))
            else:
                job = Job(case, one.name, (one.name, *module))
                kinds.setdefault((job.library, case.phase, case.q_heads, case.page_size), job)
    return [*kinds.values(), *each, *(Job(case, ours.name, case) for case in cases)]


def compile_kernels(
    cases: Sequence[Case], field: Field, device: torch.device, say: Callable[[str], None]
) -> None:
    """Call everyone once. What one raises is not said here: the run that times it does.

    What does not fit the device's memory beside others is compiled when it is timed.
    """
    jobs = jobs_of(cases, field.make(*field.arguments))
    count = min(MOST_PROCESSES, os.cpu_count() or 1, len(jobs))
    context, others = multiprocessing.get_context("spawn"), {*multiprocessing.active_children()}
    with concurrent.futures.ProcessPoolExecutor(count, context, leave_cores) as pool:
        called = in_turns(
            jobs, lambda job: pool.submit(_call, job, field, device), lambda job: job.library
        )
        try:
            for done, _ in enumerate(called, 1):
                say(f"compiled: {done} of {len(jobs)} calls")
            # a library's thread may hold a process at its end, and what was compiled is written
            for process in {*multiprocessing.active_children()} - others:
                process.kill()
        except BrokenProcessPool as broken:
            say(f"a process that compiles ended: {broken}; the rest is compiled when it is timed")


@functools.cache
def _by_name(field: Field) -> dict[str, Contestant]:
    return {one.name: one for one in field.make(*field.arguments)}


@torch.no_grad()
def _call(job: Job, field: Field, device: torch.device) -> None:
    with contextlib.suppress(Exception):  # another project's code may raise anything
        _by_name(field)[job.name].prepare(build(job.case, device))()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # a broken context
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
