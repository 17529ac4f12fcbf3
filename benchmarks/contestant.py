"""Who is measured: a name, the library behind it, the cases it takes, and how it is called."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.cases import Case, Inputs

Call = Callable[[], Tensor]  # the output [T, Hq, Dv] of one pass, in any shape of that order


def _takes_all(case: Case) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to compute a case.

    phases: of the cases it is asked at all. refuses: "" or why a case of these cannot be done.
    prepare: plans and converts, untimed; what it returns is timed, and may compile at first use.
    """

    name: str
    distribution: str
    module: str
    phases: frozenset[str]
    prepare: Callable[[Inputs], Call]
    refuses: Callable[[Case], str] = _takes_all

    def available(self) -> bool:
        """Say whether the library can be found; nothing is imported but its parent packages."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ImportError:  # a parent package is missing
            return False


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, None where it is missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
