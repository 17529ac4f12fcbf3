"""The process of `attn doctor --probe`: create the backend of a row, and run a few small passes."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import replace
from typing import Any, TextIO

from attn_core.errors import UnsupportedError
from attn_core.formatting import printable
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.spec.device import Device
from attn_core.testing.plan import KINDS, PlannedCheck, plan
from attn_core.testing.runner import run_all, torch_device


def main() -> None:
    """Read a line {"device", "rows"} from standard input, and write a JSON line for each row.

    Ends after the first that fails. What kernels print goes to standard error.
    """
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    registry = load_plugins()
    device = Device(**request["device"])
    answer(stdout, {})
    for family, name, index in request["rows"]:
        result = run(registry, device, (family, name), index)
        answer(stdout, result)
        if result.get("failed"):
            break
    stdout.close()
    os._exit(0)  # what is left of a library must not hang at the exit


def _end_with_parent() -> None:
    """Wait until who asked has gone, and end: nobody stops a pass that hangs."""
    sys.stdin.read()
    os._exit(1)


def answer(stream: TextIO, data: dict[str, str]) -> None:
    """Write one line, at once."""
    stream.write(json.dumps(data) + "\n")
    stream.flush()


def run(registry: Registry, device: Device, key: Any, index: int) -> dict[str, str]:
    """Run the first check of each phase of one row; return {"failed": why} or {"unknown": why}."""
    spec = registry.backends[key]
    spec = replace(spec, capabilities=[spec.capabilities[index]])
    [row] = spec.capabilities
    if row.kind not in KINDS:
        return {"unknown": f"the suite has no cases of kind {row.kind}"}
    try:
        checks = plan(spec, device, registry.installed_libraries(), kinds=(row.kind,), reduced=True)
    except UnsupportedError as error:
        return {"unknown": str(error)}
    first: dict[Any, PlannedCheck] = {}
    for planned in checks:
        if planned.row is not None and not planned.check.alone:
            for phase in row.phases & set(planned.check.phases):
                first.setdefault(phase, planned)
    distinct = list({p.check.id: p for p in first.values()}.values())
    outcomes = run_all(distinct, spec, torch_device(device), arch=device.arch)
    for outcome in outcomes:
        if outcome.status == "failed":
            return {"failed": printable(outcome.detail, 600)}
    passed = any(o.status == "passed" for o in outcomes)
    return {} if passed else {"unknown": "; ".join(o.detail for o in outcomes) or "no case fits it"}


if __name__ == "__main__":
    main()
