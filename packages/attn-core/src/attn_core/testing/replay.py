"""CUDA graphs: a pass is captured once and replayed with other requests in the same buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_core.backend import AttentionBackend, Metadata
from attn_core.forward import DECODE_MODES, ForwardBatch, SpecInfo
from attn_core.kv_cache import STORES
from attn_core.testing.bench import Bench
from attn_core.testing.budget import Measure, worst
from attn_core.testing.cases import Case
from attn_core.testing.inputs import Answer, Inputs, Point, mapped, without_host_lengths
from attn_core.testing.passes import compare, create, prepared, returned

Rows = Sequence[int | None]  # which request of the case sits in each row, None is padding


def replayed(bench: Bench, case: Case, point: Point) -> Measure:
    """Capture with padding alone, then replay half of the requests, in other orders and lengths.

    Also fewer of them, and the other half. The static page table is a slice of a wider one.
    On a CUDA device the call is captured in a graph; elsewhere it is made again, with the metadata
    and the tensors of the capture, which shows the same mistakes.
    """
    inputs, right = prepared(bench, case, point)
    backend = create(bench, case, inputs, point)
    fill, n = max(backend.get_cuda_graph_seq_len_fill_value(), case.drafts), case.drafts or 1
    everyone = list(range(len(case.seq_lens)))
    rows, others = everyone[: len(everyone) // 2], everyone[::-1][: len(everyone) // 2]
    none: Rows = [None] * len(rows)
    static = mapped(_arranged(inputs, case, point, none, fill), torch.Tensor.clone)
    static = dataclasses.replace(static, batch=bounded(static.batch, point.page_size))
    backend.init_cuda_graph_state(len(rows), static.batch.num_tokens)
    metadata = backend.init_forward_metadata_capture_cuda_graph(static.batch)
    shape = (len(rows) * n, static.layer.num_q_heads, static.layer.v_head_dim)
    out = static.q.new_full(shape, torch.nan)
    again = captured(_one_layer(backend, static, metadata, out), out.device)
    measures = []
    for order in (rows, rows[::-1], [*rows[1:], None], others, rows):
        fresh = _arranged(inputs, case, point, order, fill)
        for mine, new in ((static.q, fresh.q), (static.k, fresh.k), (static.v, fresh.v)):
            if mine is not None and new is not None:
                mine.copy_(new)
        batch = overwritten(static.batch, fresh.batch)
        backend.init_forward_metadata_replay_cuda_graph(batch, metadata)
        out.fill_(torch.nan)
        again()
        real = _tokens([r for r in order if r is not None], n)
        truth, near = ((o[real], lse[real]) for o, lse in right)
        answer: Answer = (truth, near)
        got = (out, None)
        measures.append(compare(got, answer, len(real), STORES[point.dtype], "replayed output"))
    return worst(measures)


def _tokens(requests: Sequence[int], n: int) -> Tensor:
    return torch.tensor([r * n + i for r in requests for i in range(n)], dtype=torch.int64)


def _arranged(inputs: Inputs, case: Case, point: Point, order: Rows, fill: int) -> Inputs:
    """Return the pass with its requests in another order, padded rows at the end or alone."""
    real, n = [r for r in order if r is not None], case.drafts or 1
    old, device = inputs.batch.views["full"], inputs.q.device
    table = old.page_table.new_zeros(len(order), old.page_table.shape[1])
    table[: len(real)] = old.page_table[real]
    spec = inputs.batch.spec
    if spec is not None and spec.tree_mask is not None:
        mask = spec.tree_mask[[*real, *[0] * (len(order) - len(real))]]
        spec = SpecInfo(topk=spec.topk, num_draft_tokens=n, tree_mask=mask)
    batch = ForwardBatch.build(
        case.mode,
        query_lens=[n] * len(order),
        seq_lens=[*(case.seq_lens[r] for r in real), *[fill] * (len(order) - len(real))],
        page_table=table,
        page_size=point.page_size,
        spec=spec,
    )
    tokens = _tokens(real, n).to(device)

    def pick(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        new = x.new_zeros(len(order) * n, *x.shape[1:])
        new[: len(tokens)] = x[tokens]
        return new

    q = inputs.q.new_zeros(len(order) * n, *inputs.q.shape[1:])
    q[: len(tokens)] = inputs.q[tokens]
    return dataclasses.replace(inputs, batch=batch, q=q, k=pick(inputs.k), v=pick(inputs.v))


def bounded(batch: ForwardBatch, page_size: int) -> ForwardBatch:
    """Return the batch as it is captured: lengths are on the device and bounded by the table."""
    views = {}
    for name, view in batch.views.items():
        width = view.page_table.shape[1]
        table = torch.cat([view.page_table, torch.zeros_like(view.page_table)], 1)[:, :width]
        views[name] = dataclasses.replace(view, page_table=table, max_seq_len=width * page_size)
    return without_host_lengths(dataclasses.replace(batch, views=views))


def overwritten(static: Any, new: Any) -> Any:
    """Copy every tensor of `new` into its place in `static`; return `new` with those tensors."""
    if isinstance(new, Tensor):
        return static.copy_(new)
    if isinstance(new, dict):
        return {k: overwritten(static[k], x) for k, x in new.items()}
    if dataclasses.is_dataclass(new) and not isinstance(new, type):
        names = [f.name for f in dataclasses.fields(new)]
        fields = {x: overwritten(getattr(static, x), getattr(new, x)) for x in names}
        return dataclasses.replace(new, **fields)
    return new


def _one_layer(
    backend: AttentionBackend, static: Inputs, metadata: Metadata, out: Tensor
) -> Callable[[], None]:
    decodes = static.batch.forward_mode in DECODE_MODES
    run = backend.forward_decode if decodes else backend.forward_extend

    def call() -> None:
        got = run(
            static.q, static.k, static.v, static.layer, static.cache, static.batch, metadata,
            out=out,
        )  # fmt: skip
        returned(got, tuple(out.shape), out.dtype, out=out, return_lse=False)  # type: ignore[arg-type]  # three dims

    return call


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
