"""Faults of dual chunk attention: where chunks begin, and which query meets which key."""

import torch
from reference import Reference


class ChunkBordersOneLate(Reference):
    def chunk_of(self, position, chunks):
        return (position - 1).clamp(min=0) // chunks.chunk_len


class ChunksOfTheWholeSize(Reference):
    """A chunk is chunk_size long, not chunk_size less local_size."""

    def chunk_of(self, position, chunks):
        return position // chunks.chunk_size


class ChunksFromTheFirstNewToken(Reference):
    """Borders are counted from the first token of the pass."""

    def query_position(self, rows, device):
        return torch.arange(rows.queries, device=device)


class ChunkOfTheLastQuery(Reference):
    """All queries of a request are in the chunk of its last one, as in decode."""

    def query_position(self, rows, device):
        return super().query_position(rows, device)[-1:].expand(rows.queries)


class IntraAndSuccExchanged(Reference):
    def rotations(self, q):
        intra, succ, inter = super().rotations(q)
        return succ, intra, inter


class SuccAndInterExchanged(Reference):
    def rotations(self, q):
        intra, succ, inter = super().rotations(q)
        return intra, inter, succ


class SuccForAllEarlierChunks(Reference):
    def apart(self, query_chunk, key_chunk):
        return super().apart(query_chunk, key_chunk).clamp(max=1)


class InterForAllEarlierChunks(Reference):
    def apart(self, query_chunk, key_chunk):
        apart = super().apart(query_chunk, key_chunk)
        return apart.masked_fill(apart > 0, 2)


class InterFromTheThirdChunkBefore(Reference):
    def apart(self, query_chunk, key_chunk):
        return (query_chunk - key_chunk - 1).clamp(0, 2) + (query_chunk == key_chunk + 1)


class ChunksBeforeThePreviousForgotten(Reference):
    def visible(self, layer, rows, n, s, device):
        seen = super().visible(layer, rows, n, s, device)
        if layer.dual_chunk is not None:
            seen &= self.chunks_apart(layer, rows, s, device) < 2
        return seen


class PreviousChunkInCausalOrder(Reference):
    """A query sees as much of the previous chunk as of its own."""

    def visible(self, layer, rows, n, s, device):
        seen = super().visible(layer, rows, n, s, device)
        if layer.dual_chunk is not None:
            length = layer.dual_chunk.chunk_len
            behind = torch.arange(s, device=device) % length
            own = (self.query_position(rows, device) % length)[:, None]
            seen &= (self.chunks_apart(layer, rows, s, device) != 1) | (behind <= own)
        return seen
