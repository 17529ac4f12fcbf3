"""`attn check`: test on this machine what backends declare."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from attn_core.cli.against import compare_backends
from attn_core.cli.console import console, print_json, print_table, progress
from attn_core.cli.inputs import check
from attn_core.cli.options import flag
from attn_core.errors import AttnError, UsageError
from attn_core.formatting import printable
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.plugins.streams import stdout_to_stderr
from attn_core.spec.device import Device, devices_of, parse_device, probe_device
from attn_core.spec.kinds import Kind

if TYPE_CHECKING:
    from attn_core.testing.parallel import SuiteOptions
    from attn_core.testing.plan import PlannedCheck
    from attn_core.testing.runner import CellReport, Outcome, Report


def check_command(
    backend: Annotated[
        str | None,
        typer.Argument(
            metavar="BACKEND", help="Name of the backend; default: all that this device serves."
        ),
    ] = None,
    device: Annotated[
        str | None, flag("--device", "TYPE[:ARCH]: a device of this machine.", env=False)
    ] = None,
    evidence: Annotated[
        Path | None, flag("--evidence", "Folder to write evidence files into.", env=False)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Test each feature with one case, dtype and page size.")
    ] = False,
    kind: Annotated[
        str | None, flag("--kind", "Kind of attention to check; default: all.", env=False)
    ] = None,
    against: Annotated[
        str | None, flag("--against", "Compare with this backend instead.", env=False)
    ] = None,
    jobs: Annotated[
        int, flag("--jobs", "Number of processes that run checks in parallel.", env=False)
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the conformance suite on a backend. Exit code 1: a declared feature failed.

    Features that no row declares are not run; the reason is printed. So is that of a backend whose
    library is not installed, where all are checked. With --against, single passes of two backends
    are compared. Exit code 1: they differ by more than the suite allows both together.
    """
    _check_jobs(jobs)
    every: tuple[Kind, ...] = get_args(Kind)
    kinds = tuple(k for k in every if check("--kind", kind, every) in (None, k))
    registry = load_plugins()
    for name in (n for n in (backend, against) if n is not None):
        registry.find(name)  # or says which names there are, before torch is imported
    here = local_device(device)
    if evidence is not None:
        make_folder("--evidence", evidence)
    if against is not None:
        if backend is None or evidence is not None or jobs > 1:
            raise UsageError("--against takes a backend's name, no --evidence and no --jobs")
        names = (backend, against)
        return compare_backends(registry, names, here, kinds, quick=quick, json=json)
    done: list[_Checked] = []
    for suites in _planned(registry, backend, here, kinds, reduced=quick):
        checked = _check(registry, suites, jobs, evidence)
        done.append(checked)
        if not json:
            checked.print(f"on {here}" if backend else f"of {checked.name} on {here}")
        if checked.lost:
            print(f"attn: {checked.lost}", file=sys.stderr)
    if json:
        reports = [checked.to_json(here) for checked in done]
        print_json(reports[0] if backend else reports)
    if any(checked.failures or checked.lost for checked in done):
        raise typer.Exit(1)


def _planned(
    registry: Registry,
    backend: str | None,
    here: Device,
    kinds: tuple[Kind, ...],
    *,
    reduced: bool,
) -> Iterator[list[SuiteOptions]]:
    """Yield what to run of the named backend, or of each that has rows for this device.

    A line on stderr says why one of these cannot run; the error of the named one is raised.
    """
    if backend is not None:
        yield _suites(registry, backend, here, kinds, reduced=reduced)
        return
    names = {
        spec.name
        for spec in registry.backends.values()
        for row in spec.capabilities
        if spec.creator(row)
        and row.kind in kinds
        and row.device in ("any", here.type)
        and (not row.archs or here.arch in row.archs)
    }
    for name in sorted(names):
        try:
            suites = _suites(registry, name, here, kinds, reduced=reduced)
        except AttnError as error:
            print(f"attn: not checked: {error}", file=sys.stderr)
        else:
            yield suites


@dataclass(frozen=True)
class _Checked:
    """What the checks of a name came to; lost: why its evidence is not complete."""

    name: str
    outcomes: list[Outcome]
    cells: Report
    written: list[Path]
    lost: str

    @property
    def failures(self) -> list[str]:
        """What failed, and what is declared and was not proved, in sentences."""
        from attn_core.testing import runner

        failed = [o.detail for o in self.outcomes if o.status == "failed"]
        unproved = runner.problems(self.cells)
        return failed + [p for p in unproved if not any(p.endswith(f) for f in failed)]

    def to_json(self, here: Device) -> dict[str, object]:
        from attn_core.testing import runner

        summary = runner.summary(self.outcomes, self.cells)
        written = [str(path) for path in self.written]
        about = {"backend": self.name, "device": str(here), **summary}
        return {**about, "failures": self.failures, "evidence": written}

    def print(self, place: str) -> None:
        header = ["cell", "checks", "failed", "worst error", "allowed", "verdict"]
        for kind, reports in self.cells.items():
            rows = [_line(cell, report) for cell, report in reports.items()]
            print_table(header, rows, title=f"{kind} {place}")
            print()
        reasons = dict.fromkeys(
            (f"{o.planned.kind}: {o.planned.check.feature}", o.detail)
            for o in self.outcomes
            if o.status == "skipped"
        )
        if reasons:
            print_table(["not declared, so not run", "the row's reason"], [*map(list, reasons)])
            print()
        for sentence in self.failures:
            console().print(f"failed: {sentence}", soft_wrap=True)
        for path in self.written:
            console().print(f"wrote {path}", soft_wrap=True)


