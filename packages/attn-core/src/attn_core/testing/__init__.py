"""The conformance suite: `BackendSuite` for pytest, `attn check` for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_core.testing.suite import BackendSuite

__all__ = ["BackendSuite"]


def __getattr__(name: str) -> Any:
    if name != "BackendSuite":
        raise AttributeError(f"module 'attn_core.testing' has no attribute {name!r}")
    from attn_core.testing.suite import BackendSuite  # the one part that needs pytest

    return BackendSuite
