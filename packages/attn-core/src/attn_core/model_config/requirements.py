"""Turn a config into Requirements, and record every assumption."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attn_core.dtypes import PLAIN_DTYPES
from attn_core.errors import ModelConfigError, UsageError
from attn_core.formatting import near, printable
from attn_core.model_config.families import (
    ABOUT_ATTENTION,
    ALIBI,
    FAMILIES,
    NOT_APPLIED,
    NOTES,
    OF_THE_MODEL,
    OF_THE_ORDER,
    PLAIN,
    UNKNOWN,
    VISION_DEFAULTS,
    Family,
)
from attn_core.model_config.keys import Keys, brief, lookup
from attn_core.model_config.layers import decoder_layers, encoder_decoder_layers, vision_layer
from attn_core.spec.requirements import Requirements, Speculation

DTYPES: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    **{name: name for name in PLAIN_DTYPES},
}
_TEXT = ("thinker_config", "text_config", "llm_config", "language_config")


def requirements_from_config(
    config: Mapping[str, object],
    *,
    tp: int = 1,
    dtype: str | None = None,
    kv_cache_dtype: str = "auto",
    page_size: int | None = None,
    speculation: Speculation | None = None,
    lse: bool = False,
    deterministic: bool = False,
    graphs: bool = False,
) -> Requirements:
    """Build Requirements from the keys of a model's config.json.

    tp: number of tensor-parallel ranks; head counts are those of one rank.
    dtype: None or "auto" uses the config's dtype.
    Only the config is read, and none of the model's code runs. Raises ModelConfigError if the
    config lacks necessary keys, UsageError for an invalid dtype or tp.
    """
    if tp < 1:
        raise UsageError(f"tp {tp} (expected 1 or more)")
    keys, family = _text(config)
    keys.count("num_hidden_layers")  # refused where it cannot be, whether it is used or not
    if is_encoder_decoder(config):
        layers = encoder_decoder_layers(keys, tp)
    else:
        layers = decoder_layers(keys, family, tp)
    tower = _vision(config, keys)
    vision = vision_layer(tower, tp) if tower is not None else None
    chosen = _dtype(config, keys, dtype)
    model_type = str(config.get("model_type", ""))
    if keys.model_type not in FAMILIES and model_type not in FAMILIES:
        kinds = ", ".join(dict.fromkeys(layer.kind for layer in layers))
        keys.assume(
            f"{keys.owner} is not an architecture that attn-core knows: its attention ({kinds}) is "
            "read from the standard keys"
        )
    for path, sentence in NOT_APPLIED.items():
        if lookup(config, path)[1] or lookup(keys.config, path)[1]:
            keys.assume(sentence)
    if model_type in NOTES:
        keys.assume(NOTES[model_type])
    _alibi(keys)
    if unread := _not_read(keys):
        more_text = f" and {len(unread) - 8} more" if len(unread) > 8 else ""
        keys.assume(
            "not applied, though the names are about attention: "
            f"{', '.join(unread[:8])}{more_text}; compare the layers that were read with the "
            "model's own code"
        )
    for part in (keys, tower):
        if part is not None and part.defaulted:
            defaults = ", ".join(f"{name} {value}" for name, value in part.defaulted.items())
            keys.assume(
                f"not in the config, taken from the defaults of {part.model_type}: {defaults}"
            )
    return Requirements(
        layers=layers,
        vision=vision,
        dtype=chosen,
        kv_cache_dtype=kv_cache_dtype,
        page_size=page_size,
        speculation=speculation,
        lse=lse,
        deterministic=deterministic,
        graphs=graphs,
        assumptions=tuple(keys.notes),
    )


def context_length(config: Mapping[str, object]) -> int | None:
    """Return the model's context length in tokens, or None if the config does not say."""
    return _text(config)[0].count("max_position_embeddings")


def is_encoder_decoder(config: Mapping[str, object]) -> bool:
    """Say whether the model has an encoder and a decoder that attends to it (T5, BART, Whisper)."""
    return config.get("is_encoder_decoder") is True


