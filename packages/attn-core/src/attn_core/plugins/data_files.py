"""Read the JSON files that a plugin's package ships in a folder."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any


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
                data = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                yield path, f"{type(error).__name__}: {error}"
                continue
            yield path, fault(data) or data
