"""Replace the forward of a model's modules, and put it back; find the cache of a call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import MethodType
from typing import Any

from torch import nn

# what transformers calls the cache: since 5.24; before, a model and its attention; a linear layer
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
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


def take_cache(arguments: dict[str, Any]) -> Any:
    """Return the cache among a forward's arguments by name, and leave it out of them; or None."""
    caches = [arguments.pop(name, None) for name in CACHE_NAMES]
    return next((cache for cache in caches if cache is not None), None)


def cache_argument(names: Collection[str]) -> str:
    """Return the name by which a decoder takes its cache. names: of its forward's parameters."""
    return next((name for name in CACHE_NAMES if name in names), "past_key_values")
