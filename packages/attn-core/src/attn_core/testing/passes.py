"""Run one case on a backend, and compare its outputs and its cache with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache
from attn_core.runtime.backend import AttentionBackend, Output
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.layer import AttentionLayer
from attn_core.testing.answers import Answer, expected
from attn_core.testing.cases import Case, RaggedCase
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Inputs, Point, clone_cache, make_layer, to_device
from attn_core.testing.oracle import attend_request, yardstick
from attn_core.testing.pools import changed
from attn_core.testing.strides import restrided
from attn_core.testing.tolerance import Measure, require, within_budget, worst


def create(
    bench: Bench,
    case: Case,
    inputs: Inputs,
    point: Point,
    layers: Sequence[AttentionLayer] = (),
) -> AttentionBackend:
    """Create the backend that a case asks for, for these layers or the case's own."""
    batch = inputs.batch
    return bench.create(
        layers or (inputs.layer,),
        dtype=point.dtype,
        page_size=point.page_size,
        kv_dtype=case.kv_dtype,
        max_bs=batch.batch_size,
        max_num_tokens=batch.num_tokens,
        max_seq_len=max(v.max_seq_len for v in batch.views.values()),
        topk=case.topk,
        num_draft_tokens=case.drafts,
    )


def prepared(bench: Bench, case: Case, point: Point) -> tuple[Inputs, Answer]:
    """Return a case's inputs on the device under test, and what is right."""
    row = bench.row
    rounds = bench.rounds(case.kv_dtype)
    inputs, reference = expected(
        case, point, row.requires_finite_padding, row.fused_kv_write, rounds
    )
    return to_device(inputs, bench.torch_device), reference


