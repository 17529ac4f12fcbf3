"""What `attn doctor` says of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: what was found, the verdict and the command that fixes it."""

    subject: str
    found: str
    level: Level
    verdict: str
    fix: str = ""
