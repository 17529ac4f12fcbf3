"""Turn a backend's failure during a pass into an error that says who, in which pass, what to do."""

from __future__ import annotations

import torch

from attn_core.errors import AttnError, BackendRunError
from attn_core.runtime.backend import BackendConfig
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.linear import LinearLayer

# A pass may be run again after a failure, for nothing is left half done: new K and V lie in the
# slots that the batch names for them, where the same or another pass overwrites them; the pages
# of other tokens are only read; what was planned belongs to the pass, and a backend's buffers are
# filled anew by every plan. The states of linear layers are the exception: those of the layers that
# ran have taken in the tokens, unless the pass writes into other slots than it reads.

# What CUDA and ROCm call the errors after which every call of the process fails.
_STICKY = (
    "illegal memory access",
    "unspecified launch failure",
    "device-side assert triggered",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "hardware stack error",
    "not supported on global/shared address space",
    "launch timed out and was terminated",
    "uncorrectable ECC error",
)
_MEMORY = ("out of memory", "can't allocate memory", "Buffer overflow when allocating")


def run_error(
    config: BackendConfig,
    method: str,
    error: Exception,
    batch: ForwardBatch | None = None,
    layer: AttentionLayer | LinearLayer | None = None,
) -> BackendRunError:
    """Return the error for an exception that a backend raised in `method`.

    It names the backend and the pass (mode, layer, batch size, tokens). It repeats the backend's
    message and says what to do: use less memory, restart the process, or use other kernels.
    """
    message = f"{type(error).__name__}: {error}"
    parts = [f"{config.name} failed in {method}"]
    if layer is not None:
        parts.append(f"layer {layer.layer_id}")
    if batch is not None:
        mode = batch.forward_mode.value
        article = "an" if mode[0] in "ei" else "a"
        parts.append(f"{article} {mode} pass of batch size {batch.batch_size}")
        parts.append(f"{batch.num_tokens} tokens")
    restart = _mentions(message, _STICKY)
    if restart:
        advice = (
            "the device's context is lost: restart the process; CUDA_LAUNCH_BLOCKING=1 shows the "
            "kernel that it was"
        )
    elif isinstance(error, torch.OutOfMemoryError | MemoryError) or _mentions(message, _MEMORY):
        advice = (
            "run a smaller batch (max_bs, max_num_tokens) or give the KV cache fewer pages; the "
            "next pass may be run"
        )
    else:
        advice = (
            "`attn doctor` looks at its libraries, `attn warmup` builds its kernels ahead of time; "
            "or choose another with --attention-backend or --deny; the next pass may be run"
        )
    return BackendRunError(f"{', '.join(parts)}: {message}; {advice}", restart=restart)


def _mentions(message: str, texts: tuple[str, ...]) -> bool:
    return any(text in message for text in texts)


class backend_errors:  # noqa: N801  # used like a function; a class avoids the cost of contextlib
    """Re-raise a backend's error as run_error describes it; errors of attn-core pass through."""

    __slots__ = ("batch", "config", "layer", "method")

    def __init__(
        self,
        config: BackendConfig,
        method: str,
        batch: ForwardBatch | None = None,
        layer: AttentionLayer | None = None,
    ) -> None:
        self.config, self.method, self.batch, self.layer = config, method, batch, layer

    def __enter__(self) -> None:
        """Enter."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Name the owner of a plugin's error, and keep it as the cause."""
        if isinstance(error, Exception) and not isinstance(error, AttnError):
            raise run_error(self.config, self.method, error, self.batch, self.layer) from error
