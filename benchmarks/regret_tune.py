"""Tune for the forms of the shapes that are judged, as `attn tune` does, for so many seconds."""

from __future__ import annotations

import argparse
import itertools
import pathlib
import time
from collections.abc import Mapping, Sequence

import torch
from attn_core.cli import measurement
from attn_core.costs import store
from attn_core.costs.profile import Profile
from attn_core.costs.workload import Workload
from attn_core.errors import UsageError
from attn_core.measure.candidates import Job, jobs
from attn_core.measure.compiling import compile_kernels
from attn_core.measure.session import session
from attn_core.measure.spent import Spent
from attn_core.plugins.dependencies import Libraries
from attn_core.plugins.registry import Registry
from attn_core.selection.result import Overrides
from attn_core.spec.device import Device

from benchmarks.cases import Case
from benchmarks.ours import needs_of
from benchmarks.regret_shapes import form_of, pass_of

# One chunk and one batch: the passes that are spread are what is tuned
WORKLOAD = Workload(prompts={2048: 1}, requests={16: 1}, cached=0.9)
KEEP_S = 5.0  # between writes of what was measured


def tuning_jobs(
    cases: Sequence[Case], registry: Registry, device: Device, libraries: Libraries,
    backends: Sequence[str],
) -> list[Job]:  # fmt: skip
    """List what `attn tune` measures for the layers, pages and drafts of these cases, in turns.

    An engine knows these when it starts. Requests and lengths of a case it does not know: none of
    the passes that are judged is in the list.
    """
    own = {(form_of(case), pass_of(case)) for case in cases}
    kinds = {(needs_of(c), pass_of(c).phase): None for c in cases}
    series = []
    for needs, phase in kinds:
        listed = jobs(needs, device, registry, libraries, Overrides(allow=(*backends,)), WORKLOAD)
        series.append([job for job in listed if job.size.phase == phase])
    turns = itertools.chain.from_iterable(itertools.zip_longest(*series))
    result = {(job.form, job.size): job for job in turns if job is not None}
    return [job for key, job in result.items() if key not in own]


def part_of(text: str) -> tuple[int, int]:
    """Return which part of how many, as `attn tune --part` takes it, for argparse."""
    try:
        return measurement.part_of(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def compiled(
    todo: Sequence[Job], known: Profile, device: torch.device, arch: str | None, sizes: int
) -> int:  # fmt: skip
    """Compile what tuning and judging call, and say every few seconds how far that is."""
    begin = printed_at = time.monotonic()

    def step(done: int, total: int) -> None:
        nonlocal printed_at
        if (now := time.monotonic()) > printed_at + KEEP_S or done == total:
            print(f"{done} of {total} calls, {now - begin:.0f} s", flush=True)
            printed_at = now

    print(
        compile_kernels(todo, known, device, arch=arch, step=step, sizes=sizes) or "compiled",
        flush=True,
    )
    return 0


def tuned(
    todo: Sequence[Job], known: Profile, env: Mapping[str, str], device: torch.device,
    arch: str | None, seconds: float, path: pathlib.Path,
) -> Profile:  # fmt: skip
    """Measure a profile and keep it in `path`, what is measured so far every five seconds.

    Other processes may measure other jobs into the same file: it then holds what they found too.
    """
    new, written, begin = Profile(), time.monotonic(), time.monotonic()
    spent, passes = Spent(), 0

    def say(how: str) -> None:
        took = time.monotonic() - begin
        done = f"{passes} of {len(todo)} passes"
        print(f"{how} for {took:.0f} s: {len(known.costs)} points, {done}; {spent}", flush=True)

    try:
        for step in session(todo, known, env, device, arch=arch, minutes=seconds / 60):
            spent.add(step.spent)
            passes += bool(step.profile.costs)
            new = new.merged(step.profile)
            if time.monotonic() > written + KEEP_S and (new.costs or new.bad):
                known, new, written = store.write(path, new), Profile(), time.monotonic()
                say("tuning")
    finally:
        if new.costs or new.bad:
            known = store.write(path, new)
        say("tuned")
    return known
