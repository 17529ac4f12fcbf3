"""CUDA graphs: capture a step once per batch size and replay it with other requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_core.cache.page_table import num_pages_for
from attn_core.errors import UnsupportedError, UsageError
from attn_core.runtime.backend import BackendConfig, Metadata
from attn_core.runtime.batch import DECODE_MODES, ForwardBatch, ForwardMode
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.routes import ROLE_OF_MODE, Pick
from attn_core.runtime.static_batch import StaticBatch, cached_views
from attn_core.runtime.trace import size_of

# device → the class of its graphs, in torch's module of that device
GRAPHS: Mapping[str, str] = {"cuda": "CUDAGraph", "npu": "NPUGraph"}


class GraphRunner:
    """Captures whole steps of a model by batch size and replays them, padded to such a size.

    A step is a function of (batch, metadata, *inputs). It runs all layers and returns a tensor, or
    a tuple, list or dict of tensors, with the same number of rows for each request. The runner owns
    the batch and the inputs that a step reads, and copies those of a pass into them: each page
    table, and all other tensors of one dtype together. A padded request has only page 0, writes to
    slot 0, has no state, and has the backend's fill value as its length, or its number of queries
    if that is larger.

    A replay does not wait for the device, unless a backend has to change numbers in its graph: it
    then waits for the replay before. Outputs are valid until the next replay, and only one stream
    at a time may use a runner. On a device without graphs, a replay reruns the step. Where an
    adaptive dispatcher picks other backends for other lengths, a size has a graph for each of them.

    batch_sizes: the sizes to capture.
    max_seq_len: tokens of the longest request; a mapping gives each view its own.
    max_query_len: the most queries per request, by default the number of drafts that the dispatcher
    verifies.
    Raises UsageError for no sizes and for numbers below 1.
    """

    def __init__(
        self,
        dispatcher: HybridDispatcher,
        *,
        batch_sizes: Iterable[int],
        max_seq_len: int | Mapping[str, int],
        max_query_len: int | None = None,
    ) -> None:
        verify = dispatcher.routes.get("verify")
        drafts = verify.config.num_draft_tokens if verify is not None else 0
        self.batch_sizes = sorted(set(batch_sizes))
        self.max_query_len = max(drafts, 1) if max_query_len is None else max_query_len
        if not self.batch_sizes or min(self.batch_sizes[0], self.max_query_len) < 1:
            raise UsageError(
                f"batch_sizes {self.batch_sizes}, max_query_len {self.max_query_len} (expected "
                "one batch size at least, and numbers of 1 or more)"
            )
        self._dispatcher, self._max_seq_len = dispatcher, max_seq_len
        self._device = dispatcher.caches.device
        self._steps: dict[tuple[ForwardMode, int], _Step] = {}
        max_bs = self.batch_sizes[-1]
        dispatcher.init_cuda_graph_state(max_bs, max_bs * self.max_query_len)
        # all graphs share their memory: they run one after the other
        has_graphs = self._device.type in GRAPHS
        module: Any = torch.get_device_module(self._device) if has_graphs else None
        self._pool = module.graph_pool_handle() if has_graphs else None

    def capture(
        self,
        mode: ForwardMode,
        run: Callable[..., Any],
        *,
        inputs: Sequence[Tensor] = (),
        query_len: int | None = None,
    ) -> None:
        """Capture a step for every batch size, with padded requests only.

        inputs: one tensor [T, …] for each input of the step; only its dtype and its dims after the
        first are read.
        query_len: the queries of every request: 1 for decode, the number of drafts for verify.
        Raises UnsupportedError if the backend's row has no graphs for such a pass, and UsageError
        for invalid outputs and for a query_len that is missing or too large.
        """
        if mode is ForwardMode.IDLE:
            raise UsageError("an idle pass has no tokens: there is nothing to capture")
        config, linear = (
            self._dispatcher.backend(ROLE_OF_MODE[mode]).config,
            self._dispatcher.linear,
        )
        queries = self._queries(mode, config, query_len)
        static = StaticBatch(
            mode,
            config,
            inputs,
            requests=self.batch_sizes[-1],
            query_len=queries,
            columns={
                name: num_pages_for(self._longest(name), config.page_size)
                for name in cached_views(config, queries)
            },
            create_table=self.create_table,
            fill_len=self._dispatcher.get_cuda_graph_seq_len_fill_value(),
            state_slots=() if linear is None else linear.captured_slots(mode),
        )
        graphs, pickers = {}, self._dispatcher.pickers
        for size in reversed(self.batch_sizes):  # the largest first: the others fit its memory
            batch, first = static.first(size)
            for pick in pickers.by_length(mode, size_of(batch)):
                metadata = self._dispatcher.init_forward_metadata_capture_cuda_graph(batch, pick)
                call = partial(run, batch, metadata, *first)
                replay, outputs = captured(call, self._device, self._pool)
                _cut(outputs, size, size)  # refused here, not at the first replay
                graphs[size, pick] = _Graph(batch, metadata, replay)
        self._steps[mode, queries] = _Step(static, graphs)

    def fits(self, batch: ForwardBatch) -> bool:
        """Say whether a pass can be replayed; run others eagerly. Never syncs."""
        return self._refusal(batch) is None

    def replay(self, batch: ForwardBatch, *inputs: Tensor) -> Any:
        """Run the captured step for these requests; return its outputs without the padded ones.

        inputs: [T, …] each, as captured.
        Raises UnsupportedError, with the reason, for a pass that does not fit, and BatchError for
        inputs of another number or shape.
        """
        refusal = self._refusal(batch)
        if refusal is not None:
            raise UnsupportedError(f"{refusal}; run the pass eagerly")
        step, size = self._steps[batch.forward_mode, batch.max_q_len], batch.batch_size
        padded_size = self.batch_sizes[bisect_left(self.batch_sizes, size)]
        _, longest, queries = size_of(batch)
        bucket = (padded_size.bit_length(), longest, queries)
        graph = step.graphs[
            padded_size, self._dispatcher.pickers.captured_at(batch.forward_mode, bucket)
        ]
        step.static.fill(batch, inputs)
        planned = step.static.described(graph.batch, batch)
        self._dispatcher.init_forward_metadata_replay_cuda_graph(planned, graph.metadata)
        return _cut(graph.replay(), graph.batch.batch_size, size)

    def create_table(self, requests: int, columns: int) -> Tensor:
        """Create a static page table, int32 zeros [requests, columns]; override to place it."""
        return torch.zeros(requests, columns, dtype=torch.int32, device=self._device)

    def _queries(self, mode: ForwardMode, config: BackendConfig, num_queries: int | None) -> int:
        fixed = 1 if mode in DECODE_MODES else None
        if mode is ForwardMode.TARGET_VERIFY:
            fixed = config.num_draft_tokens
        queries = fixed if num_queries is None else num_queries
        if not queries or (fixed is not None and queries != fixed) or queries > self.max_query_len:
            expected = f"1 to max_query_len {self.max_query_len}" if fixed is None else f"{fixed}"
            raise UsageError(
                f"{mode.value} passes of {queries} queries per request, max_query_len "
                f"{self.max_query_len} (expected query_len {expected}; the drafts are those of "
                "Requirements.speculation)"
            )
        return queries

    def _longest(self, view: str) -> int:
        longest = self._max_seq_len
        if not isinstance(longest, int):
            longest = longest.get(view, 0)
        if longest < 1:
            raise UsageError(f"view {view!r}: max_seq_len {longest} (expected 1 or more)")
        return longest

    def _refusal(self, batch: ForwardBatch) -> str | None:
        mode, size, queries = batch.forward_mode, batch.batch_size, batch.max_q_len
        step = self._steps.get((mode, queries))
        if step is None:
            modes = ", ".join(f"{m.value} of {n}" for m, n in self._steps) or "nothing"
            return f"{mode.value} of {queries} queries per request is not captured (is: {modes})"
        if batch.num_tokens != size * queries:
            return f"{batch.num_tokens} tokens of {size} requests: not {queries} for each"
        if size > self.batch_sizes[-1]:
            return f"{size} requests: graphs are captured for up to {self.batch_sizes[-1]}"
        return step.static.refusal(batch)


@dataclass(frozen=True, eq=False)
class _Graph:
    """One captured batch size; `replay` returns the outputs, those of padding too."""

    batch: ForwardBatch
    metadata: Metadata
    replay: Callable[[], Any]


@dataclass(frozen=True, eq=False)
class _Step:
    """What was captured of one mode and query length: its memory, and a graph per size and pick."""

    static: StaticBatch
    graphs: Mapping[tuple[int, Pick | None], _Graph]


def captured(
    call: Callable[[], Any], device: torch.device, pool: Any = None
) -> tuple[Callable[[], Any], Any]:
    """Capture a call in a CUDA graph, or an ACL graph; return its replay function and its outputs.

    pool: the result of graph_pool_handle() of torch's module of the device, for memory that several
    graphs share. On other devices the replay is the call itself.
    """
    run, kind = torch.no_grad()(call), GRAPHS.get(device.type)
    if kind is None:
        return run, run()
    module: Any = torch.get_device_module(device)  # torch.cuda, or the torch.npu of torch-npu
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):  # what a kernel allocates or compiles on its first call
        for _ in range(2):
            run()
    module.current_stream().wait_stream(side)
    graph = getattr(module, kind)()
    with module.graph(graph, pool=pool):
        outputs = run()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay, outputs


def without_host_lengths(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch with its lengths on the device only."""
    views = {k: replace(v, seq_lens_host=None) for k, v in batch.views.items()}
    return replace(batch, views=views, query_lens_host=None)


def _cut(outputs: Any, size: int, requests: int) -> Any:
    """Return the outputs of `size` requests without those behind the first `requests`."""
    if isinstance(outputs, Tensor):
        if not outputs.dim() or outputs.shape[0] % size:
            raise UsageError(
                f"a step of {size} requests returned {list(outputs.shape)} (expected as many rows "
                "for each request)"
            )
        return outputs[: outputs.shape[0] // size * requests]
    if isinstance(outputs, dict):
        return {name: _cut(x, size, requests) for name, x in outputs.items()}
    if isinstance(outputs, tuple | list):
        parts = [_cut(x, size, requests) for x in outputs]
        return type(outputs)(*parts) if hasattr(outputs, "_fields") else type(outputs)(parts)
    if outputs is None:
        return None
    raise UsageError(f"a step returned {type(outputs).__name__} (expected tensors)")
