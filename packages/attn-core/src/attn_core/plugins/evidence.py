"""Read and check evidence files, which say how far each cell of the support matrix was tested."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from attn_core.plugins.data_files import data_files

LEVELS = ("declared", "emulated", "compiled", "device-tested")


def levels(
    module: str,
    backend: str,
    kind: str,
    device: str | None = None,
    *,
    platform: str | None = None,
) -> dict[str, str]:
    """Return the strongest evidence per cell from the evidence files of a plugin's package.

    module: the value of the plugin's entry point.
    device: such as "cuda:sm90"; None means any. platform: such as "cuda", of all its devices.
    A file is JSON: {"backend", "kind", "device", "cells": {cell: {"level": one of LEVELS, …}}, …}.
    A file that cannot be read is skipped, and `faults` names it.
    """
    levels: dict[str, str] = {}
    for _, data in _files(module):
        if isinstance(data, str) or (data["backend"], data["kind"]) != (backend, kind):
            continue
        tested = str(data.get("device"))
        if device not in (None, tested) or platform not in (None, tested.partition(":")[0]):
            continue
        for cell, proof in data["cells"].items():
            levels[cell] = max(levels.get(cell, LEVELS[0]), proof["level"], key=LEVELS.index)
    return levels


def proved(module: str, backend: str, kind: str, device: str) -> str:
    """Summarise the evidence for a backend on a device: "mha on cuda:sm100: 9 cells compiled"."""
    counts = Counter(levels(module, backend, kind, device).values())
    ordered = sorted(counts, key=LEVELS.index, reverse=True)
    cells = ", ".join(f"{counts[x]} cell{'s' * (counts[x] > 1)} {x}" for x in ordered)
    return f"{kind} on {device}: {cells or 'declared, nothing is proved'}"


def faults(modules: Iterable[str]) -> list[str]:
    """Return one sentence for every evidence file that is skipped."""
    return [
        f"evidence file {path} is skipped: {data}"
        for module in sorted(set(modules))
        for path, data in _files(module)
        if isinstance(data, str)
    ]


def _files(module: str) -> Iterator[tuple[pathlib.Path, dict[str, Any] | str]]:
    return data_files(module, "evidence", _fault)


def _fault(data: Any) -> str | None:
    if not isinstance(data, dict):
        return f"it holds a JSON {type(data).__name__}, not an object"
    for key, expected in (("backend", str), ("kind", str), ("cells", dict)):
        if not isinstance(data.get(key), expected):
            return f"{key} is {data.get(key)!r} (expected a {expected.__name__})"
    for cell, proof in data["cells"].items():
        level = proof.get("level") if isinstance(proof, dict) else None
        if level not in LEVELS:
            return f"cell {cell} has level {level!r} (expected {', '.join(LEVELS)})"
    return None
