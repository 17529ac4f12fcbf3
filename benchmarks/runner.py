"""Measure cases: build the inputs, let each contestant prepare, check its result, time it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from attn_core.cache.layer_cache import TORCH_DTYPES

from benchmarks.cases import Case, Inputs, build
from benchmarks.contestant import Call, Contestant
from benchmarks.preparing import prepared
from benchmarks.results import REFUSES, Entry, Measured
from benchmarks.timing import Ceilings, CudaTimer, Timer

TOLERANCE = 1e-2  # relative error, bf16 results
TOLERANCE_FP8 = 1e-1  # some kernels round q and the probabilities to e4m3 as well, 2^-4 each


class DeviceLost(RuntimeError):  # noqa: N818  # an outcome of the run, said to the user
    """A contestant left the GPU's context unusable: nothing can be measured in this process."""


def measure_all(
    cases: Sequence[Case],
    ours: Contestant,
    peers_of: Callable[[Case], Iterable[Contestant]],
    *,
    device: torch.device,
    timer: Timer,
    ceilings: Ceilings,
    graph: bool = False,
    prepare_limit_s: float | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Measured]:
    """Yield each case when it is done, with every peer that takes it timed.

    graph: replay each call from a CUDA graph too. prepare_limit_s: see prepared(). Raises
    DeviceLost after what was measured was yielded.
    """
    for number, case in enumerate(cases, 1):
        say(f"[{number}/{len(cases)}] {case.name}")
        floor = ceilings.floor_us(case.bytes, case.flops)
        measured = Measured(
            name=case.name,
            phase=case.phase,
            shape=_shape(case),
            kv_bytes=case.kv_bytes,
            bytes=case.bytes,
            flops=case.flops,
            floor_us=floor,
            tolerance=tolerance(case),
            ours=Entry(name=ours.name, error="not measured"),
        )
        try:
            inputs = build(case, device)
        except torch.OutOfMemoryError as error:
            yield replace(measured, ours=Entry(name=ours.name, error=_text(error)))
            continue
        for contestant in (ours, *peers_of(case)):
            entry = measure(
                contestant, inputs, timer, floor, graph=graph, prepare_limit_s=prepare_limit_s
            )
            say("  " + describe(entry))
            if contestant is ours:
                measured = replace(measured, ours=entry)
            else:
                measured = replace(measured, peers=(*measured.peers, entry))
            if not usable(device):
                yield measured
                raise DeviceLost(
                    f"{contestant.name} broke the GPU's context on {case.name!r}: {entry.error}; "
                    f"run again without it"
                )
        ratio = measured.ratio
        if ratio is not None and measured.best_peer is not None:
            say(f"  ours / best peer ({measured.best_peer.name}): {ratio:.3f}")
        yield measured
        del inputs
        gc.collect()
        if number == 1:
            gc.freeze()  # libraries stay: later collections pass over them
        if device.type == "cuda":
            torch.cuda.empty_cache()


def tolerance(case: Case) -> float:
    """Return the relative error above which a result is wrong."""
    return TOLERANCE_FP8 if TORCH_DTYPES[case.kv_dtype].itemsize == 1 else TOLERANCE


def measure(
    contestant: Contestant,
    inputs: Inputs,
    timer: Timer,
    floor_us: float,
    *,
    graph: bool = False,
    prepare_limit_s: float | None = None,
) -> Entry:
    """Prepare, check and time one contestant; whatever it raises becomes its entry's error."""
    case, entry = inputs.case, Entry(name=contestant.name)
    if not contestant.available():
        return replace(entry, error=f"{contestant.module} is not installed")
    if reason := contestant.refuses(case):
        return replace(entry, error=REFUSES + reason)

    def prepare() -> tuple[Call, float]:
        call = contestant.prepare(inputs)
        poison(inputs)
        return call, inputs.error(call())  # the first call may compile

    start = time.perf_counter()
    try:
        call, error = prepared(contestant.name, prepare, prepare_limit_s)
        prepare_s = time.perf_counter() - start
        timing = timer.measure(call)
    except Exception as raised:  # another project's code may raise anything: record it, go on
        return replace(entry, error=_text(raised))
    entry = replace(
        entry,
        us=timing.us,
        p20=timing.p20,
        p80=timing.p80,
        reps=timing.reps,
        tflops=case.flops / timing.us / 1e6,
        gbs=case.kv_bytes / timing.us / 1e3,
        roofline=floor_us / timing.us,
        rel_err=error,
        wrong=not error <= tolerance(case),
        prepare_s=prepare_s,
    )
    if graph and isinstance(timer, CudaTimer):
        try:
            entry = replace(entry, graph_us=timer.measure_graph(call).us)
        except Exception as raised:  # not everything can be captured, and that is a finding too
            entry = replace(entry, graph_error=_text(raised))
    return entry


def describe(entry: Entry) -> str:
    """Say an entry in one line."""
    if entry.us is None:
        return f"{entry.name:<18} {entry.error}"
    parts = [
        f"{entry.us:10.1f} µs",
        f"{entry.tflops or 0:7.1f} TFLOP/s",
        f"{entry.gbs or 0:7.0f} GB/s",
    ]
    parts += [f"{entry.roofline or 0:5.0%} of the floor", f"error {entry.rel_err:.1e}"]
    if entry.graph_us is not None:
        parts.append(f"graph {entry.graph_us:.1f} µs")
    return f"{entry.name:<18} " + "  ".join(parts) + ("  WRONG" if entry.wrong else "")


def _shape(case: Case) -> dict[str, Any]:
    """Return what describes a case; the lengths of a ragged one follow from it."""
    names = (
        "batch length queries ragged tree q_heads kv_heads head_dim v_head_dim page_size dtype "
        "kv_dtype"
    )
    shape = {name: getattr(case, name) for name in names.split()}
    return shape | {"tokens": case.tokens, "kv_tokens": sum(case.seq_lens)}


def poison(inputs: Inputs) -> None:
    """Leave NaN in the block that the allocator hands out next for an output of this size.

    Else a kernel that writes nothing could return the right result of the contestant before it.
    """
    case = inputs.case
    shape = (case.tokens, case.q_heads, case.v_head_dim)
    torch.full(shape, torch.nan, dtype=inputs.q.dtype, device=inputs.q.device)


def usable(device: torch.device) -> bool:
    """Say whether the device still works after what a contestant did."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


def _text(error: BaseException) -> str:
    """Keep the kind of an error and the beginning of what it says, on one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:300]}"
