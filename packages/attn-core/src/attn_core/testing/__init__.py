"""The conformance suites: BackendSuite and LinearSuite for pytest, `attn check` for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_core.testing.suite import BackendSuite, LinearSuite

__all__ = ["BackendSuite", "LinearSuite"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'attn_core.testing' has no attribute {name!r}")
    from attn_core.testing import suite  # the one part that needs pytest

    return getattr(suite, name)
