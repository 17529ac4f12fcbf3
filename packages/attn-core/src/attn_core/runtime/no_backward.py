"""Refuse a backward pass: no backend keeps gradients, and those of K and V end at the cache."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_core.errors import UnsupportedError

_T = TypeVar("_T")


def no_backward(output: _T, *sources: Tensor) -> _T:
    """Return `output`, through which a backward pass to `sources` raises UnsupportedError.

    output: a tensor, or a tuple or a transformers output of tensors; all else in it stays as it is.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in sources)):
        return output
    return _guarded(output, sources)  # type: ignore[no-any-return]


def _guarded(value: Any, sources: tuple[Tensor, ...]) -> Any:
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        return _NoBackward.apply(value, *sources)  # type: ignore[no-untyped-call]  # torch has none
    if isinstance(value, dict):  # a transformers output is one too
        return type(value)(**{name: _guarded(x, sources) for name, x in value.items()})
    return tuple(_guarded(x, sources) for x in value) if type(value) is tuple else value


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *sources: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(
            "a backward pass through attn-core, which does inference only and keeps no gradients; "
            "disable() it to train (a transformers model), or run under torch.no_grad()"
        )
