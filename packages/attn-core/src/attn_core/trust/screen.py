"""Find the requests in which two answers differ by more than rounding, on their device."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_core.runtime.batch import ForwardBatch
from attn_core.trust.judge import Answer

# The suite allows each backend two roundings beside twice the error of a plain run. Two answers
# that differ by less than both roundings together need no oracle.
ROUNDINGS = 4


def suspects(a: Answer, b: Answer, batch: ForwardBatch) -> list[int]:
    """List the requests whose answers differ, by the largest entry or the root mean square."""
    pairs = [(a.out, b.out, torch.finfo(b.out.dtype).eps)]
    if a.lse is not None and b.lse is not None:
        pairs.append((a.lse, b.lse, torch.finfo(torch.float32).eps))
    lens = batch.query_lens_host
    ends = [0, *batch.cu_seqlens_q[1:].tolist()] if lens is None else None
    result: set[int] = set()
    for x, y, eps in pairs:
        rows = _rows(x, y).cpu()  # one wait for the device per call
        start = 0
        for i in range(batch.batch_size):
            n = ends[i + 1] - ends[i] if ends is not None else (lens or ())[i]
            error, size, errors, sizes = rows[:, start : start + n]
            start += n
            if n == 0:
                continue
            allowed = ROUNDINGS * eps * size.max(), ROUNDINGS * eps * sizes.mean().sqrt()
            if not (error.max() <= allowed[0] and errors.mean().sqrt() <= allowed[1]):
                result.add(i)
    return sorted(result)


def _rows(x: Tensor, y: Tensor) -> Tensor:
    """Return per query, float32 [4, T]: largest error and size, mean square error and size.

    Two equal numbers do not differ, nor do two NaN: what both make of a NaN is no difference.
    """
    x, y = x.float().flatten(1), y.float().flatten(1)
    error = (x - y).abs().masked_fill_((x == y) | (x.isnan() & y.isnan()), 0)
    error.nan_to_num_(nan=torch.inf)
    size = torch.where(y.isfinite(), y, 0).abs()
    return torch.stack([error.amax(1), size.amax(1), error.square().mean(1), size.square().mean(1)])
