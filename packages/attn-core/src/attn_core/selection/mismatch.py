"""A requirement that a row does not meet, and the fixes that would close the gap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Literal

from attn_core.spec.requirements import Requirements

# "softmax" and "linear" are the layers of the model of that family, "vision" its tower. A fix of
# "layers" replaces all layers of a family, a fix of "tower" the whole tower.
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


class FixCost(IntEnum):
    """What a fix costs the caller; costs add up, and the search returns the cheapest sum."""

    NAME = 1  # a backend is named, allowed or no longer denied
    FLAG = 2  # another value of a flag
    FEATURE = 4  # something that was asked for is given up
    INSTALL = 6
    RUNTIME = 8
    DTYPE = 20
    MACHINE = 60
    MODEL = 200
    KIND = 400  # a model of another kind


@dataclass(frozen=True)
class Fix:
    """One thing that a caller can change: `values` are set on `target`; `text` describes it."""

    target: Target
    values: tuple[tuple[str, Any], ...]
    cost: int
    text: str


def apply_fix(needs: Requirements, fix: Fix) -> Requirements:
    """Apply a fix of the requirements or of the speculation in them."""
    values: dict[str, Any] = dict(fix.values)
    if fix.target == "speculation":
        speculation = needs.speculation
        return replace(needs, speculation=speculation and replace(speculation, **values))
    return replace(needs, **values)


@dataclass(frozen=True)
class Mismatch:
    """One requirement that a row does not meet; any one of `fixes` closes the gap."""

    need: str
    requested: str
    supported: str
    fixes: tuple[Fix, ...] = ()

    def __str__(self) -> str:
        return f"{self.requested} ({self.supported})"
