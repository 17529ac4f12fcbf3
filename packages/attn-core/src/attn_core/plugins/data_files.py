"""Read the JSON files that a plugin's package ships in a folder."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from attn_core.errors import UsageError
from attn_core.json_text import loaded


def data_files(
    module: str, folder: str, fault: Callable[[Any], str | None]
) -> Iterator[tuple[pathlib.Path, dict[str, Any] | str]]:
    """Yield each file with its content, or with what is wrong with it.

    module: the value of the plugin's entry point. fault: says what is wrong with a content.
    """
    package = re.match(r"\w+", module)  # of "package", "package.module:attribute"
    try:
        root = importlib.util.find_spec(package[0]) if package else None
    except (ImportError, ValueError):  # ValueError: an object without a spec stands for the module
        root = None
    for place in (root.submodule_search_locations or ()) if root else ():
        for path in sorted((pathlib.Path(place) / folder).glob("*.json")):
            try:
                data = loaded(path.read_bytes())
            except OSError as error:
                yield path, error.strerror or str(error)
                continue
            except UsageError as error:
                yield path, str(error)
                continue
            yield path, fault(data) or data
