"""Compute in the dtypes that a backend names, where the caller runs under torch.autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])


def plain_precision(method: _Method) -> _Method:
    """Let a backend's method run without autocast: it would round the factors of every product."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = self.config.device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return method(self, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return method(self, *args, **kwargs)

    return cast(_Method, run)
