"""`attn doctor`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from attn_core.cli.console import console, print_json, print_table, progress
from attn_core.cli.options import flag
from attn_core.errors import UsageError
from attn_core.plugins.registry import Registry, RowName, load_plugins
from attn_core.spec.device import parse_device, probe_device
from attn_core.tools.doctor import examine
from attn_core.tools.probes import write
from attn_core.tools.probing import SECONDS, targets
from attn_core.tools.probing import probe as run_probes

MOST_SECONDS = 24 * 3600.0


def doctor_command(
    device: Annotated[
        str | None, flag("--device", "TYPE[:ARCH]: simulate another machine.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Run small passes on every row; selections avoid what fails."),
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", help="The most that the probe of a row may take.")
    ] = SECONDS,
) -> None:
    """Check torch, the driver and each kernel library, and print the commands that fix problems.

    Exit code 1 means that there is a problem. A library that is only missing is a note.
    --probe runs each row in another process, and keeps the verdict for this environment.
    """
    assumed = None if device is None else parse_device(device, here=probe_device())
    registry = load_plugins()
    if probe:
        if assumed is not None:
            raise UsageError(
                f"--device {device}: a probe runs kernels, on this machine's device; leave it out"
            )
        _probe(registry, seconds)
    findings = examine(registry, assumed)
    if json:
        print_json([asdict(f) for f in findings])
    else:
        rows = [[f.subject, f.found, f.level, f.verdict] for f in findings]
        print_table(["what", "found", "", "verdict"], rows)
        fixes = [f for f in findings if f.fix]
        if fixes:
            console().print("\nto fix or install:")
        for f in fixes:
            console().print(f"  {f.fix}    # {f.subject}", soft_wrap=True)
    if any(f.level == "problem" for f in findings):
        raise typer.Exit(1)


def _probe(registry: Registry, seconds: float) -> None:
    """Probe every row, and keep the verdicts after each: an interrupted run loses none."""
    if not 0 < seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds {seconds}: above 0, at most {MOST_SECONDS}")
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    device = probe_device()
    verdicts: dict[RowName, str] = {}
    probe_targets = targets(registry, device)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with progress(*columns, TextColumn("{task.description}")) as bar:
        task = bar.add_task("", total=len(probe_targets))
        for probed in run_probes(probe_targets, device, seconds):
            name = probed.target.name
            bar.update(task, advance=1, description=name[1])
            if probed.unknown:
                print(
                    f"attn: {name[1]}, row {name[2]}: not probed: {probed.unknown}", file=sys.stderr
                )
                continue
            verdicts[name] = verdicts.get(name) or probed.failed  # two rows that differ in prose
            write(verdicts, registry, device)
