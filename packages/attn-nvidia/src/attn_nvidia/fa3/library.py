"""The build of FlashAttention-3 that is installed, behind one pair of signatures."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from attn_core import chosen_distribution
from torch import Tensor

_MODULES: Final[Mapping[str, str]] = {
    "flash-attn-3": "flash_attn_interface",  # upstream's own build
    "sglang-kernel": "sgl_kernel.flash_attn",  # has sinks as well
}


@dataclass(frozen=True, kw_only=True)
class Library:
    """What a build has; neither has stubs.

    paged is flash_attn_with_kvcache, ragged is flash_attn_varlen_func: both take `out` and
    `return_softmax_lse` and give out, or (out, lse [H, T], …). schedule: get_scheduler_metadata.
    """

    distribution: str
    paged: Any
    ragged: Any
    schedule: Any


def load(group: str) -> Library:
    """Import the build of an any-of group that is used.

    Raises BackendError where none is installed, ImportError where one is and does not load.
    """
    return _bind(chosen_distribution("fa3", group))


def _bind(name: str) -> Library:
    module: Any = importlib.import_module(_MODULES[name])
    paged, ragged = module.flash_attn_with_kvcache, module.flash_attn_varlen_func
    if "out" not in inspect.signature(paged).parameters:
        paged = _filling(paged, "return_softmax_lse")
    parameters = inspect.signature(ragged).parameters
    if "out" not in parameters:
        # the first releases have no such parameter and always return the log-sum-exp
        flag = "return_attn_probs" if "return_attn_probs" in parameters else None
        ragged = _filling(ragged, flag)
    return Library(
        distribution=name, paged=paged, ragged=ragged, schedule=module.get_scheduler_metadata
    )


def _filling(attend: Any, flag: str | None) -> Any:
    """Give a function that allocates its output the parameter `out`, by a copy."""

    def call(
        *tensors: Tensor, out: Tensor | None = None, return_softmax_lse: bool, **kwargs: Any
    ) -> Any:
        if flag is not None:
            kwargs[flag] = return_softmax_lse
        result = attend(*tensors, **kwargs)
        result, lse = result[:2] if isinstance(result, tuple) else (result, None)
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_softmax_lse else result

    return call
