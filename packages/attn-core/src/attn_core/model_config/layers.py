"""The distinct attention layers of a model, one tensor-parallel rank's share of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from attn_core.errors import ModelConfigError
from attn_core.formatting import printable
from attn_core.model_config.dual_chunk import dual_chunk
from attn_core.model_config.families import CODED_ROLES, LAYER_ROLES, Family, Role
from attn_core.model_config.heads import even_heads, rank_heads
from attn_core.model_config.keys import Keys, brief
from attn_core.model_config.latent import latent_layers
from attn_core.spec.requirements import LayerRequirements

MOST_LAYERS = 4096  # that are listed one by one


def decoder_layers(keys: Keys, family: Family, tp: int) -> tuple[LayerRequirements, ...]:
    """Return the distinct layers of a decoder (or of an encoder-only model), first seen first.

    Raises ModelConfigError for a missing or malformed key, an unknown layer type, or heads that do
    not divide by `tp`.
    """
    seen: dict[LayerRequirements, list[int | None]] = {}
    for role, number in _numbers(_roles(keys, family), keys.count("num_hidden_layers")).items():
        if role == "none":
            keys.assume("layers without attention (Mamba, convolution) are left to the model")
        elif role == "linear":
            linear = _linear(keys, tp)
            if linear is None:
                keys.assume("linear layers of an unknown recurrence are left to the model")
            else:
                seen.setdefault(linear, []).append(number)
        else:
            layers = _softmax(keys, family, role, tp)
            for layer in layers:
                seen.setdefault(layer, []).append(number if len(layers) == 1 else None)
    if not seen:
        raise ModelConfigError(f"{keys.owner} has no layer that attn-core knows attention for")
    return tuple(replace(layer, num_layers=_sum(numbers)) for layer, numbers in seen.items())


def encoder_decoder_layers(keys: Keys, tp: int) -> tuple[LayerRequirements, ...]:
    """Return encoder, decoder and cross-attention layers of a T5, BART or Whisper like model."""
    (encoder,) = keys.need("encoder_heads")
    (decoder,) = keys.need("decoder_heads")
    cap = keys.number("attn_logit_softcapping")
    q, kv = rank_heads(keys, encoder, encoder, tp)
    dim = _head_dim(keys, encoder)
    first = LayerRequirements(
        head_dim=dim, v_head_dim=dim, num_q_heads=q, num_kv_heads=kv, logit_cap=cap, encoder=True
    )
    q, kv = rank_heads(keys, decoder, keys.count("num_key_value_heads") or decoder, tp)
    dim = _head_dim(keys, decoder)
    second = LayerRequirements(
        head_dim=dim, v_head_dim=dim, num_q_heads=q, num_kv_heads=kv, logit_cap=cap
    )
    return first, second, replace(second, cross=True)


def vision_layer(keys: Keys, tp: int) -> LayerRequirements | None:
    """Return the layers of a vision tower; None, with a note, where its config names no heads."""
    heads, width = keys.count("vision_heads"), keys.count("vision_width")
    head_dim = keys.count("head_dim") or (width // heads if heads and width else None)
    if heads is None or head_dim is None:
        keys.assume(
            f"vision_config ({keys.model_type or 'no model_type'}) names no heads: left out"
        )
        return None
    if heads % tp:
        keys.assume(f"the vision tower's {heads} heads do not divide by tp {tp}: replicated")
    else:
        heads //= tp
    return LayerRequirements(
        head_dim=head_dim, v_head_dim=head_dim, num_q_heads=heads, num_kv_heads=heads, encoder=True
    )


def _numbers(roles: Sequence[Role], num_layers: int | None) -> dict[Role, int | None]:
    """Return role → how many layers have it, None where the roles are not those of every layer."""
    counts = Counter(roles)
    if len(counts) == 1:
        return dict.fromkeys(counts, num_layers)
    return {role: n if len(roles) == num_layers else None for role, n in counts.items()}


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [n for n in numbers if n is not None]
    return sum(known) if len(known) == len(numbers) else None


def _roles(keys: Keys, family: Family) -> list[Role]:
    """Return the roles of the layers, first seen first: of each layer, or of those that differ."""
    layer_types = keys.layers("layer_types")
    crossed = keys.get("cross_attention_layers")
    if layer_types is not None:
        depth = keys.count("num_hidden_layers")
        if layer_types and depth is not None and depth != len(layer_types):
            keys.assume(
                f"layer_types names {len(layer_types)} layers, num_hidden_layers {depth}: what "
                "is named was taken"
            )
        return _named_roles(keys, layer_types)
    if roles := _numbered_roles(keys) or _coded_roles(keys):
        return roles
    if isinstance(crossed, list) and crossed:
        return ["full", "cross"]
    if family.period:
        period = (keys.count(family.period_key) if family.period_key else None) or family.period
        depth = min(keys.count("num_hidden_layers") or period, MOST_LAYERS)
        return [family.inner if (i + 1) % period else "full" for i in range(depth)]
    if not family.windowed or _window(keys) is None:
        return [family.role]
    plain = keys.get("max_window_layers") if keys.get("use_sliding_window") else None
    if not isinstance(plain, int) or plain < 1:
        return ["window"]
    total = keys.count("num_hidden_layers")
    return ["full"] if total is not None and plain >= total else ["full", "window"]


def _numbered_roles(keys: Keys) -> list[Role]:
    """Return the roles of Kimi Linear, which lists the numbers of its layers per role."""
    firsts: list[tuple[int, Role]] = []
    roles: tuple[tuple[str, Role], ...] = (("kda_layers", "linear"), ("full_attn_layers", "full"))
    for key, role in roles:
        numbers = keys.get(f"linear_attn_config.{key}")
        if isinstance(numbers, list):
            firsts += [(number, role) for number in numbers if isinstance(number, int)]
    return [role for _, role in sorted(firsts)]


def _coded_roles(keys: Keys) -> list[Role]:
    """Return the roles that MiniMax and MiMo-V2 write as a list of numbers."""
    for key, roles in CODED_ROLES.items():
        codes = keys.layers(key)
        if codes and not all(isinstance(code, int) and code in roles for code in codes):
            known = ", ".join(f"{code} {role}" for code, role in roles.items())
            raise ModelConfigError(f"{keys.owner} has {key} of other values than {known}")
        if codes:
            return [roles[code] for code in codes if isinstance(code, int)]
    return []


def _named_roles(keys: Keys, layer_types: list[object]) -> list[Role]:
    names = [name if isinstance(name, str) else brief(name) for name in layer_types]
    unknown = sorted({name for name in names if name not in LAYER_ROLES})
    if unknown:
        shown = ", ".join(printable(name, 40) for name in unknown[:5])
        raise ModelConfigError(
            f"{keys.owner} has layers of type {shown} (known: "
            f"{', '.join(LAYER_ROLES)}); give the shapes yourself (--kind, --head-dim, …)"
        )
    return [LAYER_ROLES[name] for name in names]


def _window(keys: Keys) -> int | None:
    """Return the window of sliding layers; None where it is off or no shorter than the context."""
    if keys.get("sliding_window") in (0, -1) or keys.get("use_sliding_window") is False:
        return None  # off, as engines spell it
    window = keys.count("sliding_window")
    if window is None:
        return None
    context = keys.count("max_position_embeddings")
    if context is not None and window >= context:
        keys.assume(f"sliding_window {window} is not below the context of {context}: no window")
        return None
    return window


def _head_dim(keys: Keys, heads: int) -> int:
    head_dim = keys.count("head_dim")
    if head_dim is not None:
        return head_dim
    (hidden,) = keys.need("hidden_size")
    if hidden % heads:
        raise ModelConfigError(
            f"{keys.owner}: hidden_size {hidden} is no multiple of {heads} heads and there is no "
            "head_dim; add head_dim to config.json"
        )
    return hidden // heads


def _softmax(keys: Keys, family: Family, role: Role, tp: int) -> tuple[LayerRequirements, ...]:
    return latent_layers(keys, tp) or (_plain(keys, family, role, tp),)


def _plain(keys: Keys, family: Family, role: Role, tp: int) -> LayerRequirements:
    (heads, *_) = keys.need(
        "num_attention_heads", "hidden_size" if keys.count("head_dim") is None else "head_dim"
    )
    kv = _kv_heads(keys, heads)
    head_dim = _head_dim(keys, heads)
    v_head_dim = int(keys.number("v_head_dim") or head_dim)  # 0 stands for none
    sinks = family.sinks
    if role == "full":  # Gemma 4: other shapes in the layers that see everything
        wide = keys.count("global_head_dim")
        head_dim, v_head_dim = (wide, wide) if wide else (head_dim, v_head_dim)
        kv = keys.count("num_global_key_value_heads") or kv
        sinks = sinks or keys.get("add_full_attention_sink_bias") is True
    if role == "window" and keys.get("sliding_window") is None:
        keys.assume("layers with a window, and no sliding_window that says how wide: taken as full")
    if role == "window":  # MiMo-V2: other shapes in the layers with a window
        own = keys.count("swa_head_dim")
        head_dim, v_head_dim = (own, own) if own else (head_dim, v_head_dim)
        v_head_dim = keys.count("swa_v_head_dim") or v_head_dim
        heads = keys.count("swa_num_attention_heads") or heads
        kv = keys.count("swa_num_key_value_heads") or min(kv, heads)
        sinks = sinks or keys.get("add_swa_attention_sink_bias") is True
    if role == "chunk":
        _note_chunk(keys)
    both_ways = keys.get("use_bidirectional_attention") is True
    if both_ways:
        keys.assume("attention is bidirectional and its window, if any, is not applied")
    encoder = family.encoder or both_ways
    q, kv = rank_heads(keys, heads, kv, tp)
    return LayerRequirements(
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        num_q_heads=q,
        num_kv_heads=kv,
        sliding_window=_window(keys) if role == "window" and not encoder else None,
        logit_cap=_logit_cap(keys),
        sinks=sinks,
        cross=role == "cross",
        encoder=encoder,
        dual_chunk=dual_chunk(keys),
    )


def _logit_cap(keys: Keys) -> float | None:
    """Return the soft cap; Gemma 3's layers have the key and do not apply it."""
    is_gemma3 = keys.model_type in ("gemma3", "gemma3_text")
    return None if is_gemma3 else keys.number("attn_logit_softcapping")


