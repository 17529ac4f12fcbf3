"""The requests of a pass of transformers' continuous batching, read off its indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_core.cache.page_table import num_pages_for
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode

_FULL, _SLIDING = "full_attention", "sliding_attention"  # transformers' types of layers


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """The requests of a pass, or some of them.

    lens, past: the new tokens of each request, and those before. held: those before that a layer
    with a window can still see. begin: its first new token among those of the pass. starts: where
    its slots begin, in layers without (False) and with a window (True). All are int64 [B].
    host: lens, past and held on the host.
    all: these are all requests of the pass.
    """

    lens: Tensor
    past: Tensor
    held: Tensor
    begin: Tensor
    starts: Mapping[bool, Tensor]
    host: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    all: bool = True

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens of each request after this pass."""
        lens, past_lens, _ = self.host
        return tuple(n + p for n, p in zip(lens, past_lens, strict=True))

    @cached_property
    def row(self) -> Tensor:
        """The request of each new token, int64 [T]."""
        rows = torch.arange(self.lens.shape[0], device=self.lens.device)
        return rows.repeat_interleave(self.lens, output_size=sum(self.host[0]))

    @cached_property
    def within(self) -> Tensor:
        """The place of each new token among those of its request, int64 [T]."""
        first = self.lens.cumsum(0) - self.lens
        return torch.arange(self.row.shape[0], device=self.row.device) - first[self.row]

    @property
    def index(self) -> Tensor | None:
        """Which tokens of the pass are new tokens of these requests; None: all."""
        return None if self.all else self.begin[self.row] + self.within

    def only(self, rows: Sequence[int]) -> Requests:
        """Return some of the requests."""
        i = torch.tensor(rows, device=self.lens.device)
        lens, past_lens, held_lens = (tuple(numbers[row] for row in rows) for numbers in self.host)
        return Requests(
            lens=self.lens[i],
            past=self.past[i],
            held=self.held[i],
            begin=self.begin[i],
            starts={windowed: x[i] for windowed, x in self.starts.items()},
            host=(lens, past_lens, held_lens),
            all=False,
        )

    def slots(self, group: int, windowed: bool, arguments: Mapping[str, Any]) -> Tensor:
        """Return the slots that a group of layers sees, new tokens last, one request after another.

        transformers marks the new tokens of layers with a window, which its own attention takes
        from the pass, and gives no slots to read where no request has a past.
        """
        read: Tensor = arguments["read_index"][group]
        write: Tensor = arguments["write_index"][group]
        if not read.shape[0]:
            return write
        if not windowed:
            return read
        new = (self.starts[True] + self.held)[self.row] + self.within
        return read.index_copy(0, new, write)

    def table(self, slots: Tensor, windowed: bool, page_size: int) -> Tensor:
        """Return the page table int32 [B, pages]; pages that no query sees are page 0."""
        width = num_pages_for(max(self.ends, default=0), page_size)
        position = torch.arange(width, device=slots.device) * page_size
        first = (self.past - (self.held if windowed else self.past))[:, None]
        page_index = self.starts[windowed][:, None] + (position - first).clamp(min=0)
        visible = (position + page_size > first) & (position < (self.past + self.lens)[:, None])
        pages = slots[page_index.clamp(max=slots.shape[0] - 1)] // page_size
        return torch.where(visible, pages, 0).int()

    def view(self, table: Tensor, out_cache_loc: Tensor) -> CacheView:
        """Return the view of these requests over a table of whole requests."""
        return CacheView(
            page_table=table,
            seq_lens=(self.past + self.lens).int(),
            out_cache_loc=out_cache_loc,
            max_seq_len=max(self.ends, default=0),
            seq_lens_host=self.ends,
        )

    def batch(self, views: Mapping[str, CacheView]) -> ForwardBatch:
        """Return the batch of these requests; one that decodes has one new token each."""
        lens = self.host[0]
        decodes = all(n == 1 for n in lens)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
            cu_seqlens_q=pad(self.lens.cumsum(0, dtype=torch.int32), (1, 0)),
            positions=self.past[self.row] + self.within,
            max_q_len=max(lens, default=0),
            views=views,
            query_lens_host=lens,
        )

    def alone(self) -> Requests:
        """Return these requests as if they began with the first token that a window sees."""
        lens, _, held_lens = self.host
        return replace(self, past=self.held, host=(lens, held_lens, held_lens))

    def packed_table(self, page_size: int) -> Tensor:
        """Return a page table int32 [B, pages] in which they lie one after the other, from 0 on."""
        pages = [num_pages_for(n, page_size) for n in self.ends]
        first = torch.tensor([0, *accumulate(pages)], device=self.lens.device)
        table = first[:-1, None] + torch.arange(max(pages), device=first.device)
        return table.clamp(max=sum(pages) - 1).int()

    def held_from(self, begin: Tensor) -> Tensor:
        """Return begin[i], begin[i] + 1, … for the held tokens of each request i, int64."""
        total = sum(self.host[2])
        rows = torch.arange(self.held.shape[0], device=self.held.device)
        rows = rows.repeat_interleave(self.held, output_size=total)
        offset = torch.arange(total, device=rows.device) - (self.held.cumsum(0) - self.held)[rows]
        return begin[rows] + offset


def read_requests(
    arguments: Mapping[str, Any], window_group: int | None, page_size: int
) -> Requests:
    """Return the requests of a pass; reads their lengths from the device once.

    arguments: what transformers gives every layer. window_group: a group of layers with a window.
    Where all layers have one, transformers does not say how long a request is. Any length does
    then, if its last page holds as many tokens.
    """
    begin, ends = arguments["cu_seq_lens_q"].long(), arguments["cu_seq_lens_k"]
    if isinstance(ends, Tensor):  # transformers 5.17, where there is one type of layers
        ends = {_FULL if window_group is None else _SLIDING: ends}
    lens = begin.diff()
    ends = {name == _SLIDING: x.long() for name, x in ends.items()}
    counts = {windowed: x.diff() - lens for windowed, x in ends.items()}
    held_counts = counts.get(True, counts.get(False))
    assert held_counts is not None
    past_counts = counts.get(False)
    if past_counts is None:
        assert window_group is not None
        slots, past_counts = arguments["read_index"][window_group], held_counts
        if slots.shape[0]:
            oldest = slots[ends[True][:-1]] % page_size
            past_counts = held_counts + torch.where(held_counts > 0, oldest, 0)
    host = tuple(map(tuple, torch.stack([lens, past_counts, held_counts]).tolist()))
    return Requests(
        lens=lens,
        past=past_counts,
        held=held_counts,
        begin=begin[:-1],
        starts={windowed: x[:-1] for windowed, x in ends.items()},
        host=(host[0], host[1], host[2]),
    )
