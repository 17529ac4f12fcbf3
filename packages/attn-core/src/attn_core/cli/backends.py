"""`attn backends` and `attn matrix`."""

from __future__ import annotations

import sys
from typing import Annotated, Any, get_args

import typer
from packaging.utils import canonicalize_name

from attn_core.cli.console import console, print_json, print_table
from attn_core.cli.inputs import check
from attn_core.errors import UsageError
from attn_core.plugins.dependencies import Libraries, alternatives, shortfall
from attn_core.plugins.evidence import faults
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.spec.capabilities import BackendSpec
from attn_core.spec.device import Device, probe_device
from attn_core.spec.kinds import Kind
from attn_core.tools.matrix import build_matrix, summary, to_html, to_markdown

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def backends_command(json: Json = False) -> None:
    """List every backend with its origin, library and usability, and broken or slow plugins."""
    registry = load_plugins()
    libraries, device = registry.installed_libraries(), probe_device()
    entries = [_entry(registry, s, device, libraries) for s in registry.backends.values()]
    if json:
        broken = [
            {"name": b.name, "origin": str(b.origin), "error": b.error, "details": b.details}
            for b in registry.broken
        ]
        slow = [
            {"name": s.name, "origin": str(s.origin), "seconds": round(s.seconds, 3)}
            for s in registry.slow
        ]
        print_json({"device": str(device), "backends": entries, "broken": broken, "slow": slow})
        return
    rows = [
        [e["name"], ", ".join(e["kinds"]), e["origin"], _versions(e["libraries"]), e["here"]]
        for e in entries
    ]
    print_table(["backend", "kinds", "from", "libraries", f"on {device}"], rows)
    for s in registry.slow:
        console().print(f"\nslow: {s.name} from {s.origin} ({s.origin.module})\n  {s}")
    for b in registry.broken:
        console().print(f"\nbroken: {b.name} from {b.origin} ({b.origin.module})\n  {b.error}")
        if b.details:
            console().print(b.details.rstrip())


def _entry(
    registry: Registry, spec: BackendSpec, device: Device, libraries: Libraries
) -> dict[str, Any]:
    groups = sorted({g for row in spec.capabilities for g in row.requires})
    versions = {}
    for name in (w.name for g in groups for w in alternatives(g)):
        canonical = canonicalize_name(name)
        # a plugin's own library may have no version
        versions[name] = (libraries[canonical] or "found") if canonical in libraries else None
    reason = _reason(spec, device, libraries)
    return {
        "name": spec.name,
        "family": spec.family,
        "kinds": sorted({row.kind for row in spec.capabilities}),
        "devices": sorted({row.device for row in spec.capabilities}),
        "origin": str(registry.origins[(spec.family, spec.name)]),
        "implemented": spec.implemented,
        "requires": groups,
        "libraries": versions,
        "usable": reason is None,
        "here": reason or "usable",
    }


def _reason(spec: BackendSpec, device: Device, libraries: Libraries) -> str | None:
    rows = [r for r in spec.capabilities if r.device in ("any", device.type)]
    if not rows:
        return "for " + ", ".join(sorted({r.device for r in spec.capabilities}))
    fitting = [r for r in rows if not r.archs or device.arch in r.archs]
    if not fitting:
        return "for " + ", ".join(sorted({f"{r.device}:{a}" for r in rows for a in r.archs}))
    missing_groups = [
        [g for g in r.requires if shortfall(g, libraries) is not None] for r in fitting
    ]
    missing = min(missing_groups, key=len)
    if missing:
        return f"needs {' and '.join(missing)}"
    return None if spec.implemented else "declared, not implemented in 0.1"


def _versions(libraries: dict[str, str | None]) -> str:
    return ", ".join(f"{n} {v or 'not installed'}" for n, v in libraries.items()) or "-"


def matrix_command(
    kind: Annotated[str | None, typer.Option(help=f"One of {', '.join(get_args(Kind))}.")] = None,
    format: Annotated[
        str | None, typer.Option(help="One of table, markdown, json, html; default: table.")
    ] = None,
    json: Json = False,
) -> None:
    """Print the support matrix, generated from rows and evidence files."""
    check("--format", format, ("table", "markdown", "json", "html"))
    if json and format not in (None, "json"):
        raise UsageError(f"--json with --format {format}: give one of them")
    check("--kind", kind, get_args(Kind))
    kinds = (kind,) if kind else get_args(Kind)
    registry = load_plugins()
    matrix = build_matrix(registry, kinds)
    for fault in faults(origin.module for origin in registry.origins.values()):
        print(f"warning: {fault}", file=sys.stderr)
    if json or format == "json":
        print_json(matrix)
    elif format == "markdown":
        print(to_markdown(matrix), end="")
    elif format == "html":
        print(to_html(matrix), end="")
    else:
        for name in matrix:
            header, rows = summary(matrix, name)
            print_table(header, rows, title=name)
            print()
