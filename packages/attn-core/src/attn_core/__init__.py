"""One contract for LLM attention over a paged KV cache; names are imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "capabilities": (
        "TREES BackendSpec Capabilities Device Kind LayerNeeds Phase Requirements Speculation"
    ),
    "hookspecs": "hookimpl",
    "plugins": "Registry load_plugins",
    "decision": "Overrides Selection Verdict",
    "selection": "select",
    "why_not": "WhyNot",
    "models": "context_length read_config requirements_from_config",
    "device": "parse_device probe_device",
    "forward": "AttentionLayer CacheView ForwardBatch ForwardMode SpecInfo",
    "backend": "AttentionBackend BackendConfig LinearAttentionBackend create_backend",
    "dispatcher": "HybridDispatcher",
    "kv_cache": "KVPool LayerCache StateCache StatePool",
    "allocator": "PageAllocator",
}
_NAMES = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = ["__version__", *_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'attn_core' has no attribute {name!r}")
    return getattr(importlib.import_module(f"attn_core.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
