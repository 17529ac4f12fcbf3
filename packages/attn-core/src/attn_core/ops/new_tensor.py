"""Make new tensors in half the time that torch.empty takes, where torch's compiler can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def new_tensor(
    x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return a new tensor beside x, not filled. strides: those of a contiguous one.

    On the current GPU it is made by what the code of torch's compiler calls, past the dispatcher.
    """
    if _QUICK is not None and x.get_device() == _current_device():
        return _QUICK(shape, strides, dtype)
    return x.new_empty(shape, dtype=dtype)


def _quick() -> Callable[..., Tensor] | None:
    try:
        empty_strided: Any = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
    except AttributeError:
        return None
    return empty_strided if torch.version.cuda and hasattr(torch._C, "_cuda_getDevice") else None


_QUICK = _quick()
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -2)
