"""Evidence files: what a backend was seen to do, on which device, with which versions, and when."""

from __future__ import annotations

import datetime
import json
import pathlib
import platform
from collections.abc import Iterable
from typing import Any, Literal

from attn_core.plugins.dependencies import alternatives, version_of
from attn_core.spec.capabilities import BackendSpec
from attn_core.spec.device import Device
from attn_core.testing.runner import CellReport, Report

Level = Literal["emulated", "compiled", "device-tested"]


def write_evidence(
    folder: pathlib.Path,
    spec: BackendSpec,
    device: Device,
    cells: Report,
    *,
    level: Level = "device-tested",
    compilers: Iterable[str] = (),
) -> list[pathlib.Path]:
    """Write one file per kind into a package's evidence/ folder; return the paths.

    Only declared cells without a problem are in it. level: "device-tested" where the checks ran
    the kernels on `device` itself, "emulated" where an emulation of the vendor's library stood for
    them, "compiled" where they were built for it and not run: then there is no error to note.
    Each level has its own file, so that a weaker proof never overwrites a stronger one. compilers:
    distributions whose versions are noted beside those of `versions`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, reports in cells.items():
        proved = {
            name: _proof(r, level) for name, r in reports.items() if r.declared and not r.problem
        }
        data = {
            "backend": spec.name,
            "kind": kind,
            "cells": proved,
            "versions": versions(spec, compilers),
            "device": str(device),
            "runtime": device.runtime,
            "date": datetime.date.today().isoformat(),
        }
        name = "-".join([spec.name, kind, *str(device).split(":")])
        suffix = "" if level == "device-tested" else f".{level}"
        path = folder / f"{name}{suffix}.json"
        path.write_text(json.dumps(data, indent=2) + "\n")
        written.append(path)
    return written


def _proof(cell: CellReport, level: Level) -> dict[str, Any]:
    proof: dict[str, Any] = {"level": level, "cases": cell.cases}
    if level != "compiled":
        numbers = {"worst": cell.worst, "budget": cell.budget}
        proof |= {name: float(f"{x:.3g}") for name, x in numbers.items()}
    return proof


def versions(spec: BackendSpec, extra: Iterable[str] = ()) -> dict[str, Any]:
    """Return the versions of Python, attn-core, torch, what the rows require, and `more`."""
    groups = {g for row in spec.capabilities for g in row.requires}
    names = {"attn-core", "torch", *extra, *(w.name for g in groups for w in alternatives(g))}
    found = {name: version for name in sorted(names) if (version := version_of(name))}
    return {"python": platform.python_version(), **found}
