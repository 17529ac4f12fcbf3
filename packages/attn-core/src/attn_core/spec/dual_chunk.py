"""Dual chunk attention, with which Qwen2.5-1M sees further than it was trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral

from attn_core.errors import UsageError


@dataclass(frozen=True)
class DualChunk:
    """The dual chunk attention of a layer: which distance a query and a key are rotated to.

    Tokens lie in chunks of `chunk_len` = chunk_size - local_size. A key is rotated to its place in
    its chunk. A query has three rotations: for the keys of its own chunk (intra), of the chunk
    before it (succ) and of all earlier chunks (inter). rotary_positions has their positions.

    chunk_size, local_size: tokens. Distances up to local_size stay true across a chunk's border.
    original_max_position_embeddings: the trained length in tokens; 0 turns query_scale off.
    sparse_threshold: prompts of more tokens attend to vertical lines and slashes alone, in prefill;
    None: no prompt does. sparse_last_queries: the last queries of a chunk, which choose the lines.
    Raises UsageError for sizes that leave no chunk, and for a threshold or queries out of range.
    """

    chunk_size: int
    local_size: int
    original_max_position_embeddings: int = 0
    sparse_threshold: int | None = None
    sparse_last_queries: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not isinstance(value, Integral):
                raise UsageError(
                    f"dual chunk attention with {name} {value!r} (expected an integer)"
                )
        if not 0 <= self.local_size < self.chunk_size:
            raise UsageError(
                f"dual chunk attention with chunk_size {self.chunk_size}, local_size "
                f"{self.local_size} (expected 0 <= local_size < chunk_size)"
            )
        if self.original_max_position_embeddings < 0:
            raise UsageError(
                "dual chunk attention with original_max_position_embeddings "
                f"{self.original_max_position_embeddings} (expected 0 or more)"
            )
        threshold, last = self.sparse_threshold, self.sparse_last_queries
        if (threshold is not None and threshold < 0) or last < 1:
            raise UsageError(
                f"dual chunk attention with sparse_threshold {threshold}, sparse_last_queries "
                f"{last} (expected a threshold of 0 or more, or None, and 1 query or more)"
            )

    @property
    def chunk_len(self) -> int:
        """Tokens of a chunk."""
        return self.chunk_size - self.local_size

    @property
    def rotations(self) -> int:
        """Queries of a token: intra, succ and inter, and with a threshold two that choose lines."""
        return 3 if self.sparse_threshold is None else 5

    def query_scale(self, length: int) -> float:
        """Return what the queries of a request are multiplied by.

        length: tokens of its whole prompt, in every part of a prefill; in decode, of the request.
        The model's attention factor f applies to queries and keys. Both are put on the queries, f²,
        so that cached keys do not depend on a length and prompts can share them.
        """
        if not self.original_max_position_embeddings:
            return 1.0
        ratio = length / self.original_max_position_embeddings
        return max(1.0, 0.1 * math.log(max(ratio, 1.0)) + 1.0) ** 2

    def __str__(self) -> str:
        chunks = f"of chunks of {self.chunk_len} tokens"
        if self.sparse_threshold is None:
            return chunks
        return f"{chunks}, sparse in prompts of more than {self.sparse_threshold} tokens"
