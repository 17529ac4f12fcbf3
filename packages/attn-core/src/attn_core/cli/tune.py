"""`attn tune` and `attn bench`: measure what is installed here."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_core.cli.console import console, print_json, print_table, progress
from attn_core.cli.inputs import SHAPE, must_be_here, selection_inputs
from attn_core.cli.options import InputFlags, flag, takes
from attn_core.costs import store
from attn_core.costs.environment import environment
from attn_core.costs.profile import Profile
from attn_core.errors import UsageError
from attn_core.measure.spent import Spent
from attn_core.measure.usual import LAYER, usual_jobs
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.plugins.streams import stdout_to_stderr
from attn_core.selection.expected import micros
from attn_core.selection.inputs import SelectionInputs
from attn_core.selection.result import NoBackendError
from attn_core.spec.device import probe_device
from attn_core.spec.requirements import Requirements
from attn_core.tools.probes import probed

if TYPE_CHECKING:
    from attn_core.measure.session import Step

MOST_MINUTES = 24 * 60.0
KEEP_S = 2.0  # between writes of what was measured: each reads the whole file
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Model = Annotated[
    Path | None, typer.Argument(metavar="[MODEL]", help="Model directory or config.json.")
]
Minutes = Annotated[float, flag("--minutes", "No shape begins after this many minutes.", env=False)]


@takes(InputFlags)
def tune_command(
    flags: InputFlags,
    path: Model = None,
    minutes: Minutes = 10.0,
    quick: Annotated[
        bool, flag("--quick", "Only the workload's own passes, no grid around them.", env=False)
    ] = False,
    compile_only: Annotated[
        bool, flag("--compile-only", "Compile what would be called, measure nothing.", env=False)
    ] = False,
    compiled: Annotated[
        bool, flag("--compiled", "Begin at once: all is compiled on this machine.", env=False)
    ] = False,
    out: Annotated[
        Path | None,
        flag("--out", "Profile to write or to continue; default: this machine's own.", env=False),
    ] = None,
    json: Json = False,
) -> None:
    """Measure every backend that is installed here, and keep it as this machine's profile.

    Measures a model's layers, or one shape; without either, layers of common models, with drafts
    and an FP8 cache. First all kernels are compiled, in parallel and outside of --minutes, as is
    what compiles later; --compiled leaves that out.
    Every backend is compared with the reference; one that is wrong is listed and has no times. An
    interrupted run goes on where it ended. `attn select` then weighs by what was measured.
    """
    if compile_only and compiled:
        raise UsageError("--compile-only and --compiled: nothing would be done; give one of them")
    registry = probed(load_plugins())
    inputs = _inputs(flags, path, registry)
    env = environment(registry, inputs.device)
    file = out or store.own_path(env)
    known = Profile()
    if os.path.exists(file):
        known = store.read_profile(file)
        if differs := known.differences(env):
            if out is not None:
                raise UsageError(
                    f"{file} is of another environment: {'; '.join(differs)}; name another file"
                )
            known = Profile()
    work = _Measurement(inputs, registry, env, known, minutes, grid=not quick, usual=True)
    skipped, passes = [], 0
    spent = Spent()
    new, written = Profile(), time.monotonic()
    try:
        with work.steps(compile_only=compile_only, compiled=compiled) as steps:
            for step in steps:
                spent.add(step.spent)
                passes += bool(step.profile.costs)
                new = new.merged(step.profile)
                if step.skipped:
                    skipped.append(step)
                if (new.costs or new.bad) and time.monotonic() > written + KEEP_S:
                    store.write(file, new)
                    new, written = Profile(), time.monotonic()
    finally:  # what was measured is kept, whatever ended the run
        if new.costs or new.bad:
            store.write(file, new)
    known = store.read_profile(file) if os.path.exists(file) else known
    compile_s, measure_s = work.compile_s + spent.compiling, work.measure_s - spent.compiling
    bad = sorted({(key.backend, why) for key, why in known.bad.items()})
    certain, every = known.certain()
    if json:
        data = {
            "profile": str(file),
            "environment": env,
            "points": len(known.costs),
            "compile_s": round(compile_s, 3),
            "measure_s": round(measure_s, 3),
            "spent_s": spent.by_backend(),
            "passes": {"listed": work.listed, "measured": passes},
            "fastest": {"certain": certain, "passes": every},
            "bad": [{"backend": name, "reason": why} for name, why in bad],
            "skipped": [{"pass": str(s.job.size), "reason": s.skipped} for s in skipped],
        }
        print_json(data | {"selection": _selected(inputs, registry, known)})
        return
    from attn_core.measure.session import SPENT

    lines = console()
    if work.not_compiled:
        lines.print(work.not_compiled, soft_wrap=True)
    for name, why in bad:
        lines.print(f"known bad: {name}: {why}", soft_wrap=True)
    for reason, number in Counter(s.skipped for s in skipped).items():
        again = "; run again to go on" if reason == SPENT else ""
        lines.print(f"not measured: {number} shapes, {reason}{again}", soft_wrap=True)
    lines.print(
        f"{compile_s:.0f} s of compiling, {measure_s:.0f} s of measuring: {spent}",
        soft_wrap=True,
    )
    lines.print(
        f"{len(known.costs)} points in {file}; the fastest of {every} passes is certain in "
        f"{certain}",
        soft_wrap=True,
    )
    for role, text in _selected(inputs, registry, known).items():
        lines.print(f"  {role:<11}{text}", soft_wrap=True)


@takes(InputFlags)
def bench_command(
    flags: InputFlags,
    path: Model = None,
    minutes: Minutes = 2.0,
    json: Json = False,
) -> None:
    """Measure a model's layers, or one shape, on every backend here, and print a table.

    This is the measurement of `attn tune`, of the workload's own passes; no file is written.
    """
    registry = probed(load_plugins())
    inputs = _inputs(flags, path, registry)
    env = environment(registry, inputs.device)
    work = _Measurement(inputs, registry, env, Profile(), minutes, grid=False)
    rows, data = [], []
    with work.steps() as steps:
        for step in steps:
            shape = [str(step.job.size), str(step.job.form)]
            for key, cost in sorted(step.profile.costs.items(), key=lambda item: item[1].us):
                spread = f"{micros(cost.low)} to {micros(cost.high)}"
                host = micros(cost.host_us) if cost.host_us else ""
                rows.append([*shape, key.backend, micros(cost.us), spread, host])
                data.append({"backend": key.backend, **_shape(step), **cost._asdict()})
            for key, why in step.profile.bad.items():
                rows.append([*shape, key.backend, why, "", ""])
                data.append({"backend": key.backend, **_shape(step), "bad": why})
            if step.skipped:
                rows.append([*shape, "", step.skipped, "", ""])
                data.append({"backend": None, **_shape(step), "skipped": step.skipped})
    if json:
        print_json({"environment": env, "measured": data})
        return
    header = ["pass", "layer", "backend", "time", "quartiles", "host"]
    print_table(header, rows, title=f"one call of one layer on {env['device']}")


def _shape(step: Step) -> dict[str, Any]:
    return {"pass": str(step.job.size), "layer": str(step.job.form)}


def _inputs(flags: InputFlags, path: Path | None, registry: Registry) -> SelectionInputs:
    if path is not None and flags.model is not None:
        raise UsageError(f"{path} and --model {flags.model}: name one model")
    here = probe_device()
    device = None if flags.device == here.type else flags.device  # the one of that type
    flags = replace(flags, model=path or flags.model, device=device)
    shape = (flags.kind, *(getattr(flags, name) for name in SHAPE if name not in ("kind", "sinks")))
    inputs = selection_inputs(flags, registry)
    must_be_here(inputs, here, "a measurement")
    if flags.model is not None or flags.sinks or any(x is not None for x in shape):
        return inputs
    return replace(inputs, requirements=replace(inputs.requirements, layers=(LAYER,)))


def unnamed(needs: Requirements) -> bool:
    """Say whether no model, layer, dtype, page or speculation was named."""
    return replace(needs, assumptions=()) == Requirements(layers=(LAYER,))


def _selected(inputs: SelectionInputs, registry: Registry, profile: Profile) -> dict[str, str]:
    try:
        chosen = replace(inputs, profile=profile).select(registry, advise=False)
    except NoBackendError as error:
        return {"none": str(error)}
    return {role: f"{c.backend}: {c.reason}" for role, c in chosen.roles.items()}


@dataclass
class _Measurement:
    """The jobs of one command, with a progress bar, and what they took."""

    inputs: SelectionInputs
    registry: Registry
    environment: dict[str, str]
    known: Profile
    minutes: float
    grid: bool
    usual: bool = False  # where nothing is named, layers of common models
    listed: int = field(default=0, init=False)  # passes
    compile_s: float = field(default=0.0, init=False)
    measure_s: float = field(default=0.0, init=False)
    not_compiled: str = field(default="", init=False)

    @contextmanager
    def steps(
        self, *, compile_only: bool = False, compiled: bool = False
    ) -> Iterator[Iterator[Step]]:
        """Compile all kernels if they are not compiled, then yield what is measured."""
        if not 0 < self.minutes <= MOST_MINUTES:
            raise UsageError(f"--minutes {self.minutes}: above 0, at most {MOST_MINUTES:.0f}")
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

        from attn_core.measure.candidates import Job, jobs
        from attn_core.measure.compiling import compile_kernels
        from attn_core.measure.session import session
        from attn_core.testing.runner import torch_device  # torch, which others do without

        x = self.inputs
        here = (x.device, self.registry, x.libraries, x.overrides, x.workload)
        usual = self.usual and unnamed(x.requirements)
        todo = (
            usual_jobs(*here, grid=self.grid)
            if usual
            else jobs(x.requirements, *here, grid=self.grid)
        )
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with stdout_to_stderr(), progress(*columns, TextColumn("{task.description}")) as bar:
            self.listed, on = len(todo), torch_device(x.device)

            def advance(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            task, start = bar.add_task("compiling", total=len(todo)), time.monotonic()
            if not compiled:
                self.not_compiled = compile_kernels(
                    todo, self.known, on, arch=x.device.arch, step=advance
                )
            self.compile_s = time.monotonic() - start
            if compile_only:
                yield iter(())
                return
            bar.update(task, completed=0, total=len(todo))

            def begin(job: Job) -> None:
                names = ", ".join(c.spec.name for c in job.candidates)
                at = todo.index(job)
                bar.update(task, completed=at, description=f"{job.size}: {names}")

            start = time.monotonic()
            yield session(
                todo,
                self.known,
                self.environment,
                on,
                arch=x.device.arch,
                minutes=self.minutes,
                begin=begin,
            )
            self.measure_s = time.monotonic() - start
