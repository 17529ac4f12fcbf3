"""A requirement that a row does not meet, and the changes that would close the gap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from attn_core.spec.requirements import Requirements

# "softmax" and "linear" are the layers of the model of that family, "vision" its tower. A change of
# "layers" replaces all layers of a family, a change of "tower" the whole tower.
Target = Literal[
    "requirements",
    "speculation",
    "softmax",
    "linear",
    "vision",
    "device",
    "libraries",
    "overrides",
]

# What a change costs the caller: a flag, an installation, another machine, another model, and
# last a model of another kind. Naming a backend for one phase only costs 1.
FLAG, FEATURE, INSTALL, RUNTIME, DTYPE, MACHINE, MODEL, KIND = 2, 4, 6, 8, 20, 60, 200, 400


@dataclass(frozen=True)
class Fix:
    """One thing that a caller can change: `values` are set on `target`; `text` describes it."""

    target: Target
    values: tuple[tuple[str, Any], ...]
    cost: int
    text: str


def changed(needs: Requirements, change: Fix) -> Requirements:
    """Apply a change of the requirements or of the speculation in them."""
    values: dict[str, Any] = dict(change.values)
    if change.target == "speculation":
        now = needs.speculation
        return replace(needs, speculation=now and replace(now, **values))
    return replace(needs, **values)


@dataclass(frozen=True)
class Mismatch:
    """One requirement that a row does not meet; any one of `changes` closes the gap."""

    need: str
    asked: str
    supported: str
    changes: tuple[Fix, ...] = ()

    def __str__(self) -> str:
        return f"{self.asked} ({self.supported})"