def _check(
    registry: Registry, suites: list[SuiteOptions], jobs: int, evidence: Path | None
) -> _Checked:
    """Run the suites of one name, and write what they prove into the folder `evidence`."""
    from attn_core.testing import runner
    from attn_core.testing.evidence import write_evidence

    libraries = registry.installed_libraries()
    outcomes: list[Outcome] = []
    cells: Report = {}
    written: list[Path] = []
    lost = ""
    with stdout_to_stderr():  # compilers print
        for options in suites:
            ran, spec = _run(options, jobs), registry.get(options.backend, options.family)
            here = options.device
            own = runner.report(ran, spec, here, libraries)
            outcomes, cells = [*outcomes, *ran], {**cells, **own}
            try:
                written += write_evidence(evidence, spec, here, own) if evidence is not None else []
            except OSError as error:  # the disk is full: the report is still told
                lost = (
                    f"--evidence {evidence}: {error.strerror or error}; the evidence is not "
                    "complete"
                )
    return _Checked(suites[0].backend, outcomes, cells, written, lost)


def _suites(
    registry: Registry, backend: str, here: Device, kinds: tuple[Kind, ...], *, reduced: bool
) -> list[SuiteOptions]:
    """Return what to run of a name: a softmax and a linear backend may share it.

    Where one of the two cannot run here, a line on stderr says so; where none can, its error is
    raised.
    """
    from attn_core.testing.parallel import SuiteOptions

    called = [s for s in registry.backends.values() if backend in (s.name, *s.aliases)]
    able = [s for s in called if any(row.kind in kinds for row in s.capabilities)] or called
    suites, errors = [], []
    for family in ("softmax", "linear"):
        for spec in (s for s in able if s.family == family):
            options = SuiteOptions(
                backend=spec.name, device=here, family=spec.family, kinds=kinds, reduced=reduced
            )
            try:
                options.plan()
            except AttnError as error:
                errors.append(error)
            else:
                suites.append(options)
    if not suites:
        raise errors[0]
    for why in errors:
        print(f"attn: not checked: {why}", file=sys.stderr)
    return suites


def _check_jobs(jobs: int) -> None:
    """Refuse more processes than cores: each imports torch, and too many freeze the machine."""
    cores = os.cpu_count() or 1
    if not 1 <= jobs <= cores:
        raise UsageError(f"--jobs {jobs}: at least 1, at most {cores}, the cores of this machine")


def make_folder(option: str, folder: Path) -> None:
    """Create the folder of an option and test that it is writable, before what takes minutes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(
            f"{option} {printable(str(folder), 200)}: {why}; give a folder that can be written"
        ) from error


def local_device(device: str | None) -> Device:
    """Return the named device of this machine. Its CPU always counts as one."""
    here = probe_device()
    if device is None:
        return here
    wanted = parse_device(device, extra=[here.type], here=here)
    for one in devices_of(here):
        if wanted.type == one.type and (":" not in device or wanted.arch == one.arch):
            return one
    have = " and ".join(map(str, devices_of(here)))
    raise UsageError(
        f"--device {device}: kernels run on real devices, and this machine has {have}; leave "
        "--device out, or run the command on a machine that has one"
    )


def _run(options: SuiteOptions, jobs: int) -> list[Outcome]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    from attn_core.testing import runner
    from attn_core.testing.parallel import run_parallel

    spec, planned = options.plan()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with progress(*columns) as bar:
        task = bar.add_task("", total=len(planned))

        def step(one: PlannedCheck) -> None:
            bar.update(task, advance=1, description=one.check.id)

        if jobs > 1:
            bar.update(task, advance=sum(p.row is None for p in planned))
            return run_parallel(options, jobs, step)
        here = options.device
        return runner.run_all(planned, spec, runner.torch_device(here), step, arch=here.arch)


def _line(cell: str, r: CellReport) -> list[str]:
    numbers = [f"{r.worst:.2e}", f"{r.budget:.2e}"] if r.cases else ["-", "-"]
    verdict = "not declared" if not r.declared else "failed" if r.problem else "passed"
    return [cell, str(r.cases), str(r.failed), *numbers, verdict]
