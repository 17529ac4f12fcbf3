"""One class per mistake a caller can act on; messages say what was asked and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attn_core.decision import Selection


FEW = 8  # names that are listed whole


def near(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Say which known names are closest to `name`; list all where they are few or none is close.

    prefix: what all names begin with; it says nothing about how close they are.
    """
    ends = sorted({k.removeprefix(prefix) for k in known})
    close = difflib.get_close_matches(name.removeprefix(prefix), ends, n=3, cutoff=0.5)
    if close and len(ends) > FEW:
        return f"did you mean {' or '.join(prefix + end for end in close)}?"
    return f"known: {', '.join(prefix + end for end in ends)}" if ends else "none is known"


class AttnError(Exception):
    """Base of every error that attn-core raises for a caller's mistake."""


class UsageError(AttnError):
    """A value that cannot be understood: a name, a device, a number out of range."""


class UnknownBackendError(UsageError):
    """A backend name that no installed plugin declares."""


class ModelConfigError(AttnError):
    """A model directory or config.json that cannot be read or is not understood."""


class NoBackendError(AttnError):
    """No backend fits; `selection` is the decision as far as it came, with every verdict."""

    def __init__(self, message: str, selection: Selection) -> None:
        super().__init__(message)
        self.selection = selection


class BackendNotImplementedError(AttnError):
    """A backend that is declared, so it can be selected and explained, but not built yet."""


class BackendError(AttnError):
    """A backend that cannot be created, or that broke its contract."""


class BackendRunError(BackendError):
    """A backend that failed in the middle of a pass; its own error is the cause.

    restart: the device's context is lost, so that nothing runs any more in this process.
    Otherwise cache and dispatcher are as before, and the next pass may be run.
    """

    def __init__(self, message: str, *, restart: bool = False) -> None:
        super().__init__(message)
        self.restart = restart


class BatchError(AttnError):
    """A ForwardBatch whose parts do not agree."""


class UnsupportedError(AttnError):
    """A call asks for something that the chosen row does not honour."""


class OutOfPagesError(AttnError):
    """The KV cache has too few free pages for the request."""


class ContextLengthError(AttnError):
    """A prompt, with what is to be generated, is longer than the context."""
