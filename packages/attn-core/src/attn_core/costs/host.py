"""Host times of measured passes, as if the machine had been equally fast in all of them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from attn_core.costs.profile import Cost, Key
from attn_core.costs.shapes import plain

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the passes: so many were measured at a greater speed


class Hosts(NamedTuple):
    """costs: at the machine's usual speed. speeds: 1.2 is a fifth slower, the fastest first."""

    costs: dict[Key, Cost]
    speeds: tuple[float, ...]

    def us(self, device_us: float, host_us: float) -> float:
        """Return what a call in no graph takes, on average over the machine's speeds.

        host_us: at the usual speed. Where the host takes longer than the device, it counts.
        """
        return statistics.fmean(max(device_us, host_us * speed) for speed in self.speeds)


def evened(costs: Mapping[Key, Cost]) -> Hosts:
    """Return the costs with the host's times divided by the machine's speed in their pass.

    A core that shares its caches, or is far from the device, takes twice as long for the same call,
    for seconds and for every backend alike. In each pass the speed is what its backends took over
    what they take in the middle of their passes of that kind, on average.
    """
    kinds: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for key, cost in costs.items():
        if cost.host_us > 0:
            kinds[_kind(key)].append(cost.host_us)
    usual = {kind: statistics.median(times) for kind, times in kinds.items()}
    slower: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for key, cost in costs.items():
        if cost.host_us > 0:
            slower[key[2:]].append(math.log(cost.host_us / usual[_kind(key)]))
    factors = {key: math.exp(statistics.fmean(logs)) for key, logs in slower.items()}
    at_usual = {
        key: cost._replace(host_us=cost.host_us / factors.get(key[2:], 1.0))
        for key, cost in costs.items()
    }
    return Hosts(at_usual, _quantiles(sorted(factors.values())))


def _quantiles(speeds: list[float]) -> tuple[float, ...]:
    """Return the speeds at SHARES, (1.0,) where none was measured."""
    last = len(speeds) - 1
    return tuple(speeds[round(share * last)] for share in SHARES) if speeds else (1.0,)


def _kind(key: Key) -> tuple[Any, ...]:
    """Return whose launches a pass takes: whole prompts may run on other kernels than chunks."""
    size = key.size
    whole = size.queries == size.kv_tokens
    return key.backend, key.row, plain(key.form), size.phase, size.tree, whole