def _kv_heads(keys: Keys, heads: int) -> int:
    named = keys.count("num_key_value_heads")
    if keys.get("multi_query") is True and keys.get("new_decoder_architecture") is not True:
        return 1  # Falcon 7B, GPT-BigCode
    groups = keys.count("multi_query_group_num")  # ChatGLM, which may turn it off
    if keys.get("multi_query_attention") is False:
        groups = None
    return named or groups or heads


def _note_chunk(keys: Keys) -> None:
    chunk, context = keys.count("attention_chunk_size"), keys.count("max_position_embeddings")
    if chunk is not None and (context is None or chunk < context):
        keys.assume(
            f"layers whose tokens see only their own chunk of {chunk} are asked for as full "
            f"attention: the same up to {chunk} tokens, beyond it the engine splits requests there"
        )


def _linear(keys: Keys, tp: int) -> LayerRequirements | None:
    """Return GDN or KDA layers; None where the keys are of neither."""
    config: Mapping[str, object] = keys.config
    kda = "linear_attn_config" in config or "linear_head_dim" in config
    key_heads, key_dim = keys.count("linear_num_key_heads"), keys.count("linear_key_head_dim")
    if key_heads is None or key_dim is None:
        return None
    value_heads = keys.count("linear_num_value_heads") or key_heads
    expansion = keys.number("linear_value_expansion") or 1.0
    return LayerRequirements(
        kind="kda" if kda else "gdn",
        head_dim=key_dim,
        v_head_dim=keys.count("linear_value_head_dim") or round(key_dim * expansion),
        num_q_heads=even_heads(keys, key_heads, tp, "linear key heads"),
        num_kv_heads=even_heads(keys, value_heads, tp, "linear value heads"),
        conv_width=keys.count("linear_conv_kernel_dim"),
    )
