"""Merge partial attention states by their log-sum-exp, in one launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # numbers that a program merges at a time


@triton.jit
def _merge(
    out, lse, merged, total, parts, rows, heads,
    out_part, out_token, out_head, out_dim,
    lse_part, lse_token, lse_head,
    merged_token, merged_head, merged_dim,
    total_token, total_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    token = row // heads
    head = row % heads
    d = tl.arange(0, BLOCK_D)
    tile = here[:, None] & (d < D)[None, :]

    lse += token * lse_token + head * lse_head
    at = lse
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    for _ in range(parts):
        x = tl.load(at, mask=here, other=0.0).to(tl.float32)
        higher = tl.maximum(peak, x)
        base = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)
        weight = weight * tl.exp(peak - base) + tl.exp(x - base)
        peak = higher
        at += lse_part
    sum_of_all = tl.log(weight) + peak
    tl.store(total + token * total_token + head * total_head, sum_of_all, mask=here)

    out += (token * out_token + head * out_head)[:, None] + d[None, :] * out_dim
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for _ in range(parts):
        x = tl.load(lse, mask=here, other=0.0).to(tl.float32)
        full = x != -float("inf")  # an empty part may hold anything, and 0 · NaN is NaN
        read = tile & full[:, None]
        values = tl.load(out, mask=read, other=0.0)
        share = tl.where(full, tl.exp(x - sum_of_all), 0.0)
        acc += values.to(tl.float32) * share[:, None]
        lse += lse_part
        out += out_part
    merged += (token * merged_token + head * merged_head)[:, None] + d[None, :] * merged_dim
    tl.store(merged, acc.to(merged.dtype.element_ty), mask=tile)


def merge_states(
    out: Tensor, lse: Tensor, *, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Merge n partial attentions over disjoint keys into the attention over all of them.

    out [n, T, H, Dv], lse [n, T, H], any strides: natural log. Returns out [T, H, Dv] and lse
    float32 [T, H], written to `into` where it is given: then nothing is allocated. Empty parts and
    the formula are those of attn_core.ops.merge.merge_states. Never syncs.
    """
    parts, tokens, heads, dim = out.shape
    if into is None:
        into = out.new_empty(out.shape[1:]), lse.new_empty(lse.shape[1:], dtype=torch.float32)
    merged, total = into
    block = triton.next_power_of_2(dim)
    rows = max(1, _TILE // block)
    _merge[(triton.cdiv(tokens * heads, rows),)](
        out, lse, merged, total, parts, tokens * heads, heads,
        *out.stride(), *lse.stride(), *merged.stride(), *total.stride(),
        D=dim, BLOCK_D=block, ROWS=rows,
    )  # fmt: skip
    return into