def _text(config: Mapping[str, object]) -> tuple[Keys, Family]:
    """Return the keys of the language model, which a multimodal config nests, and its family."""
    if not isinstance(config, Mapping):
        raise ModelConfigError(f"a config is an object of keys, not {type(config).__name__}")
    text = config
    for name in _TEXT:
        nested = text.get(name)
        if isinstance(nested, Mapping) and nested:
            text = nested
    model_types = [str(part.get("model_type") or "") for part in (text, config)]
    model_type = next((name for name in model_types if name in FAMILIES), model_types[0])
    family = FAMILIES.get(model_type, UNKNOWN)
    architectures = config.get("architectures") or text.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    owner = str(first or model_type or "a model without model_type")
    return Keys(text, owner, model_type, family.defaults), family


def _alibi(keys: Keys) -> None:
    """Say that ALiBi is not applied where something else than a key of that name asks for it."""
    position = str(keys.get("position_embedding_type") or keys.get("position_embedding"))
    baichuan = keys.model_type == "baichuan" and keys.get("hidden_size") == 5120  # its 13B
    # a missing value of MPT is the one of its config class, which is True
    mpt = keys.model_type == "mpt" and keys.get("attn_config.alibi") is None
    if position.lower() == "alibi" or baichuan or mpt:
        keys.assume(ALIBI)
    elif position.startswith("relative"):
        keys.assume(NOT_APPLIED["relative_attention_num_buckets"])


def _not_read(keys: Keys) -> list[str]:
    """List the keys about attention, with values, that nothing has looked up."""
    unread, ordered = [], keys.get("layer_types") is not None
    outer = {path.partition(".")[0] for path in (*keys.seen, *NOT_APPLIED) if "." in path}
    read_paths = {*keys.seen, *NOT_APPLIED, *(path.rpartition(".")[0] for path in keys.seen)}
    for path, value in _paths(keys.config, outer):
        name = path.rpartition(".")[2]
        if not ABOUT_ATTENTION.search(name) or OF_THE_MODEL.search(name) or path in read_paths:
            continue
        if ordered and OF_THE_ORDER.search(name):
            continue
        if value not in PLAIN and value != [] and value != {}:
            unread.append(printable(f"{path} = {brief(value)}"))
    return unread


def _paths(config: Mapping[str, object], outer: set[str]) -> Iterator[tuple[str, object]]:
    """Yield paths and values; an object of which some keys are known, key by key."""
    for key, value in config.items():
        if isinstance(value, Mapping) and key in outer:
            yield from ((f"{key}.{inner}", part) for inner, part in value.items())
        else:
            yield str(key), value


def _vision(config: Mapping[str, object], keys: Keys) -> Keys | None:
    tower = config.get("vision_config")
    thinker = config.get("thinker_config")
    if tower is None and isinstance(thinker, Mapping):
        tower = thinker.get("vision_config")
    if not isinstance(tower, Mapping) or not tower:
        return None
    model_type = str(tower.get("model_type") or config.get("model_type") or "")
    defaults = VISION_DEFAULTS.get(model_type, {})
    return Keys(tower, f"{keys.owner}'s vision tower", model_type, defaults, keys.notes)


def _dtype(config: Mapping[str, object], keys: Keys, dtype: str | None) -> str:
    if dtype is not None and dtype != "auto":
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype!r}: {near(dtype, DTYPES)}")
        return DTYPES[dtype]
    dtypes = [part.get(name) for part in (keys.config, config) for name in ("torch_dtype", "dtype")]
    stored = next((str(value).removeprefix("torch.") for value in dtypes if value), None)
    if stored is not None and stored in DTYPES:
        return DTYPES[stored]
    reason = (
        "the config names no dtype" if stored is None else f"dtype {stored} is no compute dtype"
    )
    keys.assume(f"{reason}: bf16")
    return "bf16"
