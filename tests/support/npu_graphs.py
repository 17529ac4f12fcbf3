"""ACL graphs on a CPU: what torch.npu has of them, emulated as captures of torch's operations.

A capture records each operation with its tensors and with the numbers of its call. A replay runs
them again over the same memory, so that a number which depended on the captured requests is wrong
for others. A capture refuses what waits for the device.

A task is a captured call whose numbers an update replaces, while no replay runs. A graph waits for
the external event of a task, which each update records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

_WAITS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique")


class NPUGraph(TorchDispatchMode):
    """Records between its begin and its end, as torch_npu.npu.NPUGraph does."""

    captures = updates = 0  # of the process, for tests
    current: NPUGraph | None = None  # the one that captures
    running = False  # whether a replay may not have ended

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith(_WAITS):
            raise RuntimeError(f"EE9999: {name} waits for the device, which a capture forbids")
        out = func(*args, **(kwargs or {}))
        self.steps.append((func, args, dict(kwargs or {}), out))
        return out

    def replay(self) -> None:
        """Run the recorded operations again, into the memory of the capture."""
        NPUGraph.running = True
        with torch.no_grad():
            for step in self.steps:
                if callable(step):
                    step()
                    continue
                func, args, kwargs, out = step
                again = func(*args, **kwargs)
                for old, new in zip(_tensors(out), _tensors(again), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class _Update(TorchDispatchMode):
    """Takes the one call of an update in the place of a task's; nothing runs."""

    def __init__(self, graph: NPUGraph, place: int) -> None:
        super().__init__()
        self.graph, self.place = graph, place

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        old, args_then, kwargs_then, out = self.graph.steps[self.place]
        kwargs = dict(kwargs or {})
        assert func is old, "an update calls another operator"
        then, now = (_tensors((a, k)) for a, k in ((args_then, kwargs_then), (args, kwargs)))
        same = [a.data_ptr() == b.data_ptr() for a, b in zip(then, now, strict=True)]
        assert all(same), "an update with other tensors"
        self.graph.steps[self.place] = (func, args, kwargs, out)
        NPUGraph.updates += 1
        return out


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor)]


class Stream:
    """A stream that does what it is told at once."""

    def wait_stream(self, other: Stream) -> None:
        return

    def synchronize(self) -> None:
        NPUGraph.running = False


class ExternalEvent:
    """An event that a graph waits for and resets, and that an update records."""

    recorded = False

    def wait(self, stream: Stream) -> None:
        assert NPUGraph.current is not None
        NPUGraph.current.steps.append(self._wait)

    def _wait(self) -> None:
        if not self.recorded:
            raise RuntimeError("EE9999: a graph waits without end for an event")

    def reset(self, stream: Stream) -> None:
        assert NPUGraph.current is not None
        NPUGraph.current.steps.append(self._reset)

    def _reset(self) -> None:
        self.recorded = False

    def record(self, stream: Stream) -> None:
        self.recorded = True


class Module:
    """What attn-core and attn-ascend call of torch.npu."""

    NPUGraph, Stream, ExternalEvent = NPUGraph, Stream, ExternalEvent
    _stream = Stream()
    _group, _update = 0, None

    @classmethod
    def current_stream(cls) -> Stream:
        return cls._stream

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        yield

    @staticmethod
    def graph_pool_handle() -> tuple[int, int]:
        return (0, 1)

    @staticmethod
    @contextlib.contextmanager
    def graph(npu_graph: NPUGraph, pool: Any = None) -> Iterator[None]:
        NPUGraph.captures += 1
        NPUGraph.current = npu_graph
        try:
            with npu_graph:
                yield
        finally:
            NPUGraph.current = None

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return NPUGraph.current is not None

    @classmethod
    def graph_task_group_begin(cls, stream: Stream) -> None:
        assert NPUGraph.current is not None, "no capture is underway"
        cls._group = len(NPUGraph.current.steps)

    @classmethod
    def graph_task_group_end(cls, stream: Stream) -> tuple[NPUGraph, int]:
        assert NPUGraph.current is not None, "no capture is underway"
        assert len(NPUGraph.current.steps) == cls._group + 1, "a group of one call"
        return NPUGraph.current, cls._group

    @classmethod
    def graph_task_update_begin(cls, stream: Stream, handle: tuple[NPUGraph, int]) -> None:
        assert not NPUGraph.running, "a task is updated while a replay may run"
        cls._update = _Update(*handle)
        cls._update.__enter__()

    @classmethod
    def graph_task_update_end(cls, stream: Stream) -> None:
        cls._update.__exit__(None, None, None)


def put_in(monkeypatch: Any) -> type[NPUGraph]:
    """Let every runner of this process capture on a CPU, and count from 0."""
    NPUGraph.captures = NPUGraph.updates = 0
    NPUGraph.running = False
    monkeypatch.setattr("attn_core.runtime.graphs.GRAPHS", {"cpu": "NPUGraph"})
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    monkeypatch.setattr(torch, "npu", Module, raising=False)
    return NPUGraph
