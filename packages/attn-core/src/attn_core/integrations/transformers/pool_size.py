"""Check, before the weights are loaded, that the machine can hold the requested KV cache."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.errors import UsageError
from attn_core.model_config import context_length
from attn_core.selection.result import Selection
from attn_core.spec.kinds import LINEAR_KINDS
from attn_core.spec.requirements import LayerRequirements

_LARGE_PAGE = 1024  # tokens; no kernel has larger ones


def check_size(
    keys: Mapping[str, object],
    layers: tuple[LayerRequirements, ...],
    selection: Selection,
    num_pages: int | None,
    device: torch.device,
) -> None:
    """Raise UsageError for pages beyond the context, and for a pool that a device cannot hold."""
    size, context = selection.page_size or 1, context_length(keys)
    if context is not None and size > max(context, _LARGE_PAGE):
        raise UsageError(f"--page-size {size}: above the model's context of {context} tokens")
    tokens = size * (num_pages or 3)  # with no number: the dummy, one in use, one to grow into
    softmax = [x for x in layers if x.kind not in LINEAR_KINDS]
    values = {x: 0 if x.kind in ("mla", "dsa") else x.v_head_dim or 0 for x in softmax}
    numbers = min((x.num_kv_heads or 1) * ((x.head_dim or 1) + values[x]) for x in softmax)
    depth = keys.get("num_hidden_layers") if softmax == list(layers) else 1
    bits = (
        4
        if selection.kv_cache_dtype == "fp4_e2m1"
        else 8 * TORCH_DTYPES[selection.kv_cache_dtype].itemsize
    )
    minimum = tokens * numbers * (depth if isinstance(depth, int) else 1) * bits // 8
    memory = _memory(device)
    if minimum > memory:
        flag = f"--page-size {size}" if num_pages is None else f"--num-pages {num_pages}"
        raise UsageError(
            f"{flag}: {tokens} tokens of KV cache take {minimum / 1e9:.0f} GB or more, {device} "
            f"has {memory / 1e9:.0f} GB; ask for fewer tokens"
        )


def _memory(device: torch.device) -> int:
    """Return the bytes of memory that a device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return 1 << 40
