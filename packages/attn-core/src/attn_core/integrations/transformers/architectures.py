"""Which transformers architectures are supported, and the attention layers of a model."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from attn_core.errors import UnsupportedError, near
from attn_core.forward import AttentionLayer

# Decoders of plain causal attention over one K/V cache: config.model_type, each compared token by
# token with the model's own eager attention in tests/integration.
SUPPORTED: frozenset[str] = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def text_config(config: Any) -> Any:
    """Return the config of the language model. Raises UnsupportedError for one not supported."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{config.model_type} is an encoder-decoder; {_possible('')}")
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise UnsupportedError(f"{config.model_type} has more than a decoder; {_possible('')}")
    if config.model_type not in SUPPORTED:
        raise UnsupportedError(f"model type {config.model_type!r}: {_possible(config.model_type)}")
    return text


def _possible(name: str) -> str:
    hint = f"{near(name, SUPPORTED)}; " if name else ""
    return f"{hint}attn-core runs {', '.join(sorted(SUPPORTED))} through transformers"


def attention_layers(model: Any) -> tuple[AttentionLayer, ...]:
    """Read the attention layers off a model of a supported architecture, in order.

    The window of a layer is the one that transformers' own cache gives it. Raises UnsupportedError.
    """
    config = text_config(model.config)
    windows = [getattr(x, "sliding_window", None) for x in DynamicCache(config=config).layers]
    modules = {
        m.layer_idx: m
        for m in model.get_decoder().modules()
        if hasattr(m, "layer_idx") and hasattr(m, "scaling")
    }
    if sorted(modules) != list(range(len(windows))):
        raise UnsupportedError(
            f"{type(model).__name__} has attention layers {sorted(modules)} for a cache of "
            f"{len(windows)} layers; {_possible('')}"
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
