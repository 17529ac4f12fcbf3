"""`attn doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from attn_core.cli.console import console, print_json, print_table
from attn_core.cli.options import flag
from attn_core.plugins.registry import load_plugins
from attn_core.spec.device import parse_device, probe_device
from attn_core.tools.doctor import examine


def doctor_command(
    device: Annotated[
        str | None, flag("--device", "TYPE[:ARCH]: simulate another machine.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check torch, the driver and each kernel library, and print the commands that fix problems.

    Exit code 1 means that there is a problem. A library that is only missing is a note.
    """
    assumed = None if device is None else parse_device(device, here=probe_device())
    findings = examine(load_plugins(), assumed)
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
