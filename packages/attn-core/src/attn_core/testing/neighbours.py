"""Isolation checks: other requests, padding, layers and batches must not affect a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.runtime.batch import ForwardBatch, SpecInfo
from attn_core.testing.answers import Answer
from attn_core.testing.cases import Case, RaggedCase
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Inputs, Point, clone_cache, make_layer, to_device
from attn_core.testing.passes import (
    attend,
    compare,
    create,
    indptr,
    prepared,
    ragged_inputs,
    returned,
)
from attn_core.testing.pools import poison, poison_latents, raw
from attn_core.testing.tolerance import Measure, require, worst


def tokens_of(case: Case | RaggedCase, requests: Sequence[int]) -> Tensor:
    """List the query tokens of these requests, in the order of the whole batch's tokens."""
    ends = torch.tensor([0, *case.query_lens]).cumsum(0).tolist()
    picked = [torch.arange(ends[r], ends[r + 1]) for r in requests]
    return torch.cat(picked) if picked else torch.zeros(0, dtype=torch.int64)


def picked(
    inputs: Inputs, case: Case, point: Point, requests: Sequence[int], padding: int = 0
) -> Inputs:
    """Return the pass of some of the requests, in this order, with padded rows behind them."""
    device, extra = inputs.q.device, case.drafts or 1
    table = inputs.batch.views["full"].page_table[list(requests)]
    table = torch.cat([table, table.new_zeros(padding, table.shape[1])])
    spec = inputs.batch.spec
    if spec is not None and spec.tree_mask is not None:
        masks = spec.tree_mask[[*requests, *[0] * padding]]
        spec = SpecInfo(topk=spec.topk, num_draft_tokens=spec.num_draft_tokens, tree_mask=masks)
    batch = ForwardBatch.build(
        case.mode,
        query_lens=[*(case.query_lens[r] for r in requests), *[extra] * padding],
        seq_lens=[*(case.seq_lens[r] for r in requests), *[extra] * padding],
        page_table=table,
        page_size=point.page_size,
        spec=spec,
    )
    tokens = tokens_of(case, requests).to(device)

    def present(x: Tensor) -> Tensor:
        return torch.cat([x[tokens], x.new_zeros(padding * extra, *x.shape[1:])])

    def pick(x: Tensor | None) -> Tensor | None:
        return None if x is None else present(x)

    return dataclasses.replace(
        inputs,
        batch=batch,
        q=present(inputs.q),
        k=pick(inputs.k),
        v=pick(inputs.v),
        real_tokens=len(tokens),
        indexer=inputs.indexer and inputs.indexer.of(present),
    )


def _right_of(reference: Answer, tokens: Tensor) -> Answer:
    truth, baseline = ((out[tokens], lse[tokens]) for out, lse in reference)
    return truth, baseline


def same_bits(bench: Bench, case: Case, point: Point) -> Measure:
    """In deterministic mode a request has the same bits alone, in any company and beside padding.

    An LSE is compared too where the row returns one: it shows what the rounding of out hides.
    """
    inputs, reference = prepared(bench, case, point)
    backend = create(bench, case, inputs, point)
    all_requests = list(range(len(case.query_lens)))
    lse = bench.row.lse
    full = attend(backend, inputs, return_lse=lse)
    errors = [compare(full, reference, inputs.real_tokens, TORCH_DTYPES[point.dtype], "output")]
    cache = clone_cache(inputs.after)  # with every token, whoever writes it again
    for requests, padding in (
        (all_requests[::-1], 0),
        (all_requests, 2),
        *(([r], 0) for r in all_requests),
    ):
        part = picked(inputs, case, point, requests, padding)
        actual = attend(backend, part, cache=cache, return_lse=lse)
        tokens = tokens_of(case, requests)
        for name, a, b in zip(("output", "LSE"), full, actual, strict=True):
            same = a is None or b is None or torch.equal(a[tokens.to(a.device)], b[: len(tokens)])
            require(
                same, f"not deterministic: other neighbours ({requests}) gave other bits of {name}"
            )
    return worst(errors)


