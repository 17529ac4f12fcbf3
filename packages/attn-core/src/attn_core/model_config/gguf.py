"""Translate the keys of a GGUF header to those of config.json."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from attn_core.errors import ModelConfigError

# general.architecture → model_type; only families whose GGUF keys say all that attention needs.
_MODEL_TYPES: Mapping[str, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v2",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
    "cohere2": "cohere2",
    "command-r": "cohere",
    "olmo2": "olmo2",
    "granite": "granite",
    "gpt2": "gpt2",
}
# Key after "ARCHITECTURE." → key of config.json.
_KEYS: Mapping[str, str] = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "rope.dimension_count": "qk_rope_head_dim",
}
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
MAX_BYTES = 16 << 20  # of what is read of a header: the vocabulary, which is longer, is not


def read_gguf_config(path: Path) -> dict[str, object]:
    """Read the header of a GGUF file (version 2 or 3, little-endian) as a config.

    Raises ModelConfigError for a file that is none, that ends early, whose header before the
    vocabulary is longer than MAX_BYTES, or whose architecture has keys that are not translated.
    """
    try:
        with path.open("rb") as file:
            header = _header(io.BytesIO(file.read(MAX_BYTES)), path)
    except OSError as error:
        raise ModelConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (
        struct.error,
        UnicodeDecodeError,
        KeyError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        raise ModelConfigError(
            f"{path} is a broken GGUF file ({error!r}); download it again"
        ) from error
    arch = str(header.get("general.architecture"))
    if arch not in _MODEL_TYPES:
        raise ModelConfigError(
            f"{path} is a GGUF file of architecture {arch} (read here: {', '.join(_MODEL_TYPES)}); "
            "give the model's config.json"
        )
    config: dict[str, object] = {"model_type": _MODEL_TYPES[arch]}
    for key, name in _KEYS.items():
        if f"{arch}.{key}" in header:
            config[name] = header[f"{arch}.{key}"]
    if "num_attention_heads" in config:  # in this format a config without KV heads has no groups
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    return config


def _header(file: BinaryIO, path: Path) -> dict[str, object]:
    if file.read(4) != b"GGUF":
        raise ModelConfigError(f"{path} is no GGUF file: it does not begin with GGUF")
    version, _, count = _unpack(file, "IQQ")
    if version not in (2, 3):
        raise ModelConfigError(f"{path} is GGUF version {version} (read here: 2, 3; little-endian)")
    header: dict[str, object] = {}
    for _ in range(int(count)):
        key = _string(file)
        if key.startswith("tokenizer.") and "general.architecture" in header:
            break  # the vocabulary comes last and is long
        (kind,) = _unpack(file, "I")
        header[key] = _value(file, int(kind))
    return header


def _value(file: BinaryIO, kind: int) -> object:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        item, length = _unpack(file, "IQ")
        if length > MAX_BYTES:
            raise struct.error(f"an array of {length} items")
        if item in _SCALARS:
            return list(_unpack(file, f"{length}{_SCALARS[int(item)]}"))
        return [_value(file, int(item)) for _ in range(int(length))]
    return _unpack(file, _SCALARS[kind])[0]


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    if length > MAX_BYTES:
        raise struct.error(f"a text of {length} bytes")
    data = file.read(int(length))
    if len(data) < length:
        raise struct.error("a text ends early")
    return data.decode("utf-8")


def _unpack(file: BinaryIO, form: str) -> tuple[float, ...]:
    layout = struct.Struct("<" + form)
    return layout.unpack(file.read(layout.size))
