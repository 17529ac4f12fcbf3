"""ACL graphs on a CPU: what torch.npu has of them, emulated as captures of torch's operations.

A capture records each operation with its tensors and with the numbers of its call. A replay runs
them again over the same memory, so that a number which depended on the captured requests is wrong
for others. A capture refuses what waits for the device.
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
    """Records between capture_begin and capture_end, as torch_npu.npu.NPUGraph does."""

    captures = 0  # of the process, for tests

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith(_WAITS):
            raise RuntimeError(f"EE9999: {name} waits for the device, which a capture forbids")
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        """Run the recorded operations again, into the memory of the capture."""
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(_tensors(out), _tensors(again), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor)]


class Stream:
    """A stream that does what it is told at once."""

    def wait_stream(self, other: Stream) -> None:
        return


class Module:
    """What GraphRunner reads of torch.npu."""

    NPUGraph, Stream = NPUGraph, Stream

    @staticmethod
    def current_stream() -> Stream:
        return Stream()

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
        with npu_graph:
            yield


def put_in(monkeypatch: Any) -> type[NPUGraph]:
    """Let every runner of this process capture on a CPU, and count from 0."""
    NPUGraph.captures = 0
    monkeypatch.setattr("attn_core.runtime.graphs.GRAPHS", {"cpu": "NPUGraph"})
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    return NPUGraph