def beside_nan(bench: Bench, case: Case, point: Point) -> Measure:
    """A request whose queries, keys and values are NaN leaves its neighbours right.

    Where the row asks for finite tails its keys and values are large instead.
    """
    inputs, reference = prepared(bench, case, point)
    backend = create(bench, case, inputs, point)
    all_requests, errors = list(range(len(case.query_lens))), []
    for broken in all_requests:
        broken_tokens = tokens_of(case, [broken]).to(inputs.q.device)
        k, v = (
            None if x is None else x.index_fill(0, broken_tokens, torch.nan)
            for x in (inputs.k, inputs.v)
        )
        q = inputs.q.index_fill(0, broken_tokens, torch.nan)
        num_pages = -(-case.seq_lens[broken] // point.page_size)
        pages = inputs.batch.views["full"].page_table[broken, :num_pages].long()
        cache = poisoned(inputs.cache, pages, point, large=bench.row.requires_finite_padding)
        out, _ = attend(backend, dataclasses.replace(inputs, q=q, k=k, v=v), cache=cache)
        other_tokens = tokens_of(case, [r for r in all_requests if r != broken])
        other_reference = _right_of(reference, other_tokens)
        actual = out[other_tokens.to(out.device)], None
        name = f"output beside NaN in request {broken}"
        errors.append(
            compare(actual, other_reference, len(other_tokens), TORCH_DTYPES[point.dtype], name)
        )
    return worst(errors)


def poisoned(cache: LayerCache, pages: Tensor, point: Point, *, large: bool) -> LayerCache:
    """Return a copy of a cache whose `pages` hold NaN, or large finite numbers."""
    poisoned_cache = clone_cache(cache)
    for pool, _ in poisoned_cache.parts():
        if pool is poisoned_cache.k and poisoned_cache.latent_dim:
            dims = (
                poisoned_cache.latent_dim + poisoned_cache.latents[2].shape[-1],
                poisoned_cache.latent_dim,
            )
            pool[pages] = poison_latents(dims, large=large).to(pool.device)
        else:
            raw(pool).index_fill_(0, pages, raw(poison(point.dtype, (1,), large=large)).item())
    return poisoned_cache


def ragged_beside_nan(bench: Bench, case: RaggedCase, dtype: str) -> Measure:
    """Without a cache too, a request that is NaN leaves its neighbours right.

    Where the row asks for finite tails its keys and values are large instead.
    """
    (q, k, v), reference = ragged_inputs(case, dtype)
    layer = make_layer(case, torch.Generator().manual_seed(1))
    q, k, v, layer = to_device((q, k, v, layer), bench.torch_device)
    backend = bench.create((layer,), dtype=dtype)
    keys = dataclasses.replace(case, query_lens=case.key_lens)  # the same requests, by their keys
    all_requests, errors = list(range(len(case.query_lens))), []
    shape = (q.shape[0], q.shape[1], v.shape[2])
    for broken in all_requests:
        queries, broken_keys = (tokens_of(c, [broken]).to(q.device) for c in (case, keys))
        large = 1e4 if bench.row.requires_finite_padding else torch.nan
        actual = backend.forward_ragged(
            q.index_fill(0, queries, torch.nan),
            k.index_fill(0, broken_keys, large),
            v.index_fill(0, broken_keys, large),
            layer,
            indptr(case.query_lens, q.device),
            indptr(case.key_lens, q.device),
            max(case.query_lens),
            max(case.key_lens),
            causal=case.causal,
        )
        out, _ = returned(actual, shape, q.dtype, out=None, return_lse=False)
        other_tokens = tokens_of(case, [r for r in all_requests if r != broken])
        other_reference = _right_of(reference, other_tokens)
        name = f"ragged output beside NaN in request {broken}"
        errors.append(
            compare(
                (out[other_tokens.to(q.device)], None),
                other_reference,
                len(other_tokens),
                q.dtype,
                name,
            )
        )
    return worst(errors)


# Softmax scale and, in FP8 and FP4, the scales of K and V, as multiples of the case's own.
_SCALES = ((1.0, 1.0, 1.0), (0.7, 2.5, 0.4), (1.3, 0.6, 3.0))


def layers_of_one_plan(bench: Bench, case: Case, point: Point) -> Measure:
    """Layers that differ in their scales alone are right over one plan, again and in any order."""
    quantised = case.kv_dtype.startswith(("fp8", "fp4"))
    layers = []
    for index, (by, k_by, v_by) in enumerate(_SCALES):
        scaled_case = dataclasses.replace(case, scale_by=by)
        if quantised:
            v_scale = case.v_scale * (v_by if case.kind == "mha" else 1.0)
            if case.kind != "dsa":  # whose latents carry their scales
                scaled_case = dataclasses.replace(
                    scaled_case, k_scale=case.k_scale * k_by, v_scale=v_scale
                )
        inputs, reference = prepared(bench, scaled_case, point)
        layer = dataclasses.replace(inputs.layer, layer_id=index)
        layers.append((dataclasses.replace(inputs, layer=layer), reference))
    first = layers[0][0]
    backend = create(bench, case, first, point, layers=[inputs.layer for inputs, _ in layers])
    metadata, errors = backend.init_forward_metadata(first.batch), []
    for index in (0, 1, 2, 1, 0):
        inputs, reference = layers[index]
        inputs = dataclasses.replace(inputs, batch=first.batch)
        actual = attend(backend, inputs, metadata=metadata)
        name = f"output of layer {index}"
        errors.append(
            compare(actual, reference, inputs.real_tokens, TORCH_DTYPES[point.dtype], name)
        )
    return worst(errors)


def scales_on_the_device(bench: Bench, case: Case, point: Point) -> Measure:
    """Scales in tensors are read in each pass, so what is written into them counts from then on."""
    inputs, reference = prepared(bench, case, point)
    backend, cache = create(bench, case, inputs, point), clone_cache(inputs.cache)
    scales = [x for x in (cache.k_scale, cache.v_scale) if isinstance(x, Tensor)]
    metadata, dtype = backend.init_forward_metadata(inputs.batch), TORCH_DTYPES[point.dtype]
    for factor in (2.0, 0.5):
        for scale in scales:
            scale.mul_(factor)
        actual = attend(backend, inputs, cache=cache, metadata=metadata)
    return compare(actual, reference, inputs.real_tokens, dtype, "output with scales in tensors")
