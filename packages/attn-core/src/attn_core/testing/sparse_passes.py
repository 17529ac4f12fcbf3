"""Checks of sparse MLA: which keys an indexer selects, and attention over a right selection."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attn_core.runtime.backend import AttentionBackend
from attn_core.testing.cases import Case
from attn_core.testing.harness import Bench
from attn_core.testing.indexer import Indexer, index_scores, visible
from attn_core.testing.inputs import Inputs, Point, clone_cache
from attn_core.testing.neighbours import tokens_of
from attn_core.testing.passes import create, prepared, run_case
from attn_core.testing.pools import raw
from attn_core.testing.tolerance import Measure, require, worst

_EPS = torch.finfo(torch.float32).eps


def run_sparse(bench: Bench, case: Case, point: Point) -> Measure:
    """Select the keys of each query, then attend to the oracle's selection."""
    inputs, _ = prepared(bench, case, point)
    measures = [run_case(bench, case, point)]
    if inputs.indexer is not None:
        measures.append(run_selection(bench, case, point))
    return worst(measures)


def run_selection(bench: Bench, case: Case, point: Point) -> Measure:
    """Select the keys of each query; the same pass again gives the same selection."""
    inputs, _ = prepared(bench, case, point)
    backend = create(bench, case, inputs, point)
    actual = chosen(backend, inputs)
    require(torch.equal(actual, chosen(backend, inputs)), "the same pass gave another selection")
    return _checked(actual, case, inputs)


def selection_beside_nan(bench: Bench, case: Case, point: Point) -> Measure:
    """A request whose index keys, queries and weights are NaN leaves its neighbours' selection."""
    inputs, _ = prepared(bench, case, point)
    backend = create(bench, case, inputs, point)
    full, indexer = chosen(backend, inputs), inputs.indexer
    assert indexer is not None
    for broken in range(len(case.query_lens)):
        broken_tokens = tokens_of(case, [broken]).to(inputs.q.device)
        num_pages = -(-case.seq_lens[broken] // point.page_size)
        pages = inputs.batch.views["full"].page_table[broken, :num_pages].long()
        cache = clone_cache(inputs.cache)
        for keys in (x for x in cache.index_keys if x is not None):
            nan_value = keys.new_full((1,), torch.nan, dtype=torch.float32).to(keys.dtype)
            raw(keys).index_fill_(0, pages, raw(nan_value).item())
        nan = dataclasses.replace(
            indexer,
            q_index=indexer.q_index.index_fill(0, broken_tokens, torch.nan),
            weights=indexer.weights.index_fill(0, broken_tokens, torch.nan),
        )
        actual = chosen(backend, dataclasses.replace(inputs, indexer=nan, cache=cache))
        other_tokens = tokens_of(case, [r for r in range(len(case.query_lens)) if r != broken])
        other_tokens = other_tokens.to(actual.device)
        same = torch.equal(actual[other_tokens], full[other_tokens])
        require(same, f"NaN in request {broken} changed the selection of another request")
    return _checked(full, case, inputs)


def chosen(backend: AttentionBackend, inputs: Inputs) -> Tensor:
    """Return what a backend selects in this pass, int32 [T, K]; its form is checked."""
    indexer, layer, batch = inputs.indexer, inputs.layer, inputs.batch
    assert indexer is not None
    actual = backend.index_topk(
        indexer.q_index,
        indexer.weights,
        layer,
        inputs.cache,
        batch,
        backend.init_forward_metadata(batch),
    )
    shape = (batch.num_tokens, layer.index_topk)
    require(tuple(actual.shape) == shape, f"topk_indices {tuple(actual.shape)}, expected {shape}")
    require(actual.dtype == torch.int32, f"topk_indices are {actual.dtype}, expected int32")
    return actual


def _checked(actual: Tensor, case: Case, inputs: Inputs) -> Measure:
    assert inputs.indexer is not None
    table = inputs.batch.views["full"].page_table.cpu()
    return check_selection(actual, case, inputs.indexer, table, inputs.cache.page_size)


def check_selection(
    actual: Tensor, case: Case, indexer: Indexer, table: Tensor, page_size: int
) -> Measure:
    """Compare a selection with the float64 scores of the keys that each query sees.

    table: the requests' pages, on the host, of page_size tokens.

    Slots are unique, of the query's own request and visible, in the order of their positions, and
    as many as there must be. Where scores are exact, the selection is the oracle's; elsewhere no
    score may lie below the oracle's smallest by more than float32 sums err.
    """
    slots, topk, table = actual.cpu().long(), case.index_topk, table.long()
    q_index, weights = indexer.q_index.cpu(), indexer.weights.cpu()
    measures = []
    for request, token, num_visible in visible(case):
        position = torch.arange(case.seq_lens[request])
        owned = table[request, position // page_size] * page_size + position % page_size
        place = {slot: p for p, slot in enumerate(owned.tolist())}
        name = f"query {token} of request {request}, which sees {num_visible} keys"
        row, count = slots[token], min(topk, num_visible)
        require(bool((row[count:] == -1).all()), f"{name}: more than {count} slots")
        chosen = [place.get(slot, -1) for slot in row[:count].tolist()]
        foreign = sum(p < 0 for p in chosen)
        require(foreign == 0, f"{name}: {foreign} slots that are not its request's")
        require(max(chosen) < num_visible, f"{name}: selects position {max(chosen)}")
        require(len(set(chosen)) == count, f"{name}: slots twice")
        require(chosen == sorted(chosen), f"{name}: slots not in the order of their positions")
        if case.exact_index:
            reference = indexer.selected[token].tolist()
            unexpected = sorted(set(chosen) - set(reference))
            require(
                not unexpected,
                f"{name}: selects positions {unexpected}, which score less or come later",
            )
        elif num_visible > topk:
            measures.append(
                _margin(chosen, token, indexer, request, num_visible, q_index, weights, name)
            )
    return worst(measures)


def _margin(
    chosen: list[int],
    token: int,
    indexer: Indexer,
    request: int,
    num_visible: int,
    q_index: Tensor,
    weights: Tensor,
    name: str,
) -> Measure:
    keys, q, w = indexer.keys[request][:num_visible].cpu(), q_index[token], weights[token]
    scores = index_scores(q, w, keys)
    baseline = index_scores(q, w, keys.float()).double()
    size = index_scores(q, w.abs(), keys).max().item()
    budget = 2 * (baseline - scores).abs().max().item() + 8 * _EPS * size
    lowest_selected = scores[indexer.selected[token].cpu()].min().item()
    measure = Measure(max(0.0, lowest_selected - scores[chosen].min().item()), budget)
    require(
        measure.ratio <= 1,
        f"{name}: selects a score {measure.error:.3e} below the border, allowed {budget:.3e}",
    )
    return measure
