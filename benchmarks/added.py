"""Time a backend behind the dispatcher, and beside it the library's own calls for the same."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from attn_core.plugins.registry import Registry
from attn_core.runtime.backend import AttentionBackend, BackendConfig, create_backend
from attn_core.runtime.batch import DECODE_MODES, ForwardBatch
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.spec.device import Device
from attn_core.spec.kinds import Role

from benchmarks.cases import Case, Inputs, build
from benchmarks.ours import row_of
from benchmarks.plain import plain
from benchmarks.recorded import PLANS, RUNS, in_turn, plainly, recording
from benchmarks.timing import CudaTimer, Timing

Call = Callable[[], object]
# at most: µs a layer, times the library's plan, times the library's kernel, µs a replayed graph
LIMITS = {
    "host_us": 8.0,
    "plan_ratio": 1.1,
    "kernel_ratio": 1.02,
    "replay_us": 2.0,
    "context_ratio": 1.02,  # times the kernel in a graph that is captured for short requests
}
CONTEXT = 131072  # tokens of a request that a graph of a long context must have space for
ROUNDS, CALLS = 20, 50  # host time: so often that many calls, without a sync in between
LAYERS = 8  # of a replayed graph


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Microseconds through us, and of the library called directly with the same arguments."""

    ours: float
    direct: float

    @property
    def added(self) -> float:
        return self.ours - self.direct

    @property
    def ratio(self) -> float:
        return self.ours / self.direct


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """One backend on one case; None: not measured, on a CPU, or the library has no plan.

    host: a layer's call, eagerly. written_us: ours with the write of new keys and values. plan:
    once a pass; plan_us: ours, which starts from the batch; the library's has its arguments ready.
    plan_from_host_us: FlashInfer's with lengths on the host (plain.py). kernel: on the GPU. replay:
    the host's time of replaying LAYERS layers. context: on the GPU, in a graph that was captured
    for requests of CONTEXT tokens, and for those of the case, whose lengths both have. refill: what
    precedes the replay, through us alone.
    The library of our own kernels is Triton: the direct call is its launch of each of them.
    """

    backend: str
    case: str
    error: str | None = None
    host: Pair | None = None
    written_us: float | None = None
    plan_us: float | None = None
    plan: Pair | None = None
    plan_from_host_us: float | None = None
    kernel: Pair | None = None
    replay: Pair | None = None
    context: Pair | None = None
    refill_us: float | None = None

    @property
    def verdicts(self) -> dict[str, tuple[float, bool]]:
        """Figure → its value, and whether it keeps its limit."""
        values = {
            "host_us": None if self.host is None else self.host.added,
            "plan_ratio": None if self.plan is None else self.plan.ratio,
            "kernel_ratio": None if self.kernel is None else self.kernel.ratio,
            "replay_us": None if self.replay is None else self.replay.added,
            "context_ratio": None if self.context is None else self.context.ratio,
        }
        return {k: (v, v <= LIMITS[k]) for k, v in values.items() if v is not None}


@dataclass(frozen=True, eq=False)
class Served:
    """A dispatcher over a case's pool, and the case."""

    inputs: Inputs
    serve: HybridDispatcher

    def plan(self) -> object:
        return self.serve.init_forward_metadata(self.inputs.batch)

    def layer(self, metadata: object, *, writes: bool = False) -> Call:
        """Return one layer's call, everything planned; writes: new keys and values, again."""
        x, forward = self.inputs, self.serve.forward
        k, v = (x.k, x.v) if writes else (None, None)
        return lambda: forward(x.q, k, v, x.layer, x.batch, metadata)


def serving(name: str, inputs: Inputs, registry: Registry, kind: Device) -> Served:
    """Create a backend and a dispatcher for a case. Raises NoBackendError, BackendError."""
    case, device = inputs.case, inputs.q.device
    config = BackendConfig(
        name=name,
        row=row_of(name, case, registry, kind),
        layers=(inputs.layer,),
        page_size=case.page_size,
        dtype=case.dtype,
        kv_cache_dtype=case.kv_dtype,
        device=device,
        arch=kind.arch,
        max_bs=case.batch,
        max_num_tokens=case.tokens,
        max_seq_len=case.longest,
    )
    backend: AttentionBackend = create_backend(registry.get(name), config)
    roles: tuple[Role, ...] = ("prefill", "decode")
    return Served(inputs, HybridDispatcher(dict.fromkeys(roles, backend), inputs.pool))


def measure(
    name: str, case: Case, registry: Registry, device: torch.device, kind: Device
) -> Overhead:
    """Measure one backend on one case; whatever it raises becomes the error."""
    result = Overhead(backend=name, case=case.name)
    try:
        return _measured(name, build(case, device), registry, kind)
    except Exception as error:  # another project's code may raise anything: record it, go on
        message = " ".join(str(error).split())
        return replace(result, error=f"{type(error).__name__}: {message[:300]}")


