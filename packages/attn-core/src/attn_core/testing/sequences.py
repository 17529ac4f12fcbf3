"""Requests and passes of the random session."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attn_core.runtime.batch import ForwardBatch
from attn_core.testing.cases import Parents


@dataclass(eq=False)
class Request:
    """A request, and per layer what its cache must hold, float64 [length, Hkv, D or Dv]."""

    key: int
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def length(self) -> int:
        return len(self.keys[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One pass: its batch and, per layer, its new tokens."""

    requests: tuple[Request, ...]
    news: tuple[int, ...]
    trees: tuple[Parents, ...] | None
    batch: ForwardBatch
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor | None]
