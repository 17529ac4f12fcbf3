"""Read the header of a reproducer without torch: what is none is refused at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from attn_core.errors import UsageError
from attn_core.formatting import printable
from attn_core.json_text import loaded

KEY = "attn_reproducer"  # in the metadata of a safetensors file
_MOST_BYTES = 1 << 24  # of a header: some dozen tensors, and the lengths of the requests


def metadata(path: Path) -> Any:
    """Return the reproducer's own JSON data. Raises UsageError with what is wrong with the file."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device may never end
            raise UsageError("not a file")
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= min(_MOST_BYTES, os.fstat(file.fileno()).st_size - 8):
                raise UsageError("it has no header of a safetensors file")
            text = file.read(size)
        about = loaded(text).get("__metadata__") or {}
        data = about.get(KEY)
    except AttributeError:
        raise none_of_ours(path, "its header is no object") from None
    except (OSError, ValueError, UsageError) as error:  # ValueError: a zero byte in the path
        raise none_of_ours(path, error) from error
    if not isinstance(data, str):
        raise none_of_ours(path, "its metadata has no reproducer")
    try:
        return loaded(data)
    except UsageError as error:
        raise none_of_ours(path, error) from error


def none_of_ours(path: Path, problem: Exception | str) -> UsageError:
    """Return the error that says why a file is no reproducer."""
    strerror = problem.strerror if isinstance(problem, OSError) else None
    return UsageError(
        f"{printable(str(path), 200)} is no reproducer: {printable(strerror or str(problem), 300)}"
        "; `Shadow` and `attn bisect` write them"
    )
