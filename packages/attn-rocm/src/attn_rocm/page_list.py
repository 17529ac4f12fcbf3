"""The pages of a pass as AMD's kernels read them: one list, in which each request has its part."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

import torch
from attn_core import CacheView, ForwardBatch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PageList:
    """The kernel's pages of all requests, all int32.

    Request b has indices[indptr[b]:indptr[b + 1]]; its last page holds last_page_len[b] tokens.
    indptr [B + 1], last_page_len [B]. Entries past the last request repeat its last page.
    With `spare` entries the list has 2 · B requests: each is followed by one that repeats its last
    page `spare` times and belongs to no query. They are for a kernel that looks ahead and
    multiplies by 0 what it reads there: it never reads another request's numbers, or a NaN.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor

    @classmethod
    def of(
        cls, view: CacheView, page_size: int, kernel_page: int, size: int, *, spare: int = 0
    ) -> PageList:
        """List the pages of a view in `size` entries; never syncs. kernel_page divides page_size.

        size: at least num_pages(view, kernel_page), and `spare` for each request.
        """
        lengths = view.seq_lens
        counts = (lengths + (kernel_page - 1)) // kernel_page
        counts_with_spare = (
            torch.stack((counts, torch.full_like(counts, spare)), 1).flatten() if spare else counts
        )
        indptr = torch.nn.functional.pad(counts_with_spare.cumsum(0, dtype=torch.int32), (1, 0))
        entry = torch.arange(size, dtype=torch.int32, device=indptr.device)
        step = 2 if spare else 1
        first, end = indptr[:-1:step], indptr[step::step].contiguous()
        request = torch.searchsorted(end, entry, right=True).clamp_(max=lengths.shape[0] - 1)
        page = torch.minimum(entry - first[request], counts[request] - 1).clamp_(min=0)
        parts = page_size // kernel_page
        indices = view.page_table[request, page // parts] * parts + page % parts
        last = (lengths - (counts - 1) * kernel_page).clamp_(min=0)
        return cls(indptr, indices.int(), torch.where(counts > 0, last, 0).int())

    def refill(self, view: CacheView, page_size: int, kernel_page: int, *, spare: int = 0) -> None:
        """List the pages of a replay into the tensors of its capture."""
        new_list = PageList.of(view, page_size, kernel_page, self.indices.shape[0], spare=spare)
        for old, new in (
            (self.indptr, new_list.indptr),
            (self.indices, new_list.indices),
            (self.last_page_len, new_list.last_page_len),
        ):
            old.copy_(new)


class CapturedLists:
    """The memory of a backend's captured lists, which are as long as the longest requests allow.

    Captures of one size may be steps of one graph, which are all refilled before it runs: each has
    memory of its own. Those of other sizes are of other graphs, refilled one at a time, and lie in
    the same memory.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, int], Tensor] = {}
        self._living: dict[tuple[object, ...], weakref.ref[PageList]] = {}

    def place(self, pages: PageList, name: str, batch: ForwardBatch) -> PageList:
        """Return the list of a view in a capture, its indices in memory that no step shares."""
        size, step = (name, batch.forward_mode, batch.batch_size, batch.num_tokens), 0
        while (owner := self._living.get((*size, step))) is not None and owner() is not None:
            step += 1
        length = pages.indices.shape[0]
        memory = self._memory.get((name, step))
        if memory is None or memory.shape[0] < length:
            memory = self._memory[name, step] = torch.empty_like(pages.indices)
        placed = replace(pages, indices=memory[:length].copy_(pages.indices))
        self._living[(*size, step)] = weakref.ref(placed)
        return placed


def num_pages(view: CacheView, kernel_page: int, *, captured: bool = False) -> int:
    """Return how many pages all requests have, or a bound where the host does not know.

    captured: the bound of every replay, whose requests are no longer than max_seq_len.
    """
    lengths = view.seq_lens_host
    if captured or lengths is None:
        lengths = (view.max_seq_len,) * view.page_table.shape[0]
    return sum(-(-n // kernel_page) for n in lengths)
