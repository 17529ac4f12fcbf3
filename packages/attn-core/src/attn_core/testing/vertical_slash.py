"""What queries of a sparse prompt attend to, pair by pair in float64: the definition, and slow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_core.spec.dual_chunk import DualChunk

_BLOCK, _FIRST, _NEAREST = 64, 30, 100


def selected_keys(
    q: Tensor, k: Tensor, sizes: tuple[int, int], scale: float, chunks: DualChunk
) -> tuple[Tensor, ...]:
    """Return the keys of each query of one head of a whole prompt, int64, ascending.

    q [n, 5, D] and k [n, D] in float64; sizes: how many verticals and slashes the head has.
    """
    visible: list[Tensor] = []
    length = chunks.chunk_len
    for start in range(0, len(k), length):
        end = min(start + length, len(k))
        verticals, slashes = _lines(q, k, start, end, sizes, scale, chunks)
        for first in range(start, end, _BLOCK):
            keys = _block(first, start, end, verticals, slashes, length)
            rows = range(first, min(first + _BLOCK, end))
            visible += [torch.tensor([j for j in keys if j <= i], dtype=torch.int64) for i in rows]
    return tuple(visible)


def _lines(
    q: Tensor,
    k: Tensor,
    start: int,
    end: int,
    sizes: tuple[int, int],
    scale: float,
    chunks: DualChunk,
) -> tuple[list[int], list[int]]:
    vertical, slash = [0.0] * end, [0.0] * end
    for i in range(max(start, end - chunks.sparse_last_queries), end):
        chunk_distance = (
            start // chunks.chunk_len - torch.arange(i + 1) // chunks.chunk_len
        ).clamp(max=2)
        chooser = q[i][
            torch.tensor([0, 3, 4])[chunk_distance]
        ]  # [i + 1, D], the query that meets a key
        weights = ((chooser * k[: i + 1]).sum(-1) * scale).softmax(0).tolist()
        for j, weight in enumerate(weights):
            vertical[j] += weight
            slash[i - j] += weight
    infinity = float("inf")
    vertical = [infinity if j < _FIRST else x for j, x in enumerate(vertical)]
    slash = [infinity if d < _NEAREST else x for d, x in enumerate(slash)]
    return _best(vertical, sizes[0]), _best(slash, sizes[1])


def _best(scores: Sequence[float], size: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda x: -scores[x])[:size]


def _block(
    first: int, block_start: int, end: int, verticals: list[int], slashes: list[int], length: int
) -> list[int]:
    """Return the keys that a block of queries shares, before causal order."""
    keys: set[int] = set()
    for lo, hi in (
        (block_start, end),
        (block_start - length, block_start),
        (0, block_start - length),
    ):
        low, covered = max(lo, 0), max(lo, 0)
        for distance in sorted(slashes, reverse=True):
            window = first + _BLOCK - distance  # where it ends
            start = max(window - _BLOCK, covered)
            if window > covered and start < hi:
                keys |= {j for j in range(start, start + _BLOCK) if j < hi}
                covered = start + _BLOCK
        keys |= {j for j in verticals if low <= j < hi}
    return sorted(keys)
