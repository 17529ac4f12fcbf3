"""The supported transformers architectures, and where their models call attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from attn_core.errors import UnsupportedError
from attn_core.integrations.transformers.dual_chunk import ChunkRotary, read_rotary
from attn_core.integrations.transformers.indexers import read_indexers
from attn_core.integrations.transformers.linear_modules import is_linear, linear_layer
from attn_core.model_config import read_vertical_slash
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.linear import LinearLayer

_N = TypeVar("_N", int, float)

# config.model_type, each compared token by token with the model's own eager attention in
# tests/integration.
SUPPORTED: frozenset[str] = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss"),
        *("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "qwen2_vl"),
        *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        "kimi_linear",
    }
)
_DECODERS = SUPPORTED | {"qwen2_vl_text"}  # what the config of a decoder, a part of a model, says


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelAttention:
    """The attention of a model: each layer as attn-core sees it, and the module that calls it.

    layers: those with keys and values in the cache; layer_id is the cache layer. Layers with a
    window lie in the view "window", the others in "full". kind: "mla" is absorbed, and so is "dsa",
    sparse MLA. indexers: of the layers of kind "dsa" that share no other layer's selection, by
    layer_id. linear_layers: those with a state instead. vision_layers: those of the vision tower.
    rotary: of a model with dual chunk attention.
    """

    layers: tuple[AttentionLayer, ...]
    modules: tuple[nn.Module, ...]
    kind: Literal["mha", "mla", "dsa"]
    indexers: Mapping[int, Any] = field(default_factory=dict)
    linear_layers: tuple[LinearLayer, ...] = ()
    linear_modules: tuple[Any, ...] = ()
    vision_layers: tuple[AttentionLayer, ...] = ()
    vision_modules: tuple[nn.Module, ...] = ()
    rotary: ChunkRotary | None = None

    @property
    def latent(self) -> bool:
        """Whether the cache holds latents."""
        return self.kind != "mha"


def check_supported(config: Mapping[str, object]) -> None:
    """Raise UnsupportedError where the architecture of a config is not supported."""
    _check_type(config.get("model_type"), SUPPORTED)


def check_decoder(config: Any) -> None:
    """Raise UnsupportedError where a decoder is of no supported architecture."""
    _check_type(getattr(config, "model_type", None), _DECODERS)


def _check_type(name: object, supported: frozenset[str]) -> None:
    if name not in supported:
        raise UnsupportedError(
            f"model type {name!r} does not run through the transformers integration "
            f"(supports {', '.join(sorted(SUPPORTED))}); `attn select` chooses backends for it"
        )


def read_attention(model: Any) -> ModelAttention:
    """Read the attention off a model of a supported architecture.

    The window of a layer is the one that transformers' own cache gives it. Raises UnsupportedError.
    """
    check_supported(model.config.to_dict())
    text = model.config.get_text_config(decoder=True)
    caches = dict(enumerate(DynamicCache(config=text).layers))
    linear = {i for i, x in caches.items() if isinstance(x, LinearAttentionCacheLayerMixin)}
    windows = {
        i: none_if_off(getattr(x, "sliding_window", None))
        for i, x in caches.items()
        if i not in linear
    }
    modules = [m for m in model.get_decoder().modules() if hasattr(m, "layer_idx")]
    by_layer = {m.layer_idx: m for m in modules if hasattr(m, "scaling")}
    linear_by_layer = {m.layer_idx: m for m in modules if is_linear(m)}
    if by_layer.keys() != windows.keys() or linear_by_layer.keys() != linear or not windows:
        raise UnsupportedError(
            f"{type(model).__name__} has attention layers {sorted(by_layer)} and linear layers "
            f"{sorted(linear_by_layer)}, for a cache with keys and values in layers "
            f"{sorted(windows)} and states in {sorted(linear)}; attn-core needs one cache layer "
            "for each, and one with keys and values"
        )
    tower, rotary = _vision_modules(model), read_rotary(model)
    chunks = None if rotary is None else rotary.dual_chunk
    sparse = chunks is not None and chunks.sparse_threshold is not None
    kind: Literal["mha", "mla", "dsa"] = "mha"
    if any(_is_latent(m) for m in by_layer.values()):
        kind = "mla" if getattr(text, "index_topk", None) is None else "dsa"
    return ModelAttention(
        layers=tuple(
            replace(
                _layer(i, by_layer[i], text, window),
                dual_chunk=chunks,
                vertical_slash=read_vertical_slash(model.config.to_dict(), i) if sparse else None,
            )
            for i, window in windows.items()
        ),
        modules=tuple(by_layer[i] for i in windows),
        kind=kind,
        indexers=read_indexers(by_layer) if kind == "dsa" else {},
        linear_layers=tuple(linear_layer(i, linear_by_layer[i]) for i in sorted(linear)),
        linear_modules=tuple(linear_by_layer[i] for i in sorted(linear)),
        vision_layers=tuple(_vision_layer(i, m) for i, m in enumerate(tower)),
        vision_modules=tower,
        rotary=rotary,
    )


def none_if_off(value: _N | None) -> _N | None:
    """Return a window or a cap, None where a config spells "off" as 0, 0.0 or -1."""
    return None if value is None or value <= 0 else value


def _is_latent(module: nn.Module) -> bool:
    return hasattr(module, "kv_lora_rank")


def _layer(layer_id: int, module: Any, config: Any, window: int | None) -> AttentionLayer:
    if not module.is_causal:
        raise UnsupportedError(
            f"layer {layer_id} of {type(module).__name__} attends in both directions "
            "(use_bidirectional_attention); attn-core runs causal decoders"
        )
    if _is_latent(module):
        if (
            type(module.kv_b_proj) is not nn.Linear
            or not module.kv_b_proj.weight.is_floating_point()
        ):
            raise UnsupportedError(
                f"layer {layer_id}: kv_b_proj is a {type(module.kv_b_proj).__name__}, absorbing it "
                "needs a plain Linear; load the model without quantization"
            )
        kv_heads, head_dim = 1, module.kv_lora_rank + module.qk_rope_head_dim
        v_head_dim = module.kv_lora_rank
    else:
        kv_heads, head_dim = config.num_key_value_heads, module.head_dim
        v_head_dim = head_dim
    return AttentionLayer(
        layer_id=layer_id,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        scale=float(module.scaling),
        view="full" if window is None else "window",
        logit_cap=_logit_cap(module, config),
        sliding_window=window,
        index_topk=getattr(config, "index_topk", None) if _is_latent(module) else None,
        sinks=getattr(module, "sinks", None),  # the parameter itself: it may still move or change
    )


def _logit_cap(module: Any, config: Any) -> float | None:
    """Return the soft cap of a layer; Gemma 3's layers have the attribute and do not apply it."""
    if config.model_type == "gemma3_text":
        return None
    return none_if_off(getattr(module, "attn_logit_softcapping", None))


def _vision_modules(model: Any) -> tuple[Any, ...]:
    if getattr(model.config, "vision_config", None) is None:
        return ()
    return tuple(m for m in model.base_model.visual.modules() if hasattr(m, "scaling"))


def _vision_layer(layer_id: int, module: Any) -> AttentionLayer:
    return AttentionLayer(
        layer_id=layer_id,
        num_q_heads=module.num_heads,
        num_kv_heads=module.num_heads,
        head_dim=module.head_dim,
        v_head_dim=module.head_dim,
        scale=float(module.scaling),
        is_causal=False,
    )
