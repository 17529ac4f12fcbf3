"""Read JSON; what is wrong with it is said in plain words."""

from __future__ import annotations

import json
from typing import Any

from attn_core.errors import UsageError

MOST_LEVELS = 100  # of lists and objects in one another; files of attn-core have fewer than 10
TOO_DEEP = "its lists or objects are nested too deeply"


def loaded(text: bytes | str) -> Any:
    """Return plain data of JSON text, of at most MOST_LEVELS levels. Raises UsageError."""
    try:
        # json takes a byte order mark off bytes only
        data = json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"it is no JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except UnicodeDecodeError:
        raise UsageError("it is no JSON: it is no text in UTF-8") from None
    except RecursionError:
        raise UsageError(TOO_DEEP) from None
    except ValueError:  # json reads integers of at most some thousand digits
        raise UsageError("a number in it has too many digits") from None
    if _levels(data) > MOST_LEVELS:  # Python's own limit depends on the caller's depth
        raise UsageError(TOO_DEEP)
    return data


def _levels(data: Any) -> int:
    """Count levels of lists and objects, at most one more than MOST_LEVELS."""
    count, level = 0, [data]
    while count <= MOST_LEVELS and (level := [x for x in level if isinstance(x, dict | list)]):
        level = [y for x in level for y in (x.values() if isinstance(x, dict) else x)]
        count += 1
    return count
