"""Measure shapes one after the other, each backend checked before it is timed."""

from __future__ import annotations

import datetime
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_core.costs.profile import MOST_TEXT, Cost, Key, Profile
from attn_core.costs.shapes import Form, Pass, plain
from attn_core.errors import BackendRunError
from attn_core.measure.candidates import Candidate, Job
from attn_core.measure.inputs import build, bytes_of
from attn_core.measure.prepare import Prepared, checked
from attn_core.measure.spent import ALL, Spent
from attn_core.measure.spread import work
from attn_core.measure.timing import clock_of, least, measure
from attn_core.testing.tolerance import CheckFailed

SECONDS = 0.1  # of the rounds of one shape: more shapes tell more than more rounds
PART_OF_MEMORY = 0.25  # of a GPU's free memory, that one shape may take
KEPT = 0.3  # of a GPU's memory: a process that keeps more gives back what shapes left
HOST_BYTES = 4 << 30
# So many passes of a kind in a row in which a backend took FAR times the fastest, was wrong or
# failed: it is out there
HOPELESS, FAR = 6, 3.0
SPENT, LONGER = "the time is spent", "they would take longer than the time that is left"

Series = tuple[str, str, Form, str, int, bool]  # backend, row, form and kind of pass
Kinds = dict[tuple[str, str, Form, str, bool], int]  # with forms of any heads, dims, pages: passes
Most = dict[tuple[str, str], tuple[float, float]]  # backend and row: the most work, and its µs


@dataclass(frozen=True)
class Step:
    """What became of a job.

    profile: what it added. skipped: why it was not measured, or "". spent: what took how long.
    """

    job: Job
    profile: Profile
    skipped: str = ""
    spent: Spent = field(default_factory=Spent)


def session(
    todo: Sequence[Job],
    known: Profile,
    environment: Mapping[str, str],
    device: torch.device,
    *,
    arch: str | None,
    minutes: float,
    begin: Callable[[Job], None] = lambda job: None,
) -> Iterator[Step]:
    """Yield every job when it is done, with what was measured; done jobs of `known` are left out.

    minutes: no job begins after them, or if it would, by what was measured so far, not end in time.
    What compiles in between is not counted.
    """
    end = time.monotonic() + 60 * minutes
    clock, seen = clock_of(device), known
    slow: Kinds = {}
    most: Most = {}
    _count(slow, most, known)
    for job in todo:
        rest = [c for c in job.candidates if slow.get(_kind(_key(job, c)), 0) < HOPELESS]
        candidates = [c for c in rest if not known_in(seen, job, c)]
        if not candidates:
            continue
        if len(candidates) < len(rest):  # all of a shape again, so that they compare
            candidates = [c for c in rest if not _bad(seen, job, c)]
        begin(job)
        left = end - time.monotonic()
        if left <= 0:
            yield Step(job, Profile(), SPENT)
            continue
        if (need := bytes_of(job.form, job.size)) > memory(device):
            yield Step(job, Profile(), f"it takes {need / 1e9:.1f} GB")
            continue
        able = [c for c in candidates if _predicted(most, job, c) * 4 < left]
        if not able:
            yield Step(job, Profile(), LONGER)
            continue
        seconds = min(SECONDS, left)
        costs, bad, spent = run(job.form, job.size, able, device, clock, seconds, arch=arch)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        part = Profile(environment=environment, costs=costs, bad=bad, date=now)
        seen = seen.merged(part)
        end += spent.compiling
        _count(slow, most, part)
        yield Step(job, part, spent=spent)


def run(
    form: Form,
    size: Pass,
    candidates: Sequence[Candidate],
    device: torch.device,
    clock: Any,
    seconds: float,
    *,
    arch: str | None,
) -> tuple[dict[Key, Cost], dict[Key, str], Spent]:
    """Check every candidate on one shape and time those that are right, in turns.

    Where their outputs differ most, all are compared with the oracle. Returns the times, who failed
    and why, and what took how long.
    """
    spent = Spent()
    with spent.on(ALL, "inputs"):
        inputs = build(form, size, device)
    named = {Key(c.spec.name, c.digest, form, size): c for c in candidates}
    passes, bad = dict[Key, Prepared](), dict[Key, str]()
    with torch.no_grad():
        for key, c in named.items():
            with _noting(bad, key, c, device):
                passes[key] = checked(c, inputs, arch, spent)
        with spent.on(ALL, "compare"):
            rows = inputs.disputed()
            for key in passes if rows else ():
                with _noting(bad, key, named[key], device):
                    inputs.check_rows(passes[key].call(), rows, rounds=named[key].rounds(form))
        passes = {key: x for key, x in passes.items() if key not in bad}
        names = {str(i): key for i, key in enumerate(passes)}
        with spent.on(ALL, "rounds"):
            timed = measure({i: passes[key].call for i, key in names.items()}, clock, seconds)
        with spent.on(ALL, "plans"):
            plans = dict[Key, float]()
            for key in passes:
                with _noting(bad, key, named[key], device):
                    plans[key] = least(passes[key].plan, clock)
    pool = weakref.ref(inputs.pool)
    del inputs, passes
    with spent.on(ALL, "release"):
        release(device, held=pool() is not None)
    costs = {key: timed[i]._replace(plan_us=plans[key]) for i, key in names.items() if key in plans}
    return costs, bad, spent