def attend(
    backend: AttentionBackend,
    inputs: Inputs,
    *,
    batch: ForwardBatch | None = None,
    metadata: object = None,
    cache: LayerCache | None = None,
    preallocated: bool = False,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run one pass: plan (unless metadata is given), then one layer; check shapes and dtypes.

    cache None: a copy of inputs.cache, and afterwards it must be inputs.after bit by bit.
    preallocated: hand in an output buffer full of NaN. Returns out and the LSE, None without
    return_lse.
    """
    batch = batch or inputs.batch
    layer, q = inputs.layer, inputs.q
    target = clone_cache(inputs.cache) if cache is None else cache
    if metadata is None:
        metadata = backend.init_forward_metadata(batch)
    shape = (batch.num_tokens, layer.num_q_heads, layer.v_head_dim)
    indexer = inputs.indexer
    out = q.new_full(shape, torch.nan) if preallocated else None
    actual = backend.forward(
        q,
        inputs.k,
        inputs.v,
        layer,
        target,
        batch,
        metadata,
        out=out,
        return_lse=return_lse,
        topk_indices=None if indexer is None else indexer.topk_indices,
    )
    if cache is None:
        pages = sorted(set(changed(_parts(inputs.after), _parts(target))))
        require(not pages, f"the cache is not what it must be after the pass in pages {pages}")
    return returned(actual, shape, q.dtype, out=out, return_lse=return_lse)


def returned(
    actual: Output,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    out: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Check the form of what a backend returned, [T, Hq, Dv] and float32 [T, Hq], and take it."""
    require(
        isinstance(actual, tuple) == return_lse,
        f"return_lse={return_lse} gave a {type(actual).__name__}",
    )
    value, lse = actual if isinstance(actual, tuple) else (actual, None)
    require(tuple(value.shape) == shape, f"output {tuple(value.shape)}, expected {shape}")
    require(value.dtype == dtype, f"output is {value.dtype}, the queries are {dtype}")
    require(out is None or value is out, "the buffer given as out was not the one returned")
    if lse is not None:
        require(tuple(lse.shape) == shape[:2], f"LSE {tuple(lse.shape)}, expected {shape[:2]}")
        require(lse.dtype == torch.float32, f"the LSE is {lse.dtype}, expected float32")
    return value, lse


def _parts(cache: LayerCache) -> list[Tensor]:
    return [t for t, _ in cache.parts()]


def compare(
    actual: tuple[Tensor, Tensor | None],
    reference: Answer,
    tokens: int,
    dtype: torch.dtype,
    name: str,
) -> Measure:
    """Compare out and LSE of the first `tokens` tokens with truth and yardstick."""
    truth, baseline = reference
    value, lse = actual
    errors = [within_budget(name, value[:tokens], truth[0], baseline[0], dtype)]
    if lse is not None:
        errors.append(
            within_budget(f"{name}, LSE", lse[:tokens], truth[1], baseline[1], torch.float32)
        )
    return worst(errors)


def run_case(bench: Bench, case: Case, point: Point) -> Measure:
    """Run one case, without the LSE and, where the row has it, with it."""
    inputs, reference = prepared(bench, case, point)
    backend = create(bench, case, inputs, point)
    dtype, tokens = TORCH_DTYPES[point.dtype], inputs.real_tokens
    actual = attend(backend, inputs, preallocated=True)
    errors = [compare(actual, reference, tokens, dtype, "output")]
    if bench.row.lse:
        actual = attend(backend, inputs, return_lse=True)
        errors.append(compare(actual, reference, tokens, dtype, "output with LSE"))
    return worst(errors)


@lru_cache(maxsize=128)
def ragged_inputs(case: RaggedCase, dtype: str) -> tuple[tuple[Tensor, Tensor, Tensor], Answer]:
    """Draw q, k, v of a ragged case and compute its answers, once per process."""
    rng = torch.Generator().manual_seed(1)
    layer = make_layer(case, rng)
    (hq, hkv), (d, dv) = case.heads, case.dims
    draws = ((sum(case.query_lens), hq, d), *((sum(case.key_lens), hkv, x) for x in (d, dv)))
    q, k, v = (torch.randn(shape, generator=rng).to(TORCH_DTYPES[dtype]) for shape in draws)

    def solve(exact: torch.dtype, order: int = 0) -> tuple[Tensor, Tensor]:
        outs, lses, start, base = [], [], 0, 0
        for n, s in zip(case.query_lens, case.key_lens, strict=True):
            out, lse = attend_request(
                q[start : start + n],
                k[base : base + s],
                v[base : base + s],
                dtype=exact,
                causal=case.causal,
                scale=layer.scale,
                window=case.window,
                logit_cap=case.logit_cap,
                sinks=layer.sinks,
                order=order,
            )
            outs.append(out)
            lses.append(lse)
            start, base = start + n, base + s
        return torch.cat(outs), torch.cat(lses)

    truth = solve(torch.float64)
    reference = truth, yardstick(solve, TORCH_DTYPES[dtype], truth)
    q, k, v = restrided(case.strides, (q, k, v))
    return (q, k, v), reference


def indptr(lens: tuple[int, ...], device: torch.device) -> Tensor:
    """Return cumulative lengths int32 [B + 1]."""
    return torch.tensor([0, *lens], device=device).cumsum(0).int()


def run_ragged(bench: Bench, case: RaggedCase, dtype: str) -> Measure:
    """Run one ragged case, with the LSE where the row has it."""
    (q, k, v), reference = ragged_inputs(case, dtype)
    layer = make_layer(case, torch.Generator().manual_seed(1))
    q, k, v, layer = to_device((q, k, v, layer), bench.torch_device)
    backend = bench.create((layer,), dtype=dtype)
    shape, errors = (q.shape[0], q.shape[1], v.shape[2]), []
    for return_lse in (False, True) if bench.row.lse else (False,):
        out = None if return_lse else q.new_full(shape, torch.nan)
        actual = backend.forward_ragged(
            q,
            k,
            v,
            layer,
            indptr(case.query_lens, q.device),
            indptr(case.key_lens, q.device),
            max(case.query_lens),
            max(case.key_lens),
            causal=case.causal,
            out=out,
            return_lse=return_lse,
        )
        form = returned(actual, shape, q.dtype, out=out, return_lse=return_lse)
        errors.append(compare(form, reference, q.shape[0], q.dtype, "ragged output"))
    return worst(errors)
