"""Cut a ragged batch into tiles of queries, each with the blocks of tokens that it attends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attn_core.errors import BatchError
from attn_core.runtime.layer import AttentionLayer


class LayerGroup(NamedTuple):
    """What of a layer decides its plan; layers that agree share one."""

    view: str
    group: int  # q heads per kv head
    window: int | None

    @classmethod
    def of(cls, layer: AttentionLayer) -> LayerGroup:
        """Return the class of a layer."""
        return cls(layer.view, layer.num_q_heads // layer.num_kv_heads, layer.sliding_window)


@dataclass(frozen=True, kw_only=True, eq=False)
class Lists:
    """The blocks of each tile among all blocks of a pool, as torch's BlockMask wants them.

    partial, full: int32 [tiles, 1, 1, blocks], of which only the counted first entries are written
    and read. places: int32 [B · blocks], at request · blocks + block the number of a partial block
    in its request. starts: int64 [tiles], request · blocks.
    """

    partial: Tensor
    full: Tensor
    places: Tensor
    starts: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiles:
    """Tiles of queries: a tile is a batch row of the kernel, the q heads of a KV head are rows too.

    tokens: int64 [tiles, queries], the query tokens of each tile, the last one repeated to fill it.
    picks: int64 [T], where in tiles · queries each token is. partial, full: int32 [tiles, most],
    the blocks that a tile sees in part or as a whole; partial_count, full_count int32
    [tiles, 1, 1] of them are real. low, high: int32 [tiles · rows], the first and the last position
    that a row sees. first_row: int64 [tiles]. request: int64 [tiles]. logical: int64 [n], the
    number in its request of the block partial.flatten()[real[i]], for the n real ones.
    """

    requests: int
    tokens: Tensor
    picks: Tensor
    partial_count: Tensor
    partial: Tensor
    full_count: Tensor
    full: Tensor
    low: Tensor
    high: Tensor
    first_row: Tensor
    request: Tensor
    real: Tensor
    logical: Tensor
    _lists: dict[int, Lists] = field(default_factory=dict)
    _compact: list[tuple[Tiles, Tensor]] = field(default_factory=list)

    def lists(self, blocks: int) -> Lists:
        """List the blocks for a pool of so many; once per pass, by the first layer that knows."""
        if blocks not in self._lists:
            starts = self.request * blocks
            places = self.request.new_empty(self.requests * blocks, dtype=torch.int32)
            most = self.partial.shape[1]
            block = self.partial.flatten()[self.real]
            self._refuse_stray(block, blocks)
            places[starts[self.real // most] + block] = self.logical.int()
            self._lists[blocks] = Lists(
                partial=_widened(self.partial, blocks),
                full=_widened(self.full, blocks),
                places=places,
                starts=starts,
            )
        return self._lists[blocks]

    def _refuse_stray(self, partial: Tensor, blocks: int) -> None:
        """Raise BatchError for blocks that a pool of so many lacks, which a CPU can look at."""
        if not partial.is_cpu:
            return
        place = torch.arange(self.full.shape[1], device="cpu")
        listed = torch.cat((partial, self.full[place < self.full_count[:, :, 0]]))
        low, high = (int(x) for x in listed.aminmax()) if len(listed) else (0, 0)
        if low < 0 or high >= blocks:
            raise BatchError(
                f"the page table lists blocks {low} to {high} of a pool of {blocks} blocks of keys "
                f"(expected 0 to {blocks - 1}): a page is one block or several"
            )

    def compact(self) -> tuple[Tiles, Tensor]:
        """Return the tiles over a copy of the blocks that they read, and these blocks, int64 [n].

        Once per pass; the number of the blocks is read from the device.
        """
        if not self._compact:
            counts = (self.partial_count, self.full_count)
            listed = [
                x.masked_fill(torch.arange(x.shape[1], device=x.device) >= count[:, :, 0], 0)
                for x, count in zip((self.partial, self.full), counts, strict=True)
            ]
            blocks, at = torch.unique(torch.cat(listed, 1), return_inverse=True)
            partial, full = at.int().split([x.shape[1] for x in listed], 1)
            if len(blocks) < 2:  # one block alone would be compiled anew
                blocks = blocks.repeat(2)
            tiles = replace(self, partial=partial, full=full, _lists={}, _compact=[])
            self._compact.append((tiles, blocks.long()))
        return self._compact[0]


def _widened(listed: Tensor, blocks: int) -> Tensor:
    """Give a list room for every block of the pool: what is not written costs no memory."""
    lists = listed.new_empty(len(listed), 1, 1, blocks)
    width = min(listed.shape[1], blocks)
    lists[:, 0, 0, :width] = listed[:, :width]
    return lists


@dataclass(frozen=True, kw_only=True, eq=False)
class Gather:
    """Token slots to copy, int64 [blocks, block]; dead: bool alike, what no query sees."""

    slots: Tensor
    dead: Tensor


def gather_tokens(
    table: Tensor,
    page_size: int,
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    window: int | None,
    block: int,
) -> tuple[Gather, Tensor]:
    """Lay what the queries of each request see out in blocks of their own.

    table: int32 [B, M], pages of page_size tokens. Returns what to copy, and the table of the
    blocks, int32 [B, blocks], by the numbers that they have in the copy.
    """
    n, s = torch.tensor(query_lens, device="cpu"), torch.tensor(key_lens, device="cpu")
    seen = torch.zeros_like(s) if window is None else (s - n - window + 1).clamp(min=0)
    first = seen // block
    end = torch.where(n > 0, -(-s // block), first)
    counts = end - first
    starts = counts.cumsum(0) - counts
    request = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    number = torch.arange(len(request), device="cpu") - starts[request] + first[request]
    if len(request) < 2:  # one block alone would be compiled anew
        request, number = (torch.cat((x, x)) for x in (request, number))
    position = number[:, None] * block + torch.arange(block, device="cpu")
    request = request[:, None]
    dead = (position < seen[request]) | (position >= s[request])
    num_slots = table.shape[1] * page_size  # a slot that no query sees may be any
    position, request, dead = (
        x.to(table.device) for x in (position.clamp(max=num_slots - 1), request, dead)
    )
    slots = table[request, position // page_size].long() * page_size + position % page_size
    blocks = ((starts - first)[:, None] + torch.arange(int(end.max()), device="cpu")).clamp(min=0)
    return Gather(slots=slots, dead=dead), blocks.to(table.device, torch.int32)


def cut(
    layer: LayerGroup,
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    table: Tensor,
    *,
    block: int,
    max_rows: int,
) -> Tiles:
    """Cut a batch with at least one query into tiles.

    query_lens, key_lens: B ints, keys including the new ones. table: int32 [B, M], blocks of
    `block` tokens. max_rows: most rows of a tile, which are q heads of a KV head times queries.
    """
    device, group = table.device, layer.group
    # A tile has two rows at least, and a pass two tiles: ones would be compiled anew.
    queries = max(min(max_rows // group, max(query_lens)), 2 if group == 1 else 1)
    n, s = torch.tensor(query_lens, device="cpu"), torch.tensor(key_lens, device="cpu")
    counts = -(-n // queries)
    request = torch.repeat_interleave(torch.arange(len(n), device="cpu"), counts)
    first = (
        torch.arange(len(request), device="cpu") - (counts.cumsum(0) - counts)[request]
    ) * queries
    size = (n[request] - first).clamp(max=queries)
    local = torch.minimum(torch.arange(queries, device="cpu"), size[:, None] - 1)
    tokens = (n.cumsum(0) - n)[request][:, None] + first[:, None] + local
    high = (s - n)[request][:, None] + first[:, None] + local
    window = layer.window
    low = torch.zeros_like(high) if window is None else (high - window + 1).clamp(min=0)
    picks = (torch.arange(queries, device="cpu") < size[:, None]).flatten().nonzero()[:, 0]

    begin, end = low[:, 0] // block, high[:, -1] // block + 1
    whole = -(-low[:, -1] // block)  # blocks from here on start where every query sees them
    stop = torch.maximum(whole, (high[:, 0] + 1) // block)  # and up to here they end there
    if len(request) < 2:
        tokens, low, high, request = (torch.cat((x, x)) for x in (tokens, low, high, request))
        begin, end, whole, stop = (torch.cat((x, x * 0)) for x in (begin, end, whole, stop))
    before = whole - begin
    full_count, partial_count = stop - whole, before + end - stop

    i = torch.arange(int(full_count.max()), device="cpu")
    full = (whole[:, None] + i).clamp(max=table.shape[1] - 1).to(device)
    i = torch.arange(int(partial_count.max()), device="cpu")
    partial = torch.where(i < before[:, None], begin[:, None] + i, (stop - before)[:, None] + i)
    real = (i < partial_count[:, None]).flatten().nonzero()[:, 0]
    logical = partial.flatten()[real]
    partial = partial.clamp(max=table.shape[1] - 1).to(device)
    request = request.to(device)

    def rows(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, 1).flatten().to(device, torch.int32)

    def count(x: Tensor) -> Tensor:
        return x[:, None, None].to(device, torch.int32)

    return Tiles(
        requests=len(query_lens),
        tokens=tokens.to(device),
        picks=picks.to(device),
        partial_count=count(partial_count),
        partial=table[request[:, None], partial],
        full_count=count(full_count),
        full=table[request[:, None], full],
        low=rows(low),
        high=rows(high),
        first_row=(torch.arange(len(tokens), device="cpu") * queries * group).to(device),
        request=request,
        real=real.to(device),
        logical=logical.to(device),
    )
