"""The compiled kernels: where they lie, and their functions as ctypes calls them."""

from __future__ import annotations

import ctypes
import os
from ctypes import CDLL, POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Final

from attn_core import BackendError

from attn_intel.cpu.build import COMMAND, compiled_library

LEVELS: Final = ("avx2", "avx512", "avx512_bf16", "amx_bf16")  # `level` of the header, rising


class Attention(Structure):
    """The arguments of one call, as source/attention.h has them; it says what each means."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "out", "lse", "sinks", "tree", "table")),
        *((name, c_void_p) for name in ("seq_lens", "cu_seqlens_q", "cu_seqlens_k", "parallel")),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        *((name, c_int64) for name in ("q_token", "q_head", "out_token", "out_head", "table_row")),
        *((name, c_int64) for name in ("tokens", "pages", "columns")),
        *((name, c_int64) for name in ("k_page", "k_token", "k_head")),
        *((name, c_int64) for name in ("v_page", "v_token", "v_head")),
        *((name, c_int32) for name in ("q_type", "kv_type", "out_type", "level", "threads")),
        *((name, c_int32) for name in ("requests", "q_heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("v_head_dim", "page_size", "drafts", "window", "causal")),
        *((name, c_float) for name in ("scale", "v_scale", "logit_cap")),
    )


class Linear(Structure):
    """The arguments of one product of few rows, as source/attention.h has them."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "out", "parallel")),
        *((name, c_int64) for name in ("rows", "inputs", "outputs")),
        *((name, c_int32) for name in ("type", "level", "threads")),
    )


class Kernels:
    """The loaded library: the level of this CPU, `attend` and `linear`.

    parallel: GOMP_parallel, None in a forked child of the process that loaded it: OpenMP's threads
    stay behind in the parent, and a child that counts on them waits for ever.
    """

    def __init__(self, path: str) -> None:
        library = CDLL(path)
        library.attn_cpu_level.restype = c_int
        level: int = library.attn_cpu_level()
        if level < 0:
            raise BackendError(
                "intel_amx needs a CPU with AVX2, FMA and F16C, this one lacks one of them; use "
                "torch_native"
            )
        self.level = level
        self.attend = library.attn_attend
        self.attend.restype, self.attend.argtypes = c_int64, (POINTER(Attention),)
        self.linear = library.attn_linear
        self.linear.restype, self.linear.argtypes = None, (POINTER(Linear),)
        # torch has loaded its OpenMP for all: its threads are used, not a second pool of them
        run = getattr(CDLL(None), "GOMP_parallel", None)
        self.parallel = None if run is None else ctypes.cast(run, c_void_p).value
        os.register_at_fork(after_in_child=self._go_alone)

    def _go_alone(self) -> None:
        self.parallel = None


@cache
def load() -> Kernels:
    """Load the compiled kernels, once. Raises BackendError where there are none."""
    path = compiled_library()
    if path is None:
        raise BackendError(
            "intel_amx: its kernels are not compiled here; install attn-intel's wheel for "
            f"x86-64 Linux or, with a C compiler, run `{COMMAND}` once"
        )
    try:
        return Kernels(str(path))
    except (OSError, AttributeError) as error:  # no library, or another one
        raise BackendError(
            f"intel_amx: {path} does not load: {error}; delete it and run `{COMMAND}`"
        ) from error
