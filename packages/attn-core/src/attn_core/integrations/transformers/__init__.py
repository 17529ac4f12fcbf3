"""Run a transformers model's own generate() on paged pools and selected attention backends."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("transformers") is None:
    raise ImportError(
        "attn_core.integrations.transformers needs transformers: "
        "pip install 'attn-core[transformers]'"
    )

from attn_core.integrations.transformers.architectures import SUPPORTED
from attn_core.integrations.transformers.attention import register
from attn_core.integrations.transformers.batches import enable_batches, register_batches
from attn_core.integrations.transformers.engine import Engine, enable
from attn_core.integrations.transformers.select import select_for

__all__ = ["SUPPORTED", "Engine", "enable", "enable_batches", "select_for"]

register()  # the names for attn_implementation
register_batches()
