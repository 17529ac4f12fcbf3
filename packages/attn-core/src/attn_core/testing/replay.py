"""The replay check: capture a pass once, and replay it with other requests in the same buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.pool import KVPool
from attn_core.runtime.backend import AttentionBackend, Metadata
from attn_core.runtime.batch import ForwardBatch, SpecInfo
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.graphs import GraphRunner
from attn_core.spec.kinds import Role
from attn_core.testing.answers import Answer
from attn_core.testing.cases import Case
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Inputs, Point
from attn_core.testing.passes import compare, create, prepared, returned
from attn_core.testing.tolerance import Measure, worst

Rows = Sequence[int | None]  # which request of the case sits in each row, None is padding


def replayed(bench: Bench, case: Case, point: Point) -> Measure:
    """Capture with padding alone, then replay half of the requests, in other orders and lengths.

    Also fewer of them, and the other half. The static page table is a slice of a wider one.
    On a CUDA device the call is captured in a graph; elsewhere it is made again, with the metadata
    and the tensors of the capture, which shows the same mistakes.
    """
    inputs, reference = prepared(bench, case, point)
    backend = create(bench, case, inputs, point)
    fill, n = max(backend.get_cuda_graph_seq_len_fill_value(), case.drafts), case.drafts or 1
    requests = list(range(len(case.seq_lens)))
    rows, reversed_rows = requests[: len(requests) // 2], requests[::-1][: len(requests) // 2]
    runner = _Runner(
        _served(backend),
        batch_sizes=[len(rows)],
        max_seq_len=inputs.batch.views["full"].page_table.shape[1] * point.page_size,
    )
    shape = (len(rows) * n, inputs.layer.num_q_heads, inputs.layer.v_head_dim)
    out = inputs.q.new_full(shape, torch.nan)

    def run(batch: ForwardBatch, metadata: Metadata, q: Tensor, *new: Tensor) -> Tensor:
        selection = None
        if inputs.indexer is not None:
            new, (q_index, weights) = new[:-2], new[-2:]
            selection = backend.index_topk(
                q_index, weights, inputs.layer, inputs.cache, batch, metadata
            )
        k, v = (*new, None, None)[:2]
        actual = backend.forward(
            *(q, k, v, inputs.layer, inputs.cache, batch, metadata),
            out=out,
            topk_indices=selection,
        )
        returned(actual, shape, out.dtype, out=out, return_lse=False)
        return out

    runner.capture(case.mode, run, inputs=_tensors(inputs), query_len=n)
    measures = []
    for order in (rows, rows[::-1], [*rows[1:], None], reversed_rows, rows):
        new_inputs = _arranged(inputs, case, point, order, fill)
        out.fill_(torch.nan)
        actual = runner.replay(new_inputs.batch, *_tensors(new_inputs)), None
        tokens = _tokens([r for r in order if r is not None], n)
        truth, baseline = ((o[tokens], lse[tokens]) for o, lse in reference)
        token_reference: Answer = (truth, baseline)
        measures.append(
            compare(
                actual, token_reference, len(tokens), TORCH_DTYPES[point.dtype], "replayed output"
            )
        )
    return worst(measures)


class _Runner(GraphRunner):
    """Its page tables are slices of wider ones."""

    def create_table(self, requests: int, columns: int) -> Tensor:
        return super().create_table(requests, 2 * columns)[:, :columns]


def _served(backend: AttentionBackend) -> HybridDispatcher:
    """Route every pass to one backend; a step brings its own cache."""
    config = backend.config
    pool = KVPool(
        [],
        num_pages=1,
        page_size=config.page_size,
        kv_cache_dtype=config.kv_cache_dtype,
        layout=min(config.row.layouts, key=lambda x: x != "NHD"),
        device=config.device,
    )
    roles: tuple[Role, ...] = ("prefill", "decode", "verify", "draft")
    return HybridDispatcher(dict.fromkeys(roles, backend), pool)


def _tensors(inputs: Inputs) -> list[Tensor]:
    tensors = [x for x in (inputs.q, inputs.k, inputs.v) if x is not None]
    indexer = inputs.indexer
    return tensors if indexer is None else [*tensors, indexer.q_index, indexer.weights]


def _tokens(requests: Sequence[int], n: int) -> Tensor:
    return torch.tensor([r * n + i for r in requests for i in range(n)], dtype=torch.int64)


def _arranged(inputs: Inputs, case: Case, point: Point, order: Rows, fill: int) -> Inputs:
    """Return the pass with its requests in another order, padded rows at the end or alone."""
    order_without_padding, n = [r for r in order if r is not None], case.drafts or 1
    old, device = inputs.batch.views["full"], inputs.q.device
    table = old.page_table.new_zeros(len(order), old.page_table.shape[1])
    table[: len(order_without_padding)] = old.page_table[order_without_padding]
    spec = inputs.batch.spec
    if spec is not None and spec.tree_mask is not None:
        mask = spec.tree_mask[
            [*order_without_padding, *[0] * (len(order) - len(order_without_padding))]
        ]
        spec = SpecInfo(topk=spec.topk, num_draft_tokens=n, tree_mask=mask)
    batch = ForwardBatch.build(
        case.mode,
        query_lens=[n] * len(order),
        seq_lens=[
            *(case.seq_lens[r] for r in order_without_padding),
            *[fill] * (len(order) - len(order_without_padding)),
        ],
        page_table=table,
        page_size=point.page_size,
        spec=spec,
    )
    tokens = _tokens(order_without_padding, n).to(device)

    def present(x: Tensor) -> Tensor:
        new = x.new_zeros(len(order) * n, *x.shape[1:])
        new[: len(tokens)] = x[tokens]
        return new

    def pick(x: Tensor | None) -> Tensor | None:
        return None if x is None else present(x)

    return dataclasses.replace(
        inputs,
        batch=batch,
        q=present(inputs.q),
        k=pick(inputs.k),
        v=pick(inputs.v),
        indexer=inputs.indexer and inputs.indexer.of(present),
    )
