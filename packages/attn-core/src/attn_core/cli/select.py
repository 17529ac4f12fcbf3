"""`attn select` and `attn why-not`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from attn_core.cli.command_line import applier, changed_flags, written
from attn_core.cli.console import print_json, print_text
from attn_core.cli.inputs import selection_inputs
from attn_core.cli.layers import layers_as_data, layers_as_text
from attn_core.cli.lock import lock_of
from attn_core.cli.options import InputFlags, flag, takes
from attn_core.costs import store
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.selection.diagnosis import WhyNot, describe, why_not
from attn_core.selection.explain_costs import explain_costs
from attn_core.selection.inputs import SelectionInputs
from attn_core.selection.lock import Lock
from attn_core.selection.moves import require
from attn_core.selection.result import NoBackendError, explain, to_json
from attn_core.selection.shared_prefix import sharing_of
from attn_core.spec.kinds import Family
from attn_core.tools.probes import probed

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@takes(InputFlags)
def select_command(
    flags: InputFlags,
    json: Json = False,
    implemented_only: Annotated[
        bool,
        flag("--implemented-only", "Select implemented backends only.", env=False),
    ] = False,
    explain_cost: Annotated[
        bool,
        flag("--explain-cost", "Print what every pass of the workload costs.", env=False),
    ] = False,
    locked: Annotated[
        Path | None, flag("--locked", "Refuse to differ from this file of `attn lock`.")
    ] = None,
) -> None:
    """Select backends for a model on a device and explain why. Exit code 3: none fits.

    With --locked, exit code 1: the selection differs from the lock; the error says what changed.
    """
    registry = probed(load_plugins())
    inputs = selection_inputs(flags, registry)
    layers = {"layers_read": layers_as_data(inputs.requirements)}
    if flags.model is not None and not json:
        print_text(layers_as_text(inputs.requirements, flags.model))
    if implemented_only:  # as on this machine, where nothing else can be created
        inputs = replace(inputs, simulated=False)
    old_lock = None if locked is None else store.parsed(locked, "lock", Lock.from_json)
    try:
        selection = inputs.select(registry)
    except NoBackendError as error:
        if json:
            print_json(to_json(error.selection, str(error)) | layers)
            raise typer.Exit(3) from None
        print_text(explain(error.selection))
        raise
    changed = None
    if old_lock is not None:
        changed = require(old_lock, lock_of(inputs, selection, registry), f"lock {locked}")
    shared = sharing_of(selection, inputs.workload)
    if json:
        extra: dict[str, Any] = {} if old_lock is None else {"changed": changed}
        extra |= {"shared_prefix": [x.to_json() for x in shared]} if shared else {}
        print_json(to_json(selection) | layers | extra)
    else:
        print_text(explain(selection))
        for sharing in shared:
            print_text(f"  sharing    {sharing}")
        for text in changed or ():
            print_text(f"  changed    {text}")
        if explain_cost:
            print_text(explain_costs(selection))


@takes(InputFlags)
def why_not_command(
    flags: InputFlags,
    backend: Annotated[str, typer.Argument(metavar="BACKEND", help="Name of the backend.")],
    json: Json = False,
) -> None:
    """Explain why a backend is not selected, and find the smallest change that makes it fit."""
    registry = probed(load_plugins())
    inputs = selection_inputs(flags, registry)
    results = [
        why_not(
            backend,
            inputs.requirements,
            inputs.device,
            registry,
            inputs.libraries,
            inputs.overrides,
            inputs.profile,
            workload=inputs.workload,
            simulated=inputs.simulated,
            family=family,
            apply=applier(flags, registry),
        )
        for family in _families(backend, registry, inputs)
    ]
    if json:
        data = [_as_data(a, _command(flags, a)) for a in results]
        print_json(data[0] | ({"linear": data[1]} if len(data) > 1 else {}))
    else:
        print_text("\n\n".join(describe(a, _command(flags, a)) for a in results))


def _families(backend: str, registry: Registry, inputs: SelectionInputs) -> list[Family]:
    """Diagnose the family that has the name, or both families if the model has layers of both."""
    families: list[Family] = ["softmax", "linear"]
    having = [
        f
        for f in families
        if any(backend in (s.name, *s.aliases) for s in registry.family(f))
        and (f == "softmax" or inputs.requirements.linear_layers)
    ]
    return having or [registry.find(backend).family]


def _command(flags: InputFlags, result: WhyNot) -> str:
    """Return a command line that selects the backend, or "" if flags cannot express the fixes."""
    if result.fixes is None or not (result.fixes or result.named):
        return ""
    changed, remaining = changed_flags(flags, (*result.fixes, *result.named))
    return "" if any(c.target != "libraries" for c in remaining) else written("select", changed)


def _as_data(result: WhyNot, command: str) -> dict[str, Any]:
    return {
        "backend": result.backend,
        "family": result.family,
        "fits": result.fits,
        "chosen": list(result.chosen),
        "reasons": [{"phase": phase, "reason": reason} for phase, reason in result.reasons],
        "changes": None if result.fixes is None else [c.text for c in result.fixes],
        "naming": result.naming,
        "command": command or None,
        "notes": list(result.notes),
        "decision": to_json(result.decision),
    }
