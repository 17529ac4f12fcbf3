"""What is right for the inputs of a case: the oracle's answers, computed once per process."""

from __future__ import annotations

import ctypes
import hashlib
from functools import lru_cache, partial

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.runtime.sparse_prompts import PROMPT_MODES
from attn_core.testing.cases import Case
from attn_core.testing.inputs import Inputs, Point, make_inputs
from attn_core.testing.oracle import attend_request, yardstick
from attn_core.testing.vertical_slash import selected_keys

Answer = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]  # (out, lse): truth, yardstick
MOST_ANSWERS = 1024
_RIGHT: dict[bytes, Answer] = {}  # the same numbers lie on pages of every size and order


def answer(
    case: Case,
    inputs: Inputs,
    dtype: torch.dtype,
    order: int = 0,
    *,
    rounds: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the oracle's out [T, Hq, Dv] and LSE [T, Hq] of the real tokens, in `dtype`."""
    layer, start = inputs.layer, 0
    parts = []
    for b, n in enumerate(case.query_lens):
        if is_sparse(case, b):
            parts.append(_sparse(inputs, start, b, dtype, order, rounds))
            start += n
            continue
        part = attend_request(
            inputs.q[start : start + n, :3] if layer.dual_chunk else inputs.q[start : start + n],
            inputs.keys[b],
            inputs.values[b],
            dtype=dtype,
            causal=layer.is_causal and not layer.is_cross,
            scale=layer.scale,
            window=layer.sliding_window,
            parents=case.trees[b] if case.trees else None,
            logit_cap=layer.logit_cap,
            sinks=layer.sinks,
            dual_chunk=layer.dual_chunk,
            selected=None if inputs.indexer is None else inputs.indexer.selected[start : start + n],
            order=order,
            rounds=rounds,
        )
        parts.append(part)
        start += n
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def is_sparse(case: Case, request: int) -> bool:
    """Say whether a request is a sparse prompt of dual chunk attention."""
    threshold = None if case.dual_chunk is None else case.dual_chunk.sparse_threshold
    n, s = case.query_lens[request], case.seq_lens[request]
    return threshold is not None and n == s > threshold and case.mode in PROMPT_MODES


def _sparse(
    inputs: Inputs,
    start: int,
    request: int,
    dtype: torch.dtype,
    order: int,
    rounds: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Attend with each head of a sparse prompt alone: each has keys of its own."""
    layer, keys, values = inputs.layer, inputs.keys[request], inputs.values[request]
    assert layer.dual_chunk is not None  # of a sparse case
    assert layer.vertical_slash is not None
    q = inputs.q[start : start + len(keys)]
    group, parts = layer.num_q_heads // layer.num_kv_heads, []
    for head, sizes in enumerate(layer.vertical_slash):
        head_slice = slice(head // group, head // group + 1)
        chosen = q[:, :, head].double(), keys[:, head_slice.start].double(), sizes
        part = attend_request(
            q[:, :3, head : head + 1],
            keys[:, head_slice],
            values[:, head_slice],
            dtype=dtype,
            causal=True,
            scale=layer.scale,
            dual_chunk=layer.dual_chunk,
            selected=selected_keys(*chosen, layer.scale, layer.dual_chunk),
            order=order,
            rounds=rounds,
        )
        parts.append(part)
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 1)


@lru_cache(maxsize=1024)
def expected(
    case: Case,
    point: Point,
    requires_finite_padding: bool,
    fused: bool,
    rounds: torch.dtype | None = None,
) -> tuple[Inputs, Answer]:
    """Return the inputs of a case and its answers, drawn and computed once per process."""
    inputs = make_inputs(case, point, requires_finite_padding=requires_finite_padding, fused=fused)
    question = _question(case, inputs, point.dtype, rounds)
    reference = _RIGHT.get(question)
    if reference is None:
        truth = answer(case, inputs, torch.float64)
        baseline = yardstick(
            partial(answer, case, inputs, rounds=rounds), TORCH_DTYPES[point.dtype], truth
        )
        reference = truth, baseline
        if len(_RIGHT) >= MOST_ANSWERS:
            _RIGHT.clear()
        _RIGHT[question] = reference
    return inputs, reference


def _question(case: Case, inputs: Inputs, *extra: object) -> bytes:
    """Return a digest of all that the answers of a case depend on."""
    layer, q = inputs.layer, inputs.q[: inputs.real_tokens]
    plain = (
        (layer.is_causal, layer.is_cross, layer.scale, layer.sliding_window, layer.logit_cap),
        (layer.dual_chunk, layer.vertical_slash, case.mode in PROMPT_MODES, case.seq_lens),
        (case.query_lens, case.trees, case.index_topk, extra),
        [(x.dtype, x.shape) for x in (q, *inputs.keys, *inputs.values)],
    )
    digest = hashlib.blake2b(repr(plain).encode())
    selected = () if inputs.indexer is None else inputs.indexer.selected
    for x in (q, *inputs.keys, *inputs.values, layer.sinks, *selected):
        if x is not None:
            digest.update(_bytes(x))
    return digest.digest()


def _bytes(x: Tensor) -> bytes:
    dense = x.cpu().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.nbytes)
