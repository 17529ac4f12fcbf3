"""Which requests share a call of the fused operator: its lengths are lists on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Final

import torch
from attn_core import CacheView
from torch import Tensor

from attn_ascend.tasks import Task

PAGE: Final = 128  # tokens of a page of the operator
MOST_PACKED: Final = 4096  # requests of a packed call
MOST_EQUAL: Final = 65536  # of another
# (D, Dv) of packed calls, which are in bf16 alone
PACKED_DIMS: Final = frozenset({(128, 128), (192, 192), (192, 128)})


@dataclass(eq=False)
class Call:
    """Requests that lie one after the other and are attended to by one call.

    packed: requests of any lengths ("TND"), else each has `size` queries ("BSND").
    queries, keys: the first token of the call and the one after its last; keys of a pass without a
    cache.
    table: int32 [requests, pages], their rows of the page table. mask: bool [requests, 1, 1, keys],
    the keys that a lone query does not see. key_lens: of the cache's tokens where there is a table.
    tasks: those of the layers of a captured pass; None of an eager one.
    """

    packed: bool
    size: int
    first_request: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    query_lens: list[int] = field(default_factory=list)
    key_lens: list[int] = field(default_factory=list)
    table: Tensor | None = None
    mask: Tensor | None = None
    tasks: list[Task] | None = None

    def refill(self, source: Call) -> None:
        """Take the lengths, pages and mask of a call of the same form, into the same memory."""
        self.key_lens[:] = source.key_lens
        for target, value in ((self.table, source.table), (self.mask, source.mask)):
            if target is not None and value is not None:
                target.copy_(value)

    @property
    def requests(self) -> slice:
        return slice(self.first_request, self.first_request + len(self.query_lens))

    @cached_property
    def lengths(self) -> dict[str, list[int]]:
        """The lists of lengths as the operator takes them, made once for all layers.

        Packed queries and keys have the sums of the lengths up to each request; the keys of pages
        have the lengths themselves.
        """
        paged = self.table is not None
        if self.packed:
            keys = self.key_lens if paged else [*accumulate(self.key_lens)]
            return {"actual_seq_qlen": [*accumulate(self.query_lens)], "actual_seq_kvlen": keys}
        return {"actual_seq_kvlen": self.key_lens} if paged else {}

    def takes(self, request: int, query_len: int, key_len: int, *, paged: bool) -> bool:
        """Say whether the next request fits into this call."""
        if request != self.requests.stop:
            return False
        if self.packed:
            return len(self.query_lens) < MOST_PACKED
        fits = query_len == self.size and len(self.query_lens) < MOST_EQUAL
        return fits and (paged or key_len == self.key_lens[0])


def calls_of(
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    *,
    packs: bool,
    paged: bool,
    causal: bool = False,
) -> list[Call]:
    """Share the requests out among calls; those without queries or without keys are in none.

    packs: whether dims and dtype allow packed calls, which requests of unequal lengths then share.
    paged: the keys lie in a cache; else they are packed, and equal ones alone can share a call.
    causal: the first queries of a request that has fewer keys see none: they are in no call.
    """
    if packs and paged:
        packs = len(set(query_lens) - {0}) > 1
    calls: list[Call] = []
    query = key = 0
    for request, (q, k) in enumerate(zip(query_lens, key_lens, strict=True)):
        if q and k:
            see = min(q, k) if causal else q
            joins = calls and see == q and calls[-1].takes(request, q, k, paged=paged)
            if not joins:
                first = query + q - see
                calls.append(Call(packs, see, request, (first, first), (key, key)))
            call = calls[-1]
            call.queries = (call.queries[0], query + q)
            call.keys = (call.keys[0], key + k)
            call.query_lens.append(see)
            call.key_lens.append(k)
        query, key = query + q, key + k
    return calls


def paged_calls(
    query_lens: Sequence[int], view: CacheView, table: Tensor, window: int | None, *, packs: bool
) -> list[Call]:
    """Plan a pass over one view; table: its pages, in pages of the operator.

    A lone query takes no band: its call has the pages of the window alone and a mask over their
    first tokens.
    """
    key_lens = view.seq_lens_host
    if key_lens is None:
        key_lens = tuple(view.seq_lens.tolist())
    calls = calls_of(query_lens, key_lens, packs=packs, paged=True)
    for call in calls:
        call.table = table[call.requests]
        if window is not None and not call.packed and call.size == 1:
            _narrow(call, view.seq_lens[call.requests], window)
    return calls


def _narrow(call: Call, lengths: Tensor, window: int) -> None:
    """Leave the pages that hold the window of each request's last token."""
    assert call.table is not None
    skipped = [max(n - window, 0) // PAGE for n in call.key_lens]
    call.key_lens = [n - s * PAGE for n, s in zip(call.key_lens, skipped, strict=True)]
    pages = min(-(-window // PAGE) + 1, call.table.shape[1])  # for any length
    first = (lengths - window).clamp_(min=0) // PAGE
    column = torch.arange(pages, device=first.device)
    columns = (first[:, None] + column).clamp_(max=call.table.shape[1] - 1)
    call.table = call.table.gather(1, columns)
    hidden = (lengths - first * PAGE - window)[:, None]
    token = torch.arange(pages * PAGE, dtype=torch.int32, device=first.device)
    call.mask = (token < hidden)[:, None, None]
