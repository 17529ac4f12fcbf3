"""Read the profiles that plugins ship: what their backends were measured to cost on a device."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Costs = Mapping[str, Mapping[str, float]]  # what a pass does → backend → cost, in any one unit


def costs(modules: Iterable[str], device: str) -> Costs:
    """Return what was measured on a device, by its driver's name for it: "NVIDIA H200".

    modules: the values of the plugins' entry points.
    A profile is a JSON file in the folder `profiles` of a plugin's package: {"device": …, "costs":
    {what a pass does: {backend: cost}}, …}. Costs of one pass are of one unit, the same shapes and
    one run. A file that cannot be read is skipped, and `faults` names it.
    """
    merged: dict[str, Mapping[str, float]] = {}
    for module in dict.fromkeys(modules):
        for _, data in _files(module):
            if not isinstance(data, str) and data["device"] == device:
                merged |= data["costs"]
    return merged


def faults(modules: Iterable[str]) -> list[str]:
    """Return one sentence for every profile that is skipped."""
    return [
        f"profile {path} is skipped: {data}"
        for module in sorted(set(modules))
        for path, data in _files(module)
        if isinstance(data, str)
    ]


def _files(module: str) -> Iterator[tuple[pathlib.Path, dict[str, Any] | str]]:
    package = re.match(r"\w+", module)  # of "package", "package.module:attribute"
    return iter(_files_of(package[0]) if package else ())


@functools.cache
def _files_of(package: str) -> tuple[tuple[pathlib.Path, dict[str, Any] | str], ...]:
    """Return each profile of a package with its content, or with what is wrong with it."""
    try:
        root = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # ValueError: an object without a spec stands for the module
        root = None
    found = []
    for folder in (root.submodule_search_locations or ()) if root else ():
        for path in sorted((pathlib.Path(folder) / "profiles").glob("*.json")):
            try:
                data = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                found.append((path, f"{type(error).__name__}: {error}"))
            else:
                found.append((path, _fault(data) or data))
    return tuple(found)


def _fault(data: Any) -> str | None:
    if not isinstance(data, dict):
        return f"it holds a JSON {type(data).__name__}, not an object"
    for key, wanted in (("device", str), ("costs", dict)):
        if not isinstance(data.get(key), wanted):
            return f"{key} is {data.get(key)!r} (expected a {wanted.__name__})"
    for task, backends in data["costs"].items():
        if not isinstance(backends, dict):
            return f"the costs of {task} are {backends!r} (expected backend: cost)"
        for name, cost in backends.items():
            number = isinstance(cost, int | float) and not isinstance(cost, bool)
            if not number or not math.isfinite(cost) or cost <= 0:
                return f"{name} costs {cost!r} in {task} (expected a finite number above 0)"
    return None
