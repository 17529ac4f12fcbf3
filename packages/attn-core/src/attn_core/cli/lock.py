"""`attn lock` and `attn diff`."""

from __future__ import annotations

import json as jsons
import os
from pathlib import Path
from typing import Annotated

import typer

from attn_core.cli.console import print_json, print_text
from attn_core.cli.inputs import selection_inputs
from attn_core.cli.options import InputFlags, takes
from attn_core.costs import store
from attn_core.costs.environment import assumed_environment, environment
from attn_core.errors import UsageError
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.selection.inputs import SelectionInputs
from attn_core.selection.lock import Lock
from attn_core.selection.moves import changes, differences, moves
from attn_core.selection.ranking import shipped_profile
from attn_core.selection.result import Selection
from attn_core.tools.probes import probed


@takes(InputFlags)
def lock_command(
    flags: InputFlags,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write, or a lock to replace.")
    ],
) -> None:
    """Select as `attn select` does, and keep the decision in a file.

    The file has the choice of every phase with its reason, each backend as it was weighed, the
    digest of the measured costs, and the environment: the device, its driver, torch and the version
    of every library and plugin. `attn select --locked FILE` then refuses to differ.
    """
    if os.path.lexists(file):  # any other file stays as it is
        store.parsed(file, "lock", Lock.from_json)
    registry = probed(load_plugins())
    inputs = selection_inputs(flags, registry)
    selection = inputs.select(registry)
    lock = lock_of(inputs, selection, registry)
    try:
        store.put(file, jsons.dumps(lock.to_json(), indent=1, ensure_ascii=True) + "\n")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise UsageError(f"lock {file}: {getattr(error, 'strerror', None) or error}") from None
    lines = [f"  {name:<17}{c.choice:<16} {c.reason}".rstrip() for name, c in lock.decision.items()]
    print_text("\n".join([f"{file}, on {inputs.device}", *lines]))


def diff_command(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A lock.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A later lock.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain which choice moved between two locks, and why: a version, a row, a cost.

    Exit code 1: a choice moved.
    """
    then, now = (store.parsed(path, "lock", Lock.from_json) for path in (old, new))
    requested, moved = differences(then.asked, now.asked), moves(then, now)
    changed = changes(then, now)
    if json:
        print_json({"asked": requested, "moved": [m.to_json() for m in moved], "changed": changed})
    else:
        lines = [str(m) for m in moved] or ["every choice is the same"]
        lines += [f"asked: {text}" for text in requested] + [f"changed: {text}" for text in changed]
        print_text("\n".join(lines))
    if moved:
        raise typer.Exit(1)


def lock_of(inputs: SelectionInputs, selection: Selection, registry: Registry) -> Lock:
    """Return the lock of a selection that these inputs led to."""
    device, libraries, profile = inputs.device, inputs.libraries, inputs.profile
    if profile is None:
        profile, _ = shipped_profile(device, registry, libraries)
    if inputs.simulated:
        env = assumed_environment(registry, device, libraries)
    else:
        env = environment(registry, device)
    return Lock.of(selection, env, profile, inputs.workload)
