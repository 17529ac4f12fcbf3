"""Errors that a caller can act on. Each message says what was asked and what to do."""

from __future__ import annotations


class AttnError(Exception):
    """Base class of every error that attn-core raises for a caller's mistake."""


class UsageError(AttnError):
    """An invalid value: an unknown name, an unknown device, a number out of range."""


class UnknownBackendError(UsageError):
    """A backend name that no installed plugin declares."""


class ModelConfigError(AttnError):
    """A model directory or config.json that cannot be read or understood."""


class LockError(AttnError):
    """The selection is another than the one that was locked; the message says what changed."""


class BackendNotImplementedError(AttnError):
    """The backend is declared, so it can be selected and explained, but it is not implemented."""


class BackendError(AttnError):
    """A backend cannot be created, or it violated the contract."""


class BackendRunError(BackendError):
    """A backend failed during a pass; its own error is the cause.

    restart: True if the device context is lost, so that nothing can run in this process any more.
    Otherwise cache and dispatcher are unchanged, and the next pass can run.
    """

    def __init__(self, message: str, *, restart: bool = False) -> None:
        super().__init__(message)
        self.restart = restart


class BatchError(AttnError):
    """The parts of a ForwardBatch, or the tensors of a call, do not match."""


class UnsupportedError(AttnError):
    """A call asks for something that the backend's row does not support."""


class OutOfPagesError(AttnError):
    """The KV cache has too few free pages for the request."""


class ContextLengthError(AttnError):
    """The prompt and the tokens to generate do not fit into the model's context."""
