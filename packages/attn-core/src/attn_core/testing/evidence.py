"""Evidence files: what a backend was seen to do, on which device, with which versions, and when."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import pathlib
import platform
from typing import Any, Literal

from attn_core.capabilities import BackendSpec, Device
from attn_core.libraries import alternatives
from attn_core.testing.runner import Report

Level = Literal["emulated", "compiled", "device-tested"]


def write_evidence(
    folder: pathlib.Path,
    spec: BackendSpec,
    device: Device,
    cells: Report,
    *,
    level: Level = "device-tested",
) -> list[pathlib.Path]:
    """Write one file per kind into a package's evidence/ folder; return the paths.

    Only declared cells without a problem are in it. level: "device-tested" where the checks ran
    the kernels on `device` itself, "emulated" where an emulation of the vendor's library stood for
    them. Each level has its own file, so that a weaker proof never overwrites a stronger one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, found in cells.items():
        proved = {
            name: {
                "level": level,
                "cases": r.cases,
                "worst": float(f"{r.worst:.3g}"),
                "budget": float(f"{r.budget:.3g}"),
            }
            for name, r in found.items()
            if r.declared and not r.problem
        }
        data = {
            "backend": spec.name,
            "kind": kind,
            "cells": proved,
            "versions": versions(spec),
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


def versions(spec: BackendSpec) -> dict[str, Any]:
    """Return the versions of Python, attn-core, torch and the libraries that the rows require."""
    groups = {g for row in spec.capabilities for g in row.requires}
    names = {"attn-core", "torch", *(w.name for g in groups for w in alternatives(g))}
    found = {"python": platform.python_version()}
    for name in sorted(names):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
