"""Emulates sglang-kernel 0.4.5: the Python of its kernels for a machine without CUDA."""

import contextlib

with contextlib.suppress(ImportError):
    from sgl_kernel.attention import *  # noqa: F403  # as the wheel does