def _measured(name: str, inputs: Inputs, registry: Registry, kind: Device) -> Overhead:
    device = inputs.q.device
    serving(name, inputs, registry, kind)  # loads the libraries, which are watched then
    with recording(RUNS, PLANS) as recorder:
        watched = serving(name, inputs, registry, kind)
        recorder.taken()
        metadata = watched.plan()
        plans = [plainly(call) for call in recorder.taken()]
        watched.layer(metadata)()  # may compile
        recorder.taken()
        watched.layer(metadata)()
        runs = [plainly(call) for call in recorder.taken()]
    if not runs:
        raise RuntimeError("no call of a known function was seen (benchmarks/recorded.py)")
    ours, direct = serving(name, inputs, registry, kind), in_turn(runs)
    planned = ours.plan()
    layer = ours.layer(planned)
    layer()
    *host, written = host_us((layer, direct, ours.layer(planned, writes=True)), device)
    kernel = replay = refill = context = None
    library = _library_plans(plans, inputs)
    plan_us, *own = host_us((ours.plan, *library), device, calls_each=1, rounds=4 * ROUNDS)
    if device.type == "cuda":
        kernel = _kernels(layer, direct, CudaTimer(device))
        if ours.serve.captured and inputs.batch.forward_mode in DECODE_MODES:
            replay, refill = _replays(ours, direct, device)
            context = _contexts(name, inputs, registry, kind)
    return Overhead(
        backend=name,
        case=inputs.case.name,
        host=pair(host),
        written_us=written.us,
        plan_us=plan_us.us,
        plan=pair((plan_us, own[0])) if own else None,
        plan_from_host_us=own[1].us if own[1:] else None,
        kernel=kernel,
        replay=replay,
        context=context,
        refill_us=refill,
    )


def _library_plans(plans: Sequence[functools.partial[object]], inputs: Inputs) -> tuple[Call, ...]:
    """Return the library's own plan; of FlashInfer it is the public one, and that from the host.

    plans: what a backend was seen to plan by, which is the library's plan everywhere else.
    """
    public = [p for p in (plain(call, inputs) for call in plans) if p is not None]
    if public and len(public) == len(plans):
        return in_turn([p.plan for p in public]), in_turn([p.from_host for p in public])
    return (in_turn(plans),) if plans else ()


def pair(timings: Sequence[Timing]) -> Pair:
    """Take the medians of ours and of the direct call."""
    ours, direct = timings
    return Pair(ours=ours.us, direct=direct.us)


def host_us(
    calls: Sequence[Call], device: torch.device, *, rounds: int = ROUNDS, calls_each: int = CALLS
) -> list[Timing]:
    """Time calls on the host, in turn: each round waits for the device first, then only queues."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for call, durations in zip(calls, times, strict=True):
                _wait(device)
                for _ in range(calls_each):
                    start = time.perf_counter_ns()
                    call()
                    durations.append((time.perf_counter_ns() - start) / 1e3)
    finally:
        gc.enable()
    _wait(device)
    return [Timing.of(x) for x in times]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _kernels(ours: Call, direct: Call, timer: CudaTimer) -> Pair:
    """Time both on the GPU, captured, so that no launch gap is in it; in turn, five times."""
    graphs = [_captured(call) for call in (ours, direct)]
    times = [[timer.measure(graph.replay).us for graph in graphs] for _ in range(5)]
    first, second = zip(*times, strict=True)
    return Pair(ours=statistics.median(first), direct=statistics.median(second))


def _replays(ours: Served, direct: Call, device: torch.device) -> tuple[Pair, float]:
    """Time the replay of a graph of LAYERS layers, and the refill before it, on the host."""
    batch = ours.inputs.batch
    ours.serve.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
    metadata = ours.serve.init_forward_metadata_capture_cuda_graph(batch)
    layer = ours.layer(metadata)
    graphs = [_captured(in_turn([call] * LAYERS)) for call in (layer, direct)]
    replays = host_us([graph.replay for graph in graphs], device, calls_each=4)

    def refill() -> None:
        ours.serve.init_forward_metadata_replay_cuda_graph(batch, metadata)

    return pair(replays), host_us([refill], device, calls_each=1, rounds=4 * ROUNDS)[0].us


def _contexts(name: str, inputs: Inputs, registry: Registry, kind: Device) -> Pair:
    """Time a layer in graphs for long and for short requests, over the same short ones."""
    graphs, timer = [], CudaTimer(inputs.q.device)
    for case, batch in ((inputs.case, inputs.batch), _long(inputs)):
        served = serving(name, replace(inputs, case=case, batch=batch), registry, kind)
        served.serve.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        metadata = served.serve.init_forward_metadata_capture_cuda_graph(batch)
        graphs.append((_captured(served.layer(metadata)), metadata))  # which the graph reads
        served.serve.init_forward_metadata_replay_cuda_graph(batch, metadata)
    times = [[timer.measure(graph.replay).us for graph, _ in graphs] for _ in range(5)]
    short, long = zip(*times, strict=True)
    return Pair(ours=statistics.median(long), direct=statistics.median(short))


def _long(inputs: Inputs) -> tuple[Case, ForwardBatch]:
    """Return the case and its batch with a page table of CONTEXT tokens a request."""
    view = inputs.batch.views["full"]
    columns = CONTEXT // inputs.case.page_size - view.page_table.shape[1]
    table = torch.nn.functional.pad(view.page_table, (0, max(0, columns)))
    longer = replace(view, page_table=table, max_seq_len=CONTEXT)
    batch = replace(inputs.batch, views={**inputs.batch.views, "full": longer})
    return replace(inputs.case, length=CONTEXT), batch


def _captured(call: Call) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no annotation here
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
