"""Dual chunk attention by plain attention: positions to rotate to, and a pass cut at chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_core.spec.dual_chunk import DualChunk


def rotary_positions(dual_chunk: DualChunk, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions that keys [T] and the queries [3 or 5, T] are rotated to.

    positions: int [T], of the tokens in their requests. The queries are intra, succ and inter, and
    with a sparse_threshold the succ and inter queries that choose lines: no distance is clamped.
    """
    size, length = dual_chunk.chunk_size, dual_chunk.chunk_len
    chunk_positions = positions % length
    succ = (chunk_positions + length).clamp(max=size)
    inter = torch.full_like(chunk_positions, min(2 * length - 1, size))
    queries = [chunk_positions, succ, inter]
    if dual_chunk.sparse_threshold is not None:
        queries += [chunk_positions + length, chunk_positions + size]
    return chunk_positions, torch.stack(queries)


class ChunkKeys(NamedTuple):
    """The keys that the pieces of a pass meet with one of their three queries.

    seq_lens: int32 [P], 0 = none. page_table: int32 [P, pages].
    """

    seq_lens: Tensor
    page_table: Tensor


class ChunkPass(NamedTuple):
    """A pass cut at the borders of chunks into P pieces, in the order of its queries.

    cu_seqlens_q: int32 [P + 1]. max_q_len: the most queries of a piece, or more. keys: those of
    the queries' own chunk, which they see in causal order, then those of the chunk before and those
    of all earlier chunks, which they all see. Attention over each of these with its own rotation of
    the queries, merged by log-sum-exp, is dual chunk attention. What no request is long enough for
    is left out.
    """

    cu_seqlens_q: Tensor
    max_q_len: int
    keys: tuple[ChunkKeys, ...]


def cut_at_chunks(
    cu_seqlens_q: Tensor,
    max_q_len: int,
    seq_lens: Tensor,
    page_table: Tensor,
    *,
    max_seq_len: int,
    chunk_len: int,
    page_size: int,
) -> ChunkPass:
    """Cut a pass of B requests at the borders of chunks.

    The arguments are those of ForwardBatch and CacheView, on one device; page_size divides
    chunk_len. Every request has as many pieces as max_q_len queries can need, so the shapes follow
    from the host alone: nothing is read from the device, and a CUDA graph can capture the cut.
    """
    pieces = 1 + (max_q_len + chunk_len - 2) // chunk_len if max_q_len else 1
    starts = seq_lens - cu_seqlens_q.diff()
    chunk = (starts // chunk_len)[:, None] + torch.arange(
        pieces, dtype=torch.int32, device=seq_lens.device
    )
    first = torch.maximum(chunk * chunk_len, starts[:, None])
    end = torch.minimum((chunk + 1) * chunk_len, seq_lens[:, None])
    chunk, first, end = chunk.flatten(), first.flatten(), end.flatten()
    queries = (end - first).clamp(min=0)
    valid = queries > 0
    chunk_start = (chunk * chunk_len).masked_fill(~valid, 0)
    table = page_table.repeat_interleave(pieces, 0) if pieces > 1 else page_table
    pages = chunk_len // page_size
    keys = [ChunkKeys((end - chunk_start).masked_fill(~valid, 0), _shifted(table, chunk, pages))]
    if max_seq_len > chunk_len:
        keys.append(ChunkKeys(chunk_start.clamp(max=chunk_len), _shifted(table, chunk - 1, pages)))
    if max_seq_len > 2 * chunk_len:
        keys.append(ChunkKeys((chunk_start - chunk_len).clamp(min=0), table))
    return ChunkPass(
        cu_seqlens_q=torch.nn.functional.pad(queries.cumsum(0, dtype=torch.int32), (1, 0)),
        max_q_len=min(max_q_len, chunk_len),
        keys=tuple(keys),
    )


def _shifted(table: Tensor, chunk: Tensor, pages: int) -> Tensor:
    """Return the pages of one chunk of every piece, int32 [P, at most pages]."""
    width = min(pages, table.shape[1])
    columns = torch.arange(width, device=table.device) + (chunk.clamp(min=0) * pages)[:, None]
    return table.gather(1, columns.clamp(max=max(table.shape[1] - 1, 0)))
