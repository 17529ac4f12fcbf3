"""AITER's functions, found by name and held to the parameters that we pass."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from attn_core import BackendError

# Its Triton functions lie in one of these packages, newer versions first.
_TRITON = ("aiter.ops.triton.attention", "aiter.ops.triton")


def function(name: str, parameters: Iterable[str], module: str = "aiter") -> Callable[..., Any]:
    """Return a function of AITER that has these parameters; they are passed by keyword.

    Raises BackendError where the module is another project's or its function has other parameters,
    ImportError where AITER is installed and does not load.
    """
    call = getattr(importlib.import_module(module), name, None)
    if call is None:
        raise BackendError(
            f"aiter: the installed module {module!r} has no {name}: it is not AMD's AITER, or a "
            "version of it that is not supported; the package named aiter is an unrelated project "
            "with the same module name: pip uninstall aiter, then pip install --pre "
            "--force-reinstall --no-deps amd-aiter"
        )
    accepted = inspect.signature(call).parameters
    missing = [p for p in parameters if p not in accepted]
    if missing:
        raise BackendError(
            f"aiter: {name} of the installed AITER has no parameter {', '.join(missing)} (it has "
            f"{', '.join(accepted)}); install amd-aiter 0.1.7 or a build of its main branch"
        )
    attend: Callable[..., Any] = call
    return attend


def triton_function(name: str, parameters: Iterable[str]) -> Callable[..., Any]:
    """Return the function of one of AITER's Triton modules, wherever the version has it."""
    for package in _TRITON:
        module = f"{package}.{name}"
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name not in (package, module):
                raise
        else:
            return function(_FUNCTIONS.get(name, name), parameters, module)
    raise BackendError(
        f"aiter: the installed AITER has no {name} in {' or '.join(_TRITON)}; install amd-aiter "
        "0.1.7 or a build of its main branch"
    )


_FUNCTIONS = {"extend_attention": "extend_attention_fwd"}
