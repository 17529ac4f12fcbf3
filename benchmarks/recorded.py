"""Watch which functions of a vendor's library a backend calls, to make the same calls directly."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Call = Callable[[], object]

# module → the functions and methods behind which a library's own time begins
RUNS: dict[str, tuple[str, ...]] = {
    "sgl_kernel.flash_attn": ("flash_attn_with_kvcache", "flash_attn_varlen_func"),
    "flash_attn_interface": ("flash_attn_with_kvcache", "flash_attn_varlen_func"),
    "flash_attn.cute.interface": ("_flash_attn_fwd",),
    "flashinfer.decode": (
        "BatchDecodeWithPagedKVCacheWrapper.run",
        "trtllm_batch_decode_with_kv_cache",
    ),
    "flashinfer.prefill": (
        "BatchPrefillWithPagedKVCacheWrapper.run",
        "BatchPrefillWithRaggedKVCacheWrapper.run",
        "trtllm_batch_context_with_kv_cache",
    ),
    "flashinfer.mla": ("BatchMLAPagedAttentionWrapper.run",),
    "sgl_kernel.flash_mla": ("flash_mla_with_kvcache",),
    "flash_mla": ("flash_mla_with_kvcache",),
    "attn_core.ops.triton.launcher": ("Launcher.launch",),
}
PLANS: dict[str, tuple[str, ...]] = {
    "sgl_kernel.flash_attn": ("get_scheduler_metadata",),
    "flash_attn_interface": ("get_scheduler_metadata",),
    "flashinfer.decode": ("BatchDecodeWithPagedKVCacheWrapper.plan",),
    "flashinfer.prefill": (
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        "BatchPrefillWithRaggedKVCacheWrapper.plan",
    ),
    "flashinfer.mla": ("BatchMLAPagedAttentionWrapper.plan",),
    "sgl_kernel.flash_mla": ("get_mla_metadata",),
    "flash_mla": ("get_mla_decoding_metadata",),
    "attn_core.ops.triton.launcher": ("Launcher.launch",),
}


class Recorder:
    """The calls that were seen since the last `taken`; a call within a call is not one."""

    def __init__(self) -> None:
        self._calls: list[functools.partial[Any]] = []
        self._inside = False

    def taken(self) -> tuple[functools.partial[Any], ...]:
        """Return the calls, each with the arguments that it had, and forget them."""
        calls, self._calls = tuple(self._calls), []
        return calls

    def watching(self, function: Any) -> Any:
        """Return a function that notes the call and makes it."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._calls.append(functools.partial(function, *args, **kwargs))
            self._inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False

        return call


@contextlib.contextmanager
def recording(*tables: dict[str, tuple[str, ...]]) -> Iterator[Recorder]:
    """Watch the functions of these tables whose module is loaded already.

    A backend binds the library's functions when it is created: create it in here.
    """
    recorder = Recorder()
    functions = {(module, name) for table in tables for module in table for name in table[module]}
    with contextlib.ExitStack() as stack:
        for module, name in functions:
            if module not in sys.modules:
                continue
            owner: Any = sys.modules[module]
            *path, last = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            real = getattr(owner, last)
            setattr(owner, last, recorder.watching(real))
            stack.callback(setattr, owner, last, real)
        yield recorder


def plainly(call: functools.partial[Any]) -> functools.partial[Any]:
    """Return the same call without us: one of our launchers becomes Triton's own launch."""
    launcher = call.args[0] if call.args else None
    by_triton = getattr(launcher, "by_triton", None)
    return functools.partial(by_triton, *call.args[1:]) if by_triton else call


def in_turn(calls: Sequence[Call]) -> Call:
    """Return one call that makes all of these."""
    if len(calls) == 1:
        return calls[0]

    def call() -> None:
        for each in calls:
            each()

    return call
