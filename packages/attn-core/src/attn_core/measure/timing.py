"""Time calls in interleaved rounds until their order is certain."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from attn_core.costs.profile import TIE, Cost

Call = Callable[[], object]
FEWEST, MOST, CHANCE = 7, 40, 0.01
PLANS, PLANNING_S = 5, 0.02  # samples of a plan, at most; seconds after which they are enough
TRIES, SLOWER = 3, 4.0  # after so many rounds, what takes so many times the fastest is out
DISTURBED = 0.25  # of its median, between a call's quartiles: something else ran there
FLUSH_BYTES, MOST_FLUSHES = 1 << 28, 8


class CpuClock:
    """Times on the host's clock: a CPU's call returns when its work is done."""

    def sample(self, call: Call) -> tuple[float, float]:
        """Return the µs of a call: all of it, and 0 for a host beside it."""
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6, 0.0


class EventClock:
    """Times with the device's events, its caches flushed before each call.

    An event is stamped when the queue reaches it. While the device flushes, the host queues the
    event and the call behind it, so that the launch on the host is not in the device's time. The
    flush is repeated until it takes longer than the host's part of any call so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._host_s = device, 0.0
        self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._flush_s = min(self._span(self._buffer.zero_) for _ in range(5)) / 1e3

    def sample(self, call: Call) -> tuple[float, float]:
        """Return the µs of a call on the device, and on the host until it returned."""
        flushes = 1.5 * self._host_s / max(self._flush_s, 1e-6)
        for _ in range(max(1, min(MOST_FLUSHES, math.ceil(flushes)))):
            self._buffer.zero_()
        start, end = self._events()
        start.record()
        host_start = time.perf_counter()
        call()
        host = time.perf_counter() - host_start
        end.record()
        torch.accelerator.synchronize(self.device)
        self._host_s = max(self._host_s, min(host, 1e-2))
        return float(start.elapsed_time(end)) * 1e3, host * 1e6

    def _span(self, call: Call) -> float:
        start, end = self._events()
        start.record()
        call()
        end.record()
        torch.accelerator.synchronize(self.device)
        return float(start.elapsed_time(end))

    def _events(self) -> tuple[Any, Any]:
        create = torch.get_device_module(self.device).Event
        return create(enable_timing=True), create(enable_timing=True)


Clock = CpuClock | EventClock


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CpuClock() if device.type == "cpu" else EventClock(device)


def measure(calls: Mapping[str, Call], clock: Clock, seconds: float) -> dict[str, Cost]:
    """Time every call once a round, in turns, until the order is certain or the time is spent.

    The order of neighbours is certain where a sign test over the rounds says so (at 1 %), or where
    their medians differ by less than 1 %. No fewer than 3 rounds; 7 where the time allows. What is
    far slower than the fastest is in 3 rounds alone: nobody asks how much slower it is.
    Rounds that something disturbed are repeated, once; the calmer of both count.
    """
    costs = _rounds(calls, clock, seconds)
    if _spread(costs) <= DISTURBED:
        return costs
    return min(costs, _rounds(calls, clock, seconds), key=_spread)


def least(call: Call, clock: Clock) -> float:
    """Return the least µs of a few calls, each on the host or the device, whichever is longer."""
    end, shortest = time.perf_counter() + PLANNING_S, math.inf
    for _ in range(PLANS):
        shortest = min(shortest, max(clock.sample(call)))
        if time.perf_counter() > end:
            break
    return shortest


def _spread(costs: Mapping[str, Cost]) -> float:
    """Return how far the quartiles of a call lie apart at worst, over its median."""
    return max(((cost.high - cost.low) / cost.us for cost in costs.values()), default=0.0)


def _rounds(calls: Mapping[str, Call], clock: Clock, seconds: float) -> dict[str, Cost]:
    names, samples = list(calls), {name: list[tuple[float, float]]() for name in calls}
    end = time.perf_counter() + seconds
    for number in range(MOST):
        offset = number % max(len(names), 1)
        for name in names[offset:] + names[:offset]:  # nobody is always behind the same other
            samples[name].append(clock.sample(calls[name]))
        if number == TRIES - 1:
            middles = {name: statistics.median(s[0] for s in samples[name]) for name in names}
            names = [n for n in names if middles[n] <= SLOWER * min(middles.values())]
        late = time.perf_counter() > end
        timed = {name: samples[name] for name in names}
        if number >= (TRIES - 1 if late else FEWEST - 1) and (late or certain(timed)):
            break
    return {name: cost_of(taken) for name, taken in samples.items()}


def cost_of(samples: Sequence[tuple[float, float]]) -> Cost:
    """Return the median and the quartiles of the device's µs, and the least of the host's.

    What else runs on the machine only adds to what the host takes, for seconds at a time.
    """
    us, host = ([s[i] for s in samples] for i in (0, 1))
    quarters = statistics.quantiles(us, n=4, method="inclusive") if len(us) > 1 else us * 3
    low, middle, high = (max(x, 1e-3) for x in quarters)
    return Cost(middle, low, high, min(host))


def certain(samples: Mapping[str, Sequence[tuple[float, float]]]) -> bool:
    """Say whether the order of all neighbours, by median, is certain or does not matter."""
    times = {name: [s[0] for s in taken] for name, taken in samples.items()}
    ranked = sorted(times.values(), key=statistics.median)
    return all(_settled(a, b) for a, b in pairwise(ranked))


def _settled(fast: Sequence[float], slow: Sequence[float]) -> bool:
    if statistics.median(slow) <= (1 + TIE) * statistics.median(fast):
        return len(fast) >= 2 * FEWEST
    wins = sum(a < b for a, b in zip(fast, slow, strict=True))
    return _by_chance(wins, len(fast)) < CHANCE


def _by_chance(wins: int, rounds: int) -> float:
    """Return the probability of as many wins or more if both were equally fast."""
    return float(sum(math.comb(rounds, k) for k in range(wins, rounds + 1)) / 2**rounds)
