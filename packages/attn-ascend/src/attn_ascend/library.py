"""The operators of torch-npu, found by name and held to the parameters that we pass."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from attn_core import BackendError

NAMESPACES: Final = ("npu", "atb")  # CANN's own operators, and those of its library ATB


def operator(name: str, parameters: Iterable[str]) -> Callable[..., Any]:
    """Return an operator of torch-npu that has these parameters; they are passed by keyword.

    Raises BackendError where the installed version has no such operator or it has other parameters,
    ImportError where torch-npu does not load.
    """
    module = importlib.import_module("torch_npu")
    call: Callable[..., Any] | None = getattr(module, name, None)
    schema = _schema(name)
    if call is None:
        raise BackendError(
            f"ascend: the installed torch-npu has no operator {name}; install the torch-npu whose "
            "version is that of torch, 2.11 or later, with the CANN that it was built for"
        )
    if schema is None:
        raise BackendError(
            f"ascend: torch-npu did not load {name}, an operator of ATB; install NNAL, which "
            "brings libatb.so, in the version of CANN, and source its set_env.sh"
        )
    accepted = [argument.name for argument in schema.arguments]
    missing = [p for p in parameters if p not in accepted]
    if missing:
        raise BackendError(
            f"ascend: {name} of the installed torch-npu has no parameter {', '.join(missing)} (it "
            f"has {', '.join(accepted)}); install torch-npu 2.11 or later"
        )
    return call


def _schema(name: str) -> Any:
    for namespace in NAMESPACES:
        overloads = getattr(getattr(torch.ops, namespace), name, None)
        if overloads is not None:
            return overloads.default._schema
    return None
