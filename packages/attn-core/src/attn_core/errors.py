"""One class per mistake a caller can act on; messages say what was asked and what to do."""

from __future__ import annotations


class AttnError(Exception):
    """Base of every error that attn-core raises for a caller's mistake."""


class UsageError(AttnError):
    """A value that cannot be understood: a name, a device, a number out of range."""


class UnknownBackendError(UsageError):
    """A backend name that no installed plugin declares."""


class ModelConfigError(AttnError):
    """A model directory or config.json that cannot be read or is not understood."""


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
