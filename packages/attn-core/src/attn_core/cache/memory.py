"""Memory of caches."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20  # bytes, on x86-64 and on arm64 with pages of 4 KiB


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Return a cache of zeros that passes with and without inference mode may write.

    On a CPU it lies in huge pages where the system offers them (Linux, `madvise` or `always` in
    /sys/kernel/mm/transparent_hugepage/enabled). Tokens of a request lie far apart in a paged
    cache, and each would need an address translation of its own.
    """
    with torch.inference_mode(False):
        cache = torch.empty(*shape, dtype=dtype, device=device)
        if cache.device.type == "cpu" and type(cache) is Tensor:
            _advise_huge_pages(cache)
        return cache.zero_()


def _advise_huge_pages(x: Tensor) -> None:
    """Advise huge pages for memory that was not written to yet."""
    start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = x.data_ptr() + x.nbytes - start
    if x.nbytes < 2 * _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    advise = ctypes.CDLL(None).madvise
    advise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_HUGEPAGE))
