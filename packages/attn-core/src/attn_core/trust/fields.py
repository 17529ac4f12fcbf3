"""Read the fields of a JSON object that anybody may have written."""

from __future__ import annotations

from typing import Any

from attn_core.errors import UsageError
from attn_core.formatting import printable

MOST = 1 << 24  # of any number: a file cannot make a backend reserve any memory it likes


class Fields:
    """A JSON object, read field by field; what is not there, or of another type, is refused."""

    def __init__(self, data: object, name: str) -> None:
        if not isinstance(data, dict):
            raise UsageError(f"{name} is no object")
        self.data, self.name = data, name

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return a value of this type; true and false are no numbers."""
        value = self.data.get(key)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
            raise UsageError(f"{self.name}: {key} is {printable(repr(value), 60)}")
        return value

    def number(self, key: str, *, minimum: int = 0, maximum: int = MOST) -> int:
        """Return a whole number in a range."""
        value: int = self.get(key, int)
        if not minimum <= value <= maximum:
            raise UsageError(f"{self.name}: {key} {printable(str(value)[:30])} is out of range")
        return value

    def one_of(self, key: str, options: tuple[str, ...]) -> Any:
        """Return one of these texts."""
        value = self.get(key, str)
        if value not in options:
            raise UsageError(f"{self.name}: {key} {printable(value, 60)!r}")
        return value

    def lengths(self, key: str) -> tuple[int, ...]:
        """Return one length per request."""
        values = self.get(key, list)
        valid = all(type(x) is int and 0 <= x <= MOST for x in values)
        if not values or not valid:
            raise UsageError(f"{self.name}: {key} (expected lengths of requests)")
        return tuple(values)

    def pair(self, key: str) -> tuple[int, int]:
        """Return two numbers."""
        values = self.get(key, list)
        if len(values) != 2 or not all(type(x) is int and 0 <= x <= MOST for x in values):
            raise UsageError(f"{self.name}: {key} (expected two numbers)")
        return values[0], values[1]
