"""Read a model's config from a directory, a config.json or the header of a GGUF file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from attn_core.errors import ModelConfigError


def read_config(path: str | os.PathLike[str]) -> dict[str, object]:
    """Read the keys of a model's config; nothing else in its directory is opened or run.

    path: a directory with config.json, a JSON file, or a GGUF file, whose header is translated.
    Raises ModelConfigError that says what was looked for, what is there and what to do.
    """
    place = Path(path)
    if place.is_dir():
        place = _in_directory(place)
    elif not place.exists():
        raise ModelConfigError(
            f"no such file or directory: {place}. attn reads local files only: download the model "
            "(or only its config.json) and give its directory"
        )
    if place.suffix == ".gguf":
        from attn_core.models.gguf import read_gguf_config  # start-up: rarely needed

        return read_gguf_config(place)
    try:
        config = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"cannot read {place}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelConfigError(
            f"{place} is no text: give a directory with config.json, that file, or a .gguf file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{place} is not valid JSON: {error}; download it again") from error
    if not isinstance(config, dict):
        raise ModelConfigError(
            f"{place} holds a JSON {type(config).__name__}, not the object of a model's config.json"
        )
    return config


def _in_directory(directory: Path) -> Path:
    place = directory / "config.json"
    if place.is_file():
        return place
    names = sorted(entry.name for entry in directory.iterdir())
    models = [name for name in names if name.endswith(".gguf")]
    if models:
        advice = f"give one of its GGUF files: {', '.join(models[:5])}"
    elif "params.json" in names:
        advice = "params.json is another format; download the config.json of the Hugging Face copy"
    else:
        advice = "give the directory of a downloaded model, or its config.json"
    shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "") if names else "nothing"
    raise ModelConfigError(f"no config.json in {directory} (it holds {shown}): {advice}")
