"""Load a model's files: execute nothing that they name, and refuse incomplete ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from attn_core.errors import AttnError, ModelConfigError

_T = TypeVar("_T")

# Keys that name code: kernels of the hub, modules beside the weights, other models.
_CODE = frozenset(
    {
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
        *("auto_map", "custom_generate", "custom_pipelines", "trust_remote_code"),
        *("use_kernels", "kernel_config", "fusion_config", "distributed_config"),
    }
)
# Methods whose weights transformers turns into plain ones by its own code.
_DEQUANTIZED = ("fp8", "mxfp4")
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_FEW = 5


def attempt(path: Path, build: Callable[[], _T]) -> _T:
    """Build something from a model's files; what goes wrong is the files' fault."""
    try:
        return build()
    except AttnError:
        raise
    except Exception as error:  # the libraries raise anything for a broken file
        message = " ".join(str(error).split())[:500] or "no reason is given"
        raise ModelConfigError(f"cannot load {path}: {type(error).__name__}: {message}") from error


def refuse_adapter(directory: Path) -> None:
    """Raise ModelConfigError where an adapter lies in a directory: it may name another model."""
    if (directory / "adapter_config.json").exists():
        raise ModelConfigError(
            f"{directory} holds an adapter (adapter_config.json), which attn generate does not "
            "apply; merge it into its model, or remove the file to run the model without it"
        )


def check_files(directory: Path) -> None:
    """Refuse weights of which a part is missing or cut short, before anything is loaded.

    Raises ModelConfigError.
    """
    index = directory / _INDEX
    names = [_WEIGHTS]
    if not (directory / _WEIGHTS).exists():
        if not index.exists():
            return  # another format: transformers says what it looks for
        names = _shards(index)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelConfigError(
            f"{directory} lacks {len(missing)} of {len(names)} files of weights: {_few(missing)}; "
            "download the model again"
        )
    for name in names:
        try:
            with safe_open(directory / name, framework="pt"):
                pass
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelConfigError(
                f"{directory / name} is cut short or broken ({error}); download it again"
            ) from error


def _shards(index: Path) -> list[str]:
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        names = sorted(set(shards))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelConfigError(
            f"{index} is no index of weights ({type(error).__name__}: {error}); download it again"
        ) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelConfigError(
                f"{index} names {str(name)[:100]!r}; expected files beside it: download it again"
            )
    return names


def plain_config(keys: Mapping[str, object], path: Path) -> PreTrainedConfig:
    """Build a model's config from the keys of its config.json, without those that name code.

    Quantized weights are to be dequantized. Raises ModelConfigError, also for a quantization that
    is not known or whose loader brings code of its own.
    """
    clean = _without_code(keys)
    parts = [clean, *(part for part in clean.values() if isinstance(part, dict))]
    for part in parts:
        method = part.get("quantization_config")
        if method:
            part["quantization_config"] = _dequantized(method, path)
    config_class = CONFIG_MAPPING[str(clean["model_type"])]
    return attempt(path, lambda: config_class.from_dict(clean))


def _without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_code(x) for name, x in value.items() if name not in _CODE}
    return [_without_code(x) for x in value] if isinstance(value, list) else value


def _dequantized(method: Any, path: Path) -> dict[str, Any]:
    name = method.get("quant_method") if isinstance(method, dict) else method
    if name not in _DEQUANTIZED:
        raise ModelConfigError(
            f"the weights of {path} are quantized by {str(name)[:100]!r} (attn generate loads "
            f"{', '.join(_DEQUANTIZED)}, dequantized, and GGUF files); give plain weights, or load "
            "the model with transformers and call enable(model)"
        )
    return {**method, "dequantize": True}


def end_tokens(directory: Path, keys: Mapping[str, object]) -> list[int] | None:
    """Return the tokens that end a text: of generation_config.json, else of the config's keys.

    None where neither says it. Raises ModelConfigError as token_list.
    """
    place = directory / "generation_config.json"
    declared: Any = {}
    if place.exists():
        declared = attempt(place, lambda: json.loads(place.read_text(encoding="utf-8")))
    ends = token_list(place, declared.get("eos_token_id") if isinstance(declared, dict) else None)
    for part in (keys, keys.get("text_config")):
        if ends is None and isinstance(part, Mapping):
            ends = token_list(directory / "config.json", part.get("eos_token_id"))
    return ends


def token_list(place: Path, ends: object) -> list[int] | None:
    """Return the value of an eos_token_id as a list; None stays None.

    Raises ModelConfigError for anything but numbers of tokens.
    """
    if ends is None:
        return None
    tokens: list[Any] = ends if isinstance(ends, list) else [ends]
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelConfigError(
                f"{place} has eos_token_id {str(token)[:40]!r} (expected the number of a token, "
                "or a list of them); correct the file"
            )
    return tokens


def load_weights(
    kind: Any, directory: Path, path: Path, *, dtype: torch.dtype, **files: Any
) -> tuple[Any, tuple[str, ...]]:
    """Load a model by an auto class; return it and sentences that its user should know.

    The attention and the settings of generation are ours, never the files'. Raises
    ModelConfigError where a file is broken, or a weight is missing or of another shape.
    """
    model, loading_info = attempt(
        path,
        lambda: kind.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            generation_config=GenerationConfig(),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **files,
        ),
    )
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise ModelConfigError(
            f"{path} lacks {len(missing)} weights of the model, which would be random numbers: "
            f"{_few(missing)}; download it again, or correct its config.json"
        )
    mismatched = [
        f"{n} {tuple(a)} (expected {tuple(b)})" for n, a, b in loading_info["mismatched_keys"]
    ]
    if mismatched:
        raise ModelConfigError(
            f"{path} has {len(mismatched)} weights of another shape than its config.json says: "
            f"{_few(sorted(mismatched))}; download it again, or correct its config.json"
        )
    unused = sorted(loading_info["unexpected_keys"])
    if not unused:
        return model, ()
    return model, (
        f"{len(unused)} tensors of the weights have no place in the model that config.json "
        f"describes and are not used: {_few(unused)}",
    )


def _few(names: Sequence[str]) -> str:
    """List the first names."""
    return ", ".join(names[:_FEW]) + (" …" if len(names) > _FEW else "")
