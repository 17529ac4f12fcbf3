"""Refuse what is not inference: training, gradients and attention weights."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_core.errors import UnsupportedError

_T = TypeVar("_T")


def refuse_arguments(decoder: Any, arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError for a call of the decoder that asks for more than inference."""
    config, embeds = decoder.config, arguments.get("inputs_embeds")
    if decoder.training:
        raise UnsupportedError("a model in training mode; attn-core is for inference: eval()")
    trains = embeds is not None and embeds.is_leaf and embeds.requires_grad
    if trains and torch.is_grad_enabled():
        raise UnsupportedError(
            "inputs_embeds that require gradients; attn-core does inference only: run under "
            "torch.no_grad(), or disable() attn-core for this call"
        )
    output_attentions = arguments.get("output_attentions")
    if config.output_attentions if output_attentions is None else output_attentions:
        raise UnsupportedError(
            "output_attentions: paged backends do not keep attention weights; "
            "disable() attn-core for this call"
        )


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
            "disable() it to train, or run under torch.no_grad()"
        )


def without(output: Any, cache: Any) -> Any:
    """Return a model's output without a cache that nobody asked for."""
    if isinstance(output, tuple):
        return tuple(x for x in output if x is not cache)
    return type(output)(**{name: x for name, x in output.items() if x is not cache})
