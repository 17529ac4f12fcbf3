"""Which transformers architectures are supported, and the attention layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import DynamicCache

from attn_core.errors import UnsupportedError
from attn_core.forward import AttentionLayer

# Decoders of plain causal attention over one K/V cache: config.model_type, each compared token by
# token with the model's own eager attention in tests/integration.
SUPPORTED: frozenset[str] = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def check_supported(config: Mapping[str, object]) -> None:
    """Raise UnsupportedError where the architecture of a config is not supported."""
    name = config.get("model_type")
    if name not in SUPPORTED:
        raise UnsupportedError(
            f"model type {name!r} does not run through the transformers integration "
            f"(supports {', '.join(sorted(SUPPORTED))}); `attn select` chooses backends for it"
        )


def attention_layers(model: Any) -> tuple[AttentionLayer, ...]:
    """Read the attention layers off a model of a supported architecture, in order.

    The window of a layer is the one that transformers' own cache gives it. Raises UnsupportedError.
    """
    config = model.config
    check_supported(config.to_dict())
    windows = [getattr(x, "sliding_window", None) for x in DynamicCache(config=config).layers]
    modules = {
        m.layer_idx: m
        for m in model.get_decoder().modules()
        if hasattr(m, "layer_idx") and hasattr(m, "scaling")
    }
    if sorted(modules) != list(range(len(windows))):
        raise UnsupportedError(
            f"{type(model).__name__} has attention layers {sorted(modules)} for a cache of "
            f"{len(windows)} layers; attn-core needs one cache layer for each"
        )
    return tuple(
        AttentionLayer(
            layer_id=i,
            num_q_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=modules[i].head_dim,
            v_head_dim=modules[i].head_dim,
            scale=float(modules[i].scaling),
            sliding_window=window,
        )
        for i, window in enumerate(windows)
    )
