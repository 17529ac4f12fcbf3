"""Read the profiles that plugins ship: what their backends were measured to cost on a device."""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from attn_core.plugins.data_files import data_files

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


@functools.cache
def _files(module: str) -> tuple[tuple[pathlib.Path, dict[str, Any] | str], ...]:
    return tuple(data_files(module, "profiles", _fault))


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
