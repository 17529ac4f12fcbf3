"""SGLang's attention layers as attn-core's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from attn_core.errors import UnsupportedError
from attn_core.integrations.sglang.dual_chunk import DualChunkModel
from attn_core.integrations.sglang.pool import EnginePool
from attn_core.runtime.layer import AttentionLayer


def layers_of(
    model: Any,
    pool: EnginePool,
    index_topk: int | None = None,
    chunks: DualChunkModel | None = None,
) -> tuple[dict[int, AttentionLayer], dict[int, AttentionLayer]]:
    """Return the layers that read the pool by their number, and bind each to its part of it.

    MLA's unfolded companions, which read no pool, are second, by the id of their module.
    index_topk: of a model of sparse MLA. chunks: of one of dual chunk attention.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    sinks = {
        name.rpartition(".")[0]: parameter.detach()
        for name, parameter in model.named_parameters()
        if "sink" in name.rpartition(".")[2] and parameter.dim() == 1
    }
    layers: dict[int, AttentionLayer] = {}
    unfolded: dict[int, AttentionLayer] = {}
    for name, module in model.named_modules():
        if not isinstance(module, RadixAttention):
            continue
        if pool.is_latent and module.qk_head_dim != pool.row_dim:
            unfolded[id(module)] = to_layer(module)
            continue
        if module.layer_id in layers:
            continue  # it reads the cache of the layer before, with its scales
        view = "window" if pool.has_window(module.layer_id) else "full"
        view = "cross" if module.is_cross_attention else view
        own_sinks = sinks.get(name.rpartition(".")[0])
        layer = to_layer(module, view=view, sinks=own_sinks, index_topk=index_topk)
        layer = layer if chunks is None else chunks.layer(layer)
        layers[module.layer_id] = layer
        pool.bind(module, layer)
    return layers, unfolded


def to_layer(
    module: Any,
    *,
    view: str = "full",
    sinks: Tensor | None = None,
    index_topk: int | None = None,
) -> AttentionLayer:
    """Return the AttentionLayer of a RadixAttention, whose heads are this rank's.

    view: the CacheView that holds its keys. Raises UnsupportedError for what a layer of attn-core
    cannot say.
    """
    name = f"layer {module.layer_id} of the model"
    refused = {
        "chunked local attention (use_irope)": module.use_irope,
        "a temperature by length (xai_temperature_len)": module.xai_temperature_len > 0,
        f"positions {module.pos_encoding_mode}": module.pos_encoding_mode != "NONE",
        f"the cap {module.logit_capping_method}": module.logit_cap > 0
        and module.logit_capping_method != "tanh",
    }
    for what, present in refused.items():
        if present:
            raise UnsupportedError(
                f"{name} has {what}; attn_core serves attention without it: use another "
                "--attention-backend for this model"
            )
    kind = module.attn_type.value
    if kind == "decoder_bidirectional":
        raise UnsupportedError(f"{name} is {kind}; use another --attention-backend for this model")
    window = module.sliding_window_size
    return AttentionLayer(
        layer_id=module.layer_id,
        num_q_heads=module.tp_q_head_num,
        num_kv_heads=module.tp_k_head_num,
        head_dim=module.qk_head_dim,
        v_head_dim=module.v_head_dim,
        scale=float(module.scaling),
        view=view,
        logit_cap=module.logit_cap or None,
        sliding_window=window + 1 if window > -1 else None,  # SGLang leaves the token itself out
        sinks=sinks,
        is_causal=kind == "decoder" and not module.is_cross_attention,
        is_cross=module.is_cross_attention,
        index_topk=index_topk,
    )


def with_sinks(layer: AttentionLayer, sinks: Tensor) -> AttentionLayer:
    """Return a layer with the sinks of a call; those of the model are known before."""
    if layer.sinks is None:
        raise UnsupportedError(
            f"layer {layer.layer_id} passes sinks that are no parameter of its module; use "
            "another --attention-backend for this model"
        )
    same = layer.sinks.data_ptr() == sinks.data_ptr()
    return layer if same else replace(layer, sinks=sinks)
