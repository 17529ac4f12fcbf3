"""Where the seconds of a measurement go."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

ALL = "all"  # in place of a backend: what is done once for all of them, as inputs and rounds are
SAID_S = 0.5


class Spent:
    """Seconds by backend and part.

    Parts of a backend: create, plan, first call, check. Kernels that were not compiled before are
    compiled in a first call, in some libraries in a plan.
    """

    def __init__(self, seconds: Mapping[tuple[str, str], float] | None = None) -> None:
        self.seconds: Counter[tuple[str, str]] = Counter(seconds or {})

    @contextmanager
    def on(self, backend: str, part: str) -> Iterator[None]:
        """Add the seconds of a block, whatever ends it."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[backend, part] += time.monotonic() - begin  # type: ignore[assignment]

    def add(self, other: Spent) -> None:
        """Add the seconds of another measurement."""
        self.seconds.update(other.seconds)

    def by_backend(self) -> dict[str, dict[str, float]]:
        """Return the seconds of each backend's parts, the backend that took most first."""
        found: dict[str, dict[str, float]] = {}
        for (backend, part), seconds in self.seconds.items():
            found.setdefault(backend, {})[part] = round(seconds, 3)
        return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))

    def __str__(self) -> str:
        """Say what took half a second and more."""
        said = []
        for backend, parts in self.by_backend().items():
            long = {part: s for part, s in parts.items() if s >= SAID_S}
            if long:
                each = ", ".join(f"{part} {s:.1f} s" for part, s in long.items())
                said.append(f"{backend} ({each})")
        return ", ".join(said) or "no part of it half a second"