@contextmanager
def _noting(
    bad: dict[Key, str], key: Key, candidate: Candidate, device: torch.device
) -> Iterator[None]:
    """Note why a candidate failed, if it does; raise where it left the device unusable."""
    try:
        yield
    except CheckFailed as failure:
        bad[key] = _short(f"wrong: {failure}")
    except Exception as error:  # a plugin's code: what it raises is the finding
        bad[key] = _short(f"{type(error).__name__}: {error}")
        _usable(device, candidate, error)


def series(job: Job, candidate: Candidate) -> Series:
    """Return which passes of a candidate are of one kind."""
    size = job.size
    kind = (job.form, size.phase, size.drafts, size.tree)
    return (candidate.spec.name, candidate.digest, *kind)


def _kind(key: Key) -> tuple[str, str, Form, str, bool]:
    return key.backend, key.row, plain(key.form), key.size.phase, key.size.tree


def _count(slow: Kinds, most: Most, profile: Profile) -> None:
    """Count for each backend the last passes of a kind in which it was far slower, and its work."""
    costs, best = profile.costs, dict[tuple[Form, Pass], float]()
    for key, cost in costs.items():
        best[key.form, key.size] = min(cost.us, best.get((key.form, key.size), cost.us))
    for key in profile.bad:
        slow[_kind(key)] = slow.get(_kind(key), 0) + 1
    for key, cost in costs.items():
        far = cost.us > FAR * best[key.form, key.size]
        slow[_kind(key)] = slow.get(_kind(key), 0) + 1 if far else 0
        done = work(key.form, key.size), cost.us
        most[key[:2]] = max(done, most.get(key[:2], done))


def known_in(profile: Profile, job: Job, candidate: Candidate) -> bool:
    """Say whether a profile has a candidate's time of a job, or why it has none."""
    key = _key(job, candidate)
    return key in profile.costs or key in profile.bad


def _bad(profile: Profile, job: Job, candidate: Candidate) -> bool:
    return _key(job, candidate) in profile.bad


def _key(job: Job, candidate: Candidate) -> Key:
    return Key(candidate.spec.name, candidate.digest, job.form, job.size)


def _predicted(most: Most, job: Job, candidate: Candidate) -> float:
    """Return the seconds of a call, by the most work of this row that was measured; 0: unknown."""
    if (name := (candidate.spec.name, candidate.digest)) not in most:
        return 0.0
    done, us = most[name]
    return us / 1e6 * max(1.0, work(job.form, job.size) / done)


def memory(device: torch.device) -> float:
    """Return the bytes that one shape may take."""
    if device.type == "cuda":
        return PART_OF_MEMORY * torch.cuda.mem_get_info(device)[0]
    return HOST_BYTES


def release(device: torch.device, *, held: bool = True) -> None:
    """Give back the memory of a shape: on a GPU only where this process keeps much of it.

    held: something still refers to the shape, so that what is unused has to be found. Finding and
    allocating again take longer than measuring a small shape.
    """
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        if torch.cuda.memory_reserved(device) < KEPT * whole:
            return
    if held:
        gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _usable(device: torch.device, candidate: Candidate, error: Exception) -> None:
    """Raise BackendRunError where a failed call left the device unusable for this process."""
    if device.type == "cpu":
        return
    try:
        torch.accelerator.synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError as broken:
        raise BackendRunError(
            f"{candidate.spec.name} left {device} unusable: {error}; what was measured is kept, "
            f"run again with --deny {candidate.spec.name}"
        ) from broken


def _short(text: str) -> str:
    return " ".join(text.split())[:MOST_TEXT]
