"""How much of a pass was shared: what its requests read together, counted from its plan."""

from __future__ import annotations

from typing import NamedTuple


class SharedKeys(NamedTuple):
    """What the requests of a pass read together.

    requests: of the pass, those that pad a CUDA graph included. grouped: those in groups.
    tokens: of the keys of groups, as many as their members would have read one by one; read: how
    many were read instead. They are those of a layer that shares most. saved: the share of the KV
    bytes of all layers that was not read again, from 0 to 1. Partials are not counted.
    """

    backend: str
    requests: int
    grouped: int
    tokens: int
    read: int
    saved: float
