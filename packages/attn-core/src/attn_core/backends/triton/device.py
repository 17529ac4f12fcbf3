"""What the backend asks of a device: its name, its size, and which kernels it has of its own."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from attn_core.backends.triton.split_kv import UNSPLIT_KEYS


def unsplit_keys_on(device: torch.device) -> int:
    """Return the longest KV length that is never split; 0 in the interpreter, so that it splits."""
    return UNSPLIT_KEYS if device.type == "cuda" else 0


def hopper_on(arch: str) -> ModuleType | None:
    """Import the kernels of Hopper on a Hopper; they need a Triton with Gluon for it, 3.6."""
    if arch != "sm90":
        return None
    try:
        return importlib.import_module("attn_core.backends.triton.hopper.launch")
    except ImportError:
        return None
