"""Linear layers of a model, in the class that an attention backend brings for few rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from attn_core.runtime.backend import AttentionBackend


def speed_up_linear(model: Any, backend: AttentionBackend) -> list[nn.Linear]:
    """Give a model's plain linear layers the backend's class, and return them.

    Their weights stay as they are and where they are. Layers of other classes, as adapters' are,
    and layers whose forward was replaced are left alone; so is a model whose backend has no class.
    """
    kind = backend.linear_class()
    plain = [x for x in model.modules() if type(x) is nn.Linear and "forward" not in vars(x)]
    if kind is None:
        return []
    for layer in plain:
        layer.__class__ = kind
    return plain


def slow_down_linear(layers: Iterable[nn.Linear]) -> None:
    """Make the layers that speed_up_linear has returned plain ones again."""
    for layer in layers:
        layer.__class__ = nn.Linear
