"""Metamorphic checks: chunked and whole prefill, prefill and decode, permuted pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.ops.merge import merge_states
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.testing.cases import Case, RaggedCase
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Inputs, Point, make_layer, mapped, to_device
from attn_core.testing.passes import (
    attend,
    compare,
    create,
    indptr,
    prepared,
    ragged_inputs,
    returned,
)
from attn_core.testing.pools import raw
from attn_core.testing.tolerance import Measure, require, within_budget, worst

Span = tuple[int, int]  # of a request's tokens


def _partly(
    inputs: Inputs, point: Point, mode: ForwardMode, spans: Sequence[Span]
) -> tuple[Inputs, list[slice]]:
    """Return the pass that brings these spans of new tokens, and where they lie in the whole."""
    starts = [0, *torch.tensor(inputs.batch.query_lens_host).cumsum(0).tolist()]
    rows = [slice(start + a, start + b) for start, (a, b) in zip(starts, spans, strict=False)]
    batch = ForwardBatch.build(
        mode,
        query_lens=[b - a for a, b in spans],
        seq_lens=[b for _, b in spans],
        page_table=inputs.batch.views["full"].page_table,
        page_size=point.page_size,
    )

    def pick(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.cat([x[r] for r in rows])

    q = torch.cat([inputs.q[r] for r in rows])
    indexer = inputs.indexer and inputs.indexer.of(lambda x: torch.cat([x[r] for r in rows]))
    part = dataclasses.replace(
        inputs, batch=batch, q=q, k=pick(inputs.k), v=pick(inputs.v), indexer=indexer
    )
    return part, rows


def _in_parts(
    bench: Bench,
    case: Case,
    point: Point,
    steps: Sequence[tuple[ForwardMode, Sequence[Span]]],
) -> Measure:
    """Run a prefill without prefix in several passes over one cache; compare with the oracle."""
    inputs, reference = prepared(bench, case, point)
    backend = create(bench, case, inputs, point)
    # with the poison of later passes' slots, a row that writes them itself would read it as padding
    cache_before = inputs.after if bench.row.requires_finite_padding else inputs.cache
    cache = mapped(cache_before, torch.Tensor.clone)
    shape = (inputs.q.shape[0], inputs.layer.num_q_heads, inputs.layer.v_head_dim)
    full = inputs.q.new_full(shape, torch.nan)
    for mode, spans in steps:
        part, rows = _partly(inputs, point, mode, spans)
        out, _ = attend(backend, part, cache=cache)
        start = 0
        for r in rows:
            full[r] = out[start : start + r.stop - r.start]
            start += r.stop - r.start
    return within_budget("the passes together", full, reference[0][0], reference[1][0], full.dtype)


def in_chunks(bench: Bench, case: Case, point: Point) -> Measure:
    """A prefill in three chunks is the prefill in one."""
    lens = case.query_lens
    cuts = [[n * part // 3 + (1 if 0 < part < 3 else 0) for n in lens] for part in range(4)]
    steps = [(ForwardMode.EXTEND, list(zip(a, b, strict=True))) for a, b in pairwise(cuts)]
    return _in_parts(bench, case, point, steps)


def then_decode(bench: Bench, case: Case, point: Point) -> Measure:
    """A prefill of n + 2 tokens is a prefill of n and two decodes."""
    lens = case.query_lens
    steps = [(ForwardMode.EXTEND, [(0, n - 2) for n in lens])]
    steps += [(ForwardMode.DECODE, [(n - i, n - i + 1) for n in lens]) for i in (2, 1)]
    return _in_parts(bench, case, point, steps)


def with_pages_moved(inputs: Inputs, point: Point) -> Inputs:
    """Return the same pass over the same tokens in other pages; the dummy stays page 0."""
    pages = inputs.cache.num_pages
    order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(3)) + 1
    permutation = torch.cat([torch.zeros(1, dtype=torch.long), order]).to(inputs.q.device)
    inverse = permutation.argsort()

    def move(t: Tensor) -> Tensor:
        return raw(t)[inverse].view(t.dtype)

    view = inputs.batch.views["full"]
    table = permutation[view.page_table.long()].int()
    slots = view.out_cache_loc
    assert slots is not None  # make_inputs gives slots
    size = point.page_size
    slots = permutation[slots // size] * size + slots % size
    indexer = inputs.indexer
    if indexer is not None:
        old = indexer.topk_indices.long()
        new = torch.where(old < 0, -1, permutation[old.clamp(min=0) // size] * size + old % size)
        indexer = dataclasses.replace(indexer, topk_indices=new.int())
    view = dataclasses.replace(view, page_table=table, out_cache_loc=slots)
    return dataclasses.replace(
        inputs,
        cache=mapped(inputs.cache, move),
        after=mapped(inputs.after, move),
        batch=dataclasses.replace(inputs.batch, views={"full": view}),
        indexer=indexer,
    )


def pages_moved(bench: Bench, case: Case, point: Point) -> Measure:
    """Where the pages lie does not matter, and no plan outlives its pass."""
    inputs, reference = prepared(bench, case, point)
    backend = create(bench, case, inputs, point)
    tokens, dtype = inputs.real_tokens, TORCH_DTYPES[point.dtype]
    passes = (inputs, with_pages_moved(inputs, point), inputs)
    return worst([compare(attend(backend, x), reference, tokens, dtype, "output") for x in passes])


def twice(bench: Bench, case: Case, point: Point) -> Measure:
    """A row that declares `deterministic` gives the same bits again, in a new backend too."""
    inputs, reference = prepared(bench, case, point)
    first = attend(create(bench, case, inputs, point), inputs)[0][: inputs.real_tokens]
    backend = create(bench, case, inputs, point)
    for _ in range(2):
        second = attend(backend, inputs)[0][: inputs.real_tokens]
        require(torch.equal(first, second), "not deterministic: the same pass gave other bits")
    return within_budget("output", first, reference[0][0], reference[1][0], first.dtype)


def prefix_in_chunks(bench: Bench, case: RaggedCase, dtype: str) -> Measure:
    """A long prefix in chunks, merged by log-sum-exp, is the attention over all of it."""
    (q, k, v), reference = ragged_inputs(case, dtype)
    layer = make_layer(case, torch.Generator().manual_seed(1))
    q, k, v, layer = to_device((q, k, v, layer), bench.torch_device)
    backend = bench.create((layer,), dtype=dtype)
    [n], [s] = case.query_lens, case.key_lens
    cuts, outs, lses = (0, s - n - 37, s - n, s), [], []
    for a, b in pairwise(cuts):
        actual = backend.forward_ragged(
            q,
            k[a:b],
            v[a:b],
            layer,
            indptr((n,), q.device),
            indptr((b - a,), q.device),
            n,
            b - a,
            causal=b == s,
            return_lse=True,
        )
        shape = (n, layer.num_q_heads, layer.v_head_dim)
        out, lse = returned(actual, shape, q.dtype, out=None, return_lse=True)
        outs.append(out)
        lses.append(lse if lse is not None else q.new_zeros(shape[:2]))
    merged = merge_states(torch.stack(outs), torch.stack(lses))
    return compare(merged, reference, n, q.dtype, "merged chunks")
