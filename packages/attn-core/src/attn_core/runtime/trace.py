"""Count which backend ran which pass, and name passes for a profiler."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from attn_core.costs.table import Bucket, bucket_of
from attn_core.errors import UsageError
from attn_core.runtime.batch import ForwardBatch
from attn_core.spec.kinds import Role

NVTX = "ATTN_NVTX"
_Call = TypeVar("_Call", bound=Callable[..., Any])
Counted = tuple[Role, str, Bucket, bool, str]


class PassKind(NamedTuple):
    """Passes that are counted together.

    requests, longest, queries: from this number on, up to the next power of two: requests, tokens
    of the longest one, new tokens of each. captured: replayed in a CUDA graph; `longest` is then
    what the host knows, which may be the longest that the graph serves. group: the layers that the
    backend ran, in words, in a pass that several backends ran; "" is all of them. Such a pass is
    counted once for each group.
    """

    role: Role
    backend: str
    requests: int
    longest: int
    queries: int
    captured: bool
    group: str = ""


def size_of(batch: ForwardBatch) -> Bucket:
    """Return the bucket of a pass. Takes numbers of the host alone, equal on all ranks.

    A request has as many tokens in every view but that of an encoder, and not every model has a
    view "full".
    """
    view = batch.views.get("full")
    if view is None:
        own = (x.max_seq_len for name, x in batch.views.items() if name != "cross")
        longest = max(own, default=0)
    else:
        longest = view.max_seq_len
    return bucket_of(batch.batch_size, longest, batch.num_tokens)


class Trace:
    """Counters of passes. `count` is called in every pass: it reads and allocates little."""

    def __init__(self) -> None:
        self.counts: Counter[Counted] = Counter()

    def count(
        self, role: Role, backend: str, size: Bucket, captured: bool, group: str = ""
    ) -> None:
        """Count one pass."""
        self.counts[role, backend, size, captured, group] += 1

    def passes(self) -> Mapping[PassKind, int]:
        """Return how many passes of each kind there were."""
        return {kind_of(key): n for key, n in sorted(self.counts.items())}


def kind_of(key: Counted) -> PassKind:
    """Return what was counted, with the lower ends of its bucket."""
    role, backend, size, captured, group = key
    requests, longest, queries = ((1 << bits) >> 1 for bits in size)
    return PassKind(role, backend, requests, longest, queries, captured, group)


def switch(name: str, default: bool) -> bool:
    """Return what a variable of the environment says: 1 or 0; unset or empty is the default.

    Raises UsageError for another value.
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise UsageError(f"{name}={value} (expected 1 or 0; without it {int(default)})")
    return value == "1" if value else default


def ranged(name: str, call: _Call) -> _Call:
    """Return the call inside of an NVTX range, for a profiler of CUDA."""

    nvtx: Any = torch.cuda.nvtx  # torch does not annotate it

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        nvtx.range_push(name)
        try:
            return call(*args, **kwargs)
        finally:
            nvtx.range_pop()

    return run  # type: ignore[return-value]  # it takes and returns the same


def ranges() -> bool:
    """Say whether ATTN_NVTX asks for ranges. Raises UsageError."""
    return switch(NVTX, False)
