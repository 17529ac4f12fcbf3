"""Read a model's config from a directory, a config.json or the header of a GGUF file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from attn_core.errors import ModelConfigError, UsageError
from attn_core.formatting import printable
from attn_core.json_text import loaded

_LINES = "sparse_attention_config.json"
MAX_BYTES = 16 << 20  # of a config; published ones have at most some hundred KB


def read_config(path: str | os.PathLike[str]) -> dict[str, object]:
    """Read the keys of a model's config. Nothing of its directory is executed.

    path: a directory with config.json, a JSON file of at most MAX_BYTES, or a GGUF file, whose
    header is translated. Nothing else is opened, but for a model of dual chunk attention: the lines
    of its sparse prompts are in sparse_attention_config.json, beside its config.json.
    Raises ModelConfigError, which says what was expected, what was found and what to do.
    """
    place = Path(path)
    mode = _mode(place)
    if mode is not None and stat.S_ISDIR(mode):
        place = _in_directory(place)
        mode = _mode(place)
    if mode is None:
        raise ModelConfigError(
            f"no such file or directory: {_shown(place)}. attn reads local files only: download "
            "the model (or only its config.json) and give its directory"
        )
    if not stat.S_ISREG(mode):  # reading a pipe or a device may never end
        raise ModelConfigError(
            f"{_shown(place)} is no regular file: give a directory with config.json, that file, or "
            "a .gguf file"
        )
    if place.suffix == ".gguf":
        from attn_core.model_config.gguf import read_gguf_config  # start-up: rarely needed

        return read_gguf_config(place)
    config = _read_json(place)
    if not isinstance(config, dict):
        raise ModelConfigError(
            f"{place} holds a JSON {type(config).__name__}, not the object of a model's config.json"
        )
    chunks, lines_path = config.get("dual_chunk_attention_config"), place.with_name(_LINES)
    if isinstance(chunks, dict) and not chunks.get("sparse_attention_config"):
        lines_mode = _mode(lines_path)
        if lines_mode is not None and stat.S_ISREG(lines_mode):
            chunks["sparse_attention_config"] = _read_json(lines_path)
    return config


def _read_json(place: Path) -> object:
    try:
        text = _bytes(place).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelConfigError(
            f"{place} is no text: give a directory with config.json, that file, or a .gguf file"
        ) from error
    try:
        return loaded(text)
    except UsageError as error:
        raise ModelConfigError(f"{place}: {error}; download it again") from None


def _mode(place: Path) -> int | None:
    """Return the type and permissions of what lies at a path, None where nothing does."""
    try:
        return place.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise _unreadable(place, error) from error


def _bytes(place: Path) -> bytes:
    try:
        with place.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(place, error) from error
    if len(data) > MAX_BYTES:
        raise ModelConfigError(
            f"{place} is longer than {MAX_BYTES >> 20} MiB: no config.json is; give the directory "
            "of a model or its config.json, not its weights"
        )
    return data


def _in_directory(directory: Path) -> Path:
    place = directory / "config.json"
    if _mode(place) is not None:
        return place
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise _unreadable(directory, error) from error
    models = [name for name in names if name.endswith(".gguf")]
    if models:
        advice = f"give one of its GGUF files: {', '.join(models[:5])}"
    elif "params.json" in names:
        advice = "params.json is another format; download the config.json of the Hugging Face copy"
    else:
        advice = "give the directory of a downloaded model, or its config.json"
    names_text = ", ".join(names[:5]) + (" …" if len(names) > 5 else "") if names else "nothing"
    raise ModelConfigError(f"no config.json in {directory} (it holds {names_text}): {advice}")


def _unreadable(place: Path, error: OSError | ValueError) -> ModelConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ModelConfigError(
        f"cannot read {_shown(place)}: {reason}; give the directory of a model that you may read, "
        "or its config.json"
    )


def _shown(place: Path) -> str:
    return printable(str(place), 200)
