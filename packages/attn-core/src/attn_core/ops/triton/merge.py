"""Merge partial attention states by their log-sum-exp, in one launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernel: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_core.ops.triton.launcher import Grid, Launcher, alike, alike_number, numbered

_TILE = 2048  # numbers that a program merges at a time


@triton.jit
def _merge(
    out, lse, merged, total, parts, rows, heads,
    out_part, out_token, out_head, out_dim,
    lse_part, lse_token, lse_head,
    merged_token, merged_head, merged_dim,
    total_token, total_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """UNIT: by which lse is multiplied to be a natural logarithm."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    token = row // heads
    head = row % heads
    d = tl.arange(0, BLOCK_D)
    tile = row_mask[:, None] & (d < D)[None, :]

    lse += token * lse_token + head * lse_head
    lse_ptrs = lse
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    # parts of +inf; where there are any, only they count
    num_infinite = tl.zeros((ROWS,), tl.float32)
    for _ in range(parts):
        x = tl.load(lse_ptrs, mask=row_mask, other=0.0).to(tl.float32) * UNIT
        higher = tl.maximum(peak, x)
        base = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)
        weight = weight * tl.exp(peak - base) + tl.exp(x - base)
        num_infinite += (x == float("inf")).to(tl.float32)
        peak = higher
        lse_ptrs += lse_part
    sum_of_all = tl.log(weight) + peak
    tl.store(total + token * total_token + head * total_head, sum_of_all, mask=row_mask)

    out += (token * out_token + head * out_head)[:, None] + d[None, :] * out_dim
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    # not of sum_of_all: a large one is rounded by more than a share is
    base = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    for _ in range(parts):
        x = tl.load(lse, mask=row_mask, other=0.0).to(tl.float32) * UNIT
        share = tl.exp(x - base) / weight
        share = tl.where(sum_of_all == float("inf"), 1.0 / num_infinite, share)
        # what does not count may hold anything, and 0 · NaN is NaN
        counts = (x != -float("inf")) & ((sum_of_all != float("inf")) | (x == float("inf")))
        read = tile & counts[:, None]
        values = tl.load(out, mask=read, other=0.0)
        share = tl.where(counts, share, 0.0)
        acc += values.to(tl.float32) * share[:, None]
        lse += lse_part
        out += out_part
    merged += (token * merged_token + head * merged_head)[:, None] + d[None, :] * merged_dim
    tl.store(merged, acc.to(merged.dtype.element_ty), mask=tile)


class Merge(NamedTuple):
    """The launch that merges n partial states of T tokens and H heads: its numbers too."""

    launcher: Launcher
    grid: Grid
    numbers: tuple[int, ...]

    @classmethod
    def of(
        cls,
        like: tuple[Hashable, ...],
        shape: tuple[int, int, int, int],
        strides: tuple[int, ...],
        launchers: dict[Any, Any],
        *,
        base_2: bool = False,
    ) -> Merge:
        """Return the launch for tensors that are alike.

        like: what is `alike` of out, lse, merged and total. shape: (n, T, H, Dv), without a zero.
        strides: of out (part, token, head, dim), lse (part, token, head), merged (token, head, dim)
        and total (token, head). launchers: what one device keeps. base_2: of the partial lse; else
        it is natural.
        """
        programs, numbers, same = _numbers(shape, strides)
        dim = shape[-1]
        key = ("merge", like, same, dim, base_2)
        launcher = launchers.get(key)
        if launcher is None:
            block = triton.next_power_of_2(dim)
            unit = math.log(2.0) if base_2 else 1.0
            launcher = launchers[key] = Launcher(_merge, dim, block, _rows(block), unit)
        return cls(launcher, (programs, 1, 1), numbers)

    def run(
        self, addresses: tuple[int, int, int, int], tensors: Callable[[], tuple[Tensor, ...]]
    ) -> None:
        """Launch it. addresses: of out, lse, merged and total; tensors: returns these."""
        numbers = self.numbers
        self.launcher.launch(self.grid, (*addresses, *numbers), tensors, numbers)


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
    if not tokens * heads:
        return into
    tensors = (out, lse, *into)
    at_out, at_lse, at_merged, at_total = addresses = tuple(x.data_ptr() for x in tensors)
    like = tuple(map(alike, tensors, addresses))
    strides = tuple(n for x in tensors for n in x.stride())
    launchers = _LAUNCHERS.setdefault(out.get_device(), {})
    merge = Merge.of(like, (parts, tokens, heads, dim), strides, launchers)
    merge.run((at_out, at_lse, at_merged, at_total), lambda: tensors)
    return into


@functools.lru_cache(1024)  # of a batch size there is one
def _numbers(
    shape: tuple[int, int, int, int], strides: tuple[int, ...]
) -> tuple[int, tuple[int, ...], int]:
    """Return how many programs merge, their numbers, and what a launch is compiled for of them."""
    parts, tokens, heads, dim = shape
    numbers = (parts, tokens * heads, heads, *strides)
    programs = -(-tokens * heads // _rows(triton.next_power_of_2(dim)))
    return programs, numbers, numbered(tuple(map(alike_number, numbers)))


def _rows(block: int) -> int:
    """Return how many rows a program merges at a time. block: columns of one, padded."""
    return max(1, _TILE // block)


_LAUNCHERS: dict[int, dict[Any, Any]] = {}  # by device
