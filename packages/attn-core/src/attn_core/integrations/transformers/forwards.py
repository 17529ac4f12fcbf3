"""Replace the forward of a model's modules, and put it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch import nn

_REPLACED = "_attn_core_replaced"  # on a module: the forward that another tool had set there


def replace_forward(modules: Iterable[nn.Module], forward: Callable[..., Any]) -> None:
    """Let modules run `forward`, whose first argument is the module."""
    for module in modules:
        if "forward" in vars(module):
            vars(module)[_REPLACED] = vars(module)["forward"]
        vars(module)["forward"] = MethodType(forward, module)


def restore_forward(modules: Iterable[nn.Module]) -> None:
    """Undo replace_forward."""
    for module in modules:
        vars(module).pop("forward", None)
        if _REPLACED in vars(module):
            vars(module)["forward"] = vars(module).pop(_REPLACED)
