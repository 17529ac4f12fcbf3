"""Time a call: the GPU's own clock with a cold L2, or the host's clock on a CPU; and ceilings."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Call = Callable[[], object]
BUDGET_MS, MOST_REPS, FEWEST_REPS = 60.0, 30, 5
_WARM_UPS = 3
MOST_ROUNDS, NARROW = 3, 1.1  # of measurements; p80 over p20 of one that counts at once
MOST_FLUSHES, LEAST_FLUSH = 8, 1 << 28  # times, bytes


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of one call: the median and the 20th and 80th percentile of `reps` of them."""

    us: float
    p20: float
    p80: float
    reps: int

    @property
    def spread(self) -> float:
        """The 80th percentile over the 20th."""
        return self.p80 / self.p20

    @classmethod
    def of(cls, us: list[float]) -> Timing:
        """Summarise measured microseconds; percentiles are interpolated."""
        if len(us) == 1:
            return cls(us=us[0], p20=us[0], p80=us[0], reps=1)
        fifths = statistics.quantiles(us, n=5, method="inclusive")
        return cls(us=statistics.median(us), p20=fifths[0], p80=fifths[3], reps=len(us))


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What this machine reached in this run: bytes read and written by a copy, a bf16 matmul."""

    copy_gbs: float
    matmul_tflops: float

    def floor_us(self, num_bytes: int, flops: int) -> float:
        """Return the least microseconds for this traffic and this work."""
        return max(num_bytes / self.copy_gbs / 1e3, flops / self.matmul_tflops / 1e6)


def repetitions(estimate_ms: float) -> int:
    """Return how many calls fill the budget of some 60 ms, from 5 to 30."""
    return max(FEWEST_REPS, min(MOST_REPS, math.ceil(BUDGET_MS / max(estimate_ms, 1e-3))))


class WallTimer:
    """Times on the host's clock: for a CPU, where a call returns when its work is done."""

    def measure(self, call: Call) -> Timing:
        """Warm up, then repeat for the budget."""
        call()
        estimate = _seconds(call) * 1e3
        return Timing.of([_seconds(call) * 1e6 for _ in range(repetitions(estimate))])


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class CudaTimer:
    """Times with CUDA events, the L2 flushed before each repetition.

    The flush writes a buffer of at least twice the L2. It does a second service: an event before a
    kernel is stamped as soon as the queue reaches it, so a kernel that is shorter than its launch
    on the host would be timed with the idle gap between. While the GPU flushes, the host queues the
    event and the call behind it; the flush is repeated until it lasts longer than the host takes.
    clean: another buffer is read after that. Lines that were written have to go back to memory
    before the call's own fit, which takes some µs of it; an engine's weights leave lines as read.
    """

    def __init__(self, device: torch.device, *, clean: bool = False) -> None:
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.empty(max(2 * l2, LEAST_FLUSH), dtype=torch.int8, device=device)
        self._read = torch.ones_like(self._buffer) if clean else None
        self._flush_s = min(self._span(self._buffer.zero_) for _ in range(10)) / 1e3

    def measure(self, call: Call) -> Timing:
        """Warm up, then repeat for the budget, without a sync in between.

        Another program on the host or a change of clocks spreads the times. They are then measured
        again, up to three times, and the narrowest count.
        """
        rounds: list[Timing] = []
        for _ in range(MOST_ROUNDS):
            rounds.append(self._round(call))
            if rounds[-1].spread <= NARROW:
                break
        return min(rounds, key=lambda timing: timing.spread)

    def _round(self, call: Call) -> Timing:
        for _ in range(_WARM_UPS):
            call()
        torch.cuda.synchronize()
        host_s = min(_seconds(call) for _ in range(_WARM_UPS))  # returns when it is queued
        estimate = min(self._span(call) for _ in range(2))
        # a call that waits for the GPU takes long on the host, and no flush hides that
        flushes = min(MOST_FLUSHES, max(1, math.ceil(1.5 * host_s / self._flush_s)))
        pairs = []
        for _ in range(repetitions(estimate)):
            start, end = _events()
            for _ in range(flushes):
                self._buffer.zero_()
            if self._read is not None:
                self._read.sum()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return Timing.of([start.elapsed_time(end) * 1e3 for start, end in pairs])

    def measure_graph(self, call: Call) -> Timing:
        """Capture the call in a CUDA graph and measure its replay. Raises what capture raises."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no annotation here
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            call()
        return self.measure(graph.replay)

    def _span(self, call: Call) -> float:
        start, end = _events()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no annotation here
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no annotation here
    return start, end


Timer = WallTimer | CudaTimer


def timer_for(device: torch.device, *, clean: bool = False) -> Timer:
    """Return the timer of a device type. clean: of a GPU, see CudaTimer."""
    return CudaTimer(device, clean=clean) if device.type == "cuda" else WallTimer()


def measure_ceilings(timer: Timer, device: torch.device) -> Ceilings:
    """Measure a copy (read plus written bytes) and a square bf16 matmul; small ones on a CPU."""
    elements, side = (1 << 30, 8192) if device.type == "cuda" else (1 << 24, 256)
    source = torch.ones(elements, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copy = timer.measure(lambda: target.copy_(source))
    a: Tensor = torch.randn(side, side, device=device).bfloat16()
    product = timer.measure(lambda: a @ a)
    return Ceilings(
        copy_gbs=2 * source.nbytes / copy.us / 1e3,
        matmul_tflops=2 * side**3 / product.us / 1e6,
    )


def host_us(call: Call, calls: int = 20) -> float:
    """Return the microseconds of the host to queue a call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6
