"""The measurement of `attn tune` and `attn bench`: what is asked, its shapes, a progress bar."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_core.cli.console import progress
from attn_core.cli.inputs import SHAPE, must_be_here, selection_inputs
from attn_core.cli.options import InputFlags, flag
from attn_core.costs.profile import Profile
from attn_core.errors import UsageError
from attn_core.measure.usual import LAYER, usual_jobs
from attn_core.plugins.registry import Registry
from attn_core.plugins.streams import stdout_to_stderr
from attn_core.selection.inputs import SelectionInputs
from attn_core.spec.device import probe_device
from attn_core.spec.requirements import Requirements

if TYPE_CHECKING:
    from attn_core.measure.session import Step

MOST_MINUTES = 24 * 60.0
MOST_PARTS = 1024
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Model = Annotated[
    Path | None, typer.Argument(metavar="MODEL", help="Model directory or config.json.")
]
Minutes = Annotated[float, flag("--minutes", "No shape begins after this many minutes.", env=False)]


def inputs_of(flags: InputFlags, path: Path | None, registry: Registry) -> SelectionInputs:
    if path is not None and flags.model is not None:
        raise UsageError(f"{path} and --model {flags.model}: name one model")
    detected = probe_device()
    device = None if flags.device == detected.type else flags.device  # the one of that type
    flags = replace(flags, model=path or flags.model, device=device)
    shape = (flags.kind, *(getattr(flags, name) for name in SHAPE if name not in ("kind", "sinks")))
    inputs = selection_inputs(flags, registry)
    must_be_here(inputs, detected, "a measurement")
    if flags.model is not None or flags.sinks or any(x is not None for x in shape):
        return inputs
    return replace(inputs, requirements=replace(inputs.requirements, layers=(LAYER,)))


def unnamed(needs: Requirements) -> bool:
    """Say whether no model, layer, dtype, page or speculation was named."""
    return replace(needs, assumptions=()) == Requirements(layers=(LAYER,))


def part_of(text: str) -> tuple[int, int]:
    """Return which part of how many: "2/3" is every third shape, from the second on."""
    number, _, parts = text.partition("/")
    numbers = [int(x) if x.isascii() and x.isdigit() and len(x) < 5 else 0 for x in (number, parts)]
    if not 1 <= numbers[0] <= numbers[1] <= MOST_PARTS:
        raise UsageError(f'--part {text}: expected a part and their number, as in "1/2"')
    return numbers[0], numbers[1]


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the command as an exit does, so that what was measured is still written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)


@dataclass
class Measurement:
    """The jobs of one command, with a progress bar, and what they took."""

    inputs: SelectionInputs
    registry: Registry
    environment: dict[str, str]
    known: Profile
    minutes: float
    grid: bool
    usual: bool = False  # where nothing is named, layers of common models
    part: tuple[int, int] = (1, 1)  # (i, n): every n-th shape from the i-th on
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
        listed_jobs = (
            usual_jobs(*here, grid=self.grid)
            if usual
            else jobs(x.requirements, *here, grid=self.grid)
        )
        if not listed_jobs:
            x.select(self.registry, advise=False)  # says who refuses what
            raise UsageError("nothing to measure: no backend that fits reads a cache of pages here")
        listed_jobs = listed_jobs[self.part[0] - 1 :: self.part[1]]
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with stdout_to_stderr(), progress(*columns, TextColumn("{task.description}")) as bar:
            self.listed, device = len(listed_jobs), torch_device(x.device)

            def advance(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            task, start = bar.add_task("compiling", total=len(listed_jobs)), time.monotonic()
            if not compiled:
                self.not_compiled = compile_kernels(
                    listed_jobs, self.known, device, arch=x.device.arch, step=advance
                )
            self.compile_s = time.monotonic() - start
            if compile_only:
                yield iter(())
                return
            bar.update(task, completed=0, total=len(listed_jobs))

            def begin(job: Job) -> None:
                names = ", ".join(c.spec.name for c in job.candidates)
                index = listed_jobs.index(job)
                bar.update(task, completed=index, description=f"{job.size}: {names}")

            start = time.monotonic()
            yield session(
                listed_jobs,
                self.known,
                self.environment,
                device,
                arch=x.device.arch,
                minutes=self.minutes,
                begin=begin,
            )
            self.measure_s = time.monotonic() - start
