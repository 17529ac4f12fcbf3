"""The operators of torch-npu as torch ops on a CPU: the wheel's schemas, emulated numbers.

They are defined once per process, since torch keeps them; the emulation is looked up at each call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from npu_schemas import SCHEMAS, leaf_of


def _emulated(name: str) -> Callable[..., object]:
    def call(*args: object, **more: object) -> object:
        return getattr(importlib.import_module("npu_leaf"), leaf_of(name))(*args, **more)

    return call


_KEPT = []
OPS = {}
for (_space, _name), _schema in SCHEMAS.items():
    _library = torch.library.Library(_space, "FRAGMENT")
    _library.define(_schema)
    _library.impl(_name, _emulated(_name), "CompositeExplicitAutograd")
    _KEPT.append(_library)
    _name = _name.partition(".")[0]  # an overload belongs to its operator
    OPS[_name] = getattr(getattr(torch.ops, _space), _name)
