"""Where the seconds of a measurement go."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
ALL = "all"  # in place of a backend: what is done once for all of them, as inputs and rounds are
COMPILING = "compiling"
SAID_S = 0.5
LONG_S = 0.25  # what takes longer may have compiled something, and is done twice


class Spent:
    """Seconds by backend and part.

    Parts of a backend: create, plan, first call, check, and compiling: what the first time alone
    takes of the first three, where a library compiles or loads kernels.
    """

    def __init__(self, seconds: Mapping[tuple[str, str], float] | None = None) -> None:
        self.seconds: Counter[tuple[str, str]] = Counter(seconds or {})

    @contextmanager
    def on(self, backend: str, part: str) -> Iterator[None]:
        """Add the seconds of a block, whatever ends it."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[backend, part] += time.monotonic() - start  # type: ignore[assignment]

    def settled(self, backend: str, part: str, do: Callable[[], T]) -> T:
        """Return what `do` returns; if it takes long, again, and the difference was compiling."""
        start = time.monotonic()
        with self.on(backend, part):
            result = do()
        if (first := time.monotonic() - start) > LONG_S:
            start = time.monotonic()
            with self.on(backend, part):
                result = do()
            first_call_s = max(0.0, first - (time.monotonic() - start))
            self.seconds[backend, part] -= first_call_s  # type: ignore[assignment]
            self.seconds[backend, COMPILING] += first_call_s  # type: ignore[assignment]
        return result

    @property
    def compiling(self) -> float:
        """The seconds of compiling and loading, of all backends."""
        return sum(s for (_, part), s in self.seconds.items() if part == COMPILING)

    def add(self, other: Spent) -> None:
        """Add the seconds of another measurement."""
        self.seconds.update(other.seconds)

    def by_backend(self) -> dict[str, dict[str, float]]:
        """Return the seconds of each backend's parts, the backend that took most first."""
        result: dict[str, dict[str, float]] = {}
        for (backend, part), seconds in self.seconds.items():
            result.setdefault(backend, {})[part] = round(seconds, 3)
        return dict(sorted(result.items(), key=lambda item: -sum(item[1].values())))

    def __str__(self) -> str:
        """Say what took half a second and more."""
        texts = []
        for backend, parts in self.by_backend().items():
            long = {part: s for part, s in parts.items() if s >= SAID_S}
            if long:
                parts_text = ", ".join(f"{part} {s:.1f} s" for part, s in long.items())
                texts.append(f"{backend} ({parts_text})")
        return ", ".join(texts) or "no part of it half a second"
