"""CUDA graphs: a pass is captured once and replayed with other requests in the same buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_core.errors import BatchError
from attn_core.runtime.batch import ForwardBatch


def bounded(batch: ForwardBatch, page_size: int) -> ForwardBatch:
    """Return the batch as it is captured: lengths are on the device and bounded by the table."""
    views = {}
    for name, view in batch.views.items():
        width = view.page_table.shape[1]
        table = torch.cat([view.page_table, torch.zeros_like(view.page_table)], 1)[:, :width]
        views[name] = dataclasses.replace(view, page_table=table, max_seq_len=width * page_size)
    return without_host_lengths(dataclasses.replace(batch, views=views))


def overwritten(static: Any, new: Any) -> Any:
    """Copy every tensor of `new` into its place in `static`; return `new` with those tensors.

    Raises BatchError where one has a tensor and the other none: a graph goes on using its own.
    """
    if isinstance(new, Tensor) != isinstance(static, Tensor):
        raise BatchError(
            f"a captured pass with {_named(static)} is replayed with {_named(new)}; capture it "
            "again, or give what it was captured with"
        )
    if isinstance(new, Tensor):
        return static.copy_(new)
    if isinstance(new, dict):
        return {k: overwritten(static[k], x) for k, x in new.items()}
    if dataclasses.is_dataclass(new) and not isinstance(new, type):
        names = [f.name for f in dataclasses.fields(new)]
        fields = {x: overwritten(getattr(static, x), getattr(new, x)) for x in names}
        return dataclasses.replace(new, **fields)
    return new


def _named(x: object) -> str:
    return f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else f"{x} in its place"


def captured(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture a call in a CUDA graph and return its replay; on other devices the call itself."""
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no annotation here
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a kernel allocates or compiles on its first call
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], None] = graph.replay
    return replay


def without_host_lengths(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch with its lengths on the device alone."""
    views = {k: dataclasses.replace(v, seq_lens_host=None) for k, v in batch.views.items()}
    return dataclasses.replace(batch, views=views, query_lens_host=None)
