"""Compare tensors with others in one call, and number what is equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Fits = Callable[..., bool]


def same_form(*tensors: Tensor) -> Fits:
    """Return what says of as many tensors whether each has the form of its counterpart in these.

    That is their type, dtype, device, shape and strides, and whether they require gradients; not
    where they lie. Where one tensor is given twice, or in another mode of autograd, it may say no.
    torch's guards compare all of them in one call, in a tenth of the time that their attributes
    take to read.
    """
    try:
        guards = None if _ON_AMD else _GUARDS(
            *tensors,
            dynamic_dims_sizes=[[*x.shape] for x in tensors],
            dynamic_dims_strides=[[*x.stride()] for x in tensors],
        )  # fmt: skip
        if guards is not None and guards.check(*tensors):
            check: Fits = guards.check
            return check
    except Exception:  # torch's own, which another torch may lack or change
        pass
    forms = [*map(_form, tensors)]
    return lambda *others: [*map(_form, others)] == forms


def form_of(*tensors: Tensor | None) -> int:
    """Return a number that is equal for tensors of one form, but for their first dimensions."""
    forms = (
        None if x is None else (x.dtype, x.device, x.shape[1:], x.stride(), _large(x))
        for x in tensors
    )
    return numbered(("form", *forms))


def numbered(key: Hashable) -> int:
    """Return a number that is equal for equal keys: long keys are hashed once, not in each call."""
    return _NUMBERS.setdefault(key, next(_COUNT))


def _form(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.dtype, x.device, x.shape, x.stride(), x.requires_grad, _large(x)


def _large(x: Tensor) -> bool:
    """Say whether Triton compiles 64-bit offsets for a storage, as it does on AMD from 2 GiB on."""
    return _ON_AMD and x.untyped_storage().size() >> 31 > 0


def _guards() -> Any:
    try:
        return torch._C._dynamo.guards.TensorGuards
    except AttributeError:
        return None


_GUARDS = _guards()
_ON_AMD = torch.version.hip is not None
_NUMBERS: dict[Hashable, int] = {}
_COUNT = itertools.count()  # threads never draw the same number
