"""Refuse what is not inference: training, traces and attention weights."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.errors import UnsupportedError


def refuse_arguments(decoder: Any, arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError for a call of the decoder that asks for more than inference."""
    config, embeds = decoder.config, arguments.get("inputs_embeds")
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]  # torch's own name
        raise UnsupportedError(
            "torch.jit.trace: a trace would keep the pages of one pass for all; disable() "
            "attn-core for this call, or use torch.compile"
        )
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


def without(output: Any, cache: Any) -> Any:
    """Return a model's output without a cache that nobody asked for."""
    if isinstance(output, tuple):
        return tuple(x for x in output if x is not cache)
    return type(output)(**{name: x for name, x in output.items() if x is not cache})
