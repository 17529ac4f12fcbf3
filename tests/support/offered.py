"""What the emulators offer, and what our code takes of a library behind its public names."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Set as AbstractSet

from signatures import Sources


def reached(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return every attribute that the code below a folder takes of something else than itself."""
    result = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if not own:
                    result[node.attr] = path
    return result


def emulated(
    ours: Sources,
    theirs: Sources,
    helpers: AbstractSet[str] = frozenset(),
    used: AbstractSet[str] = frozenset(),
) -> list[tuple[str, str]]:
    """List what the public modules of `ours` offer: (module, name) of every function or class
    that is defined in the module's own package.

    The emulation's own business are helpers, top-level modules that emulate nothing; names and
    modules with an underscore in front, but for names that are `used`; and what a module imports,
    uses itself, and the library does not have there.
    """
    offered = []
    for module in ours.modules():
        parts = module.name.split(".")
        if parts[0] in helpers or any(p.startswith("_") for p in parts):
            continue
        for name, node in module.bound.items():
            hidden = name.startswith("*") or (name.startswith("_") and name not in used)
            result = None if hidden else ours.find(module.name, name)
            if result is None or result.module.name.split(".")[0] != parts[0]:
                continue
            helper = isinstance(node, ast.ImportFrom) and name in module.used
            if not helper or theirs.find(module.name, name) is not None:
                offered.append((module.name, name))
    return offered
