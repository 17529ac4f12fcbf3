"""What a batch's requests hold in one pool: their page table, lengths and new slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_core.errors import BatchError
from attn_core.runtime.batch_checks import check_number, check_tensor, integers


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheView:
    """The page table, lengths and slots of a batch's requests in one pool.

    page_table: int32 [B, max_pages], page ids, columns contiguous, rows at any stride. Entries past
    a request's pages, and those before the window of every layer of this view, hold any valid page.
    The other tensors are contiguous.
    seq_lens: int32 [B], KV length including this pass's tokens, in every mode.
    out_cache_loc: int64 [N], token slots (page · page_size + offset) for new K/V. None if the
    engine writes them itself, before the layer attends.
    max_seq_len: the largest of seq_lens, or an upper bound, known on the host. In a captured pass
    it bounds all replays: the tokens that the table has columns for.
    seq_lens_host: seq_lens on the host.
    page_size: that of out_cache_loc, in tokens, which has to be the pool's; None is not compared.
    """

    page_table: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor | None
    max_seq_len: int
    seq_lens_host: tuple[int, ...] | None = None
    page_size: int | None = None

    def __post_init__(self) -> None:
        check_tensor("page_table", self.page_table, torch.int32, (None, None), rows=True)
        b = self.page_table.shape[0]
        check_tensor("seq_lens", self.seq_lens, torch.int32, (b,))
        if self.out_cache_loc is not None:
            check_tensor("out_cache_loc", self.out_cache_loc, torch.int64, (None,))
        tensors = (self.page_table, self.seq_lens, self.out_cache_loc)
        devices = {str(t.device) for t in tensors if t is not None}
        if len(devices) > 1:
            raise BatchError(f"a cache view on several devices: {sorted(devices)}")
        check_number("max_seq_len", self.max_seq_len)
        host = self.seq_lens_host
        if host is not None:
            integers("seq_lens_host", host[:1])  # one says it: a pass has no time for all
            if len(host) != b:
                raise BatchError(f"seq_lens_host has {len(host)} lengths for {b} requests")
            low, top = min(host, default=0), max(host, default=0)
            if low < 0:
                raise BatchError(f"negative length {low} in seq_lens_host")
            if top > self.max_seq_len:
                raise BatchError(f"max_seq_len {self.max_seq_len} is below {top}")

    @classmethod
    def build(
        cls,
        *,
        page_table: Tensor,
        page_size: int,
        seq_lens: Sequence[int],
        new_lens: Sequence[int],
        writes: bool = True,
    ) -> CacheView:
        """Build a view whose requests hold `seq_lens` tokens, the last `new_lens` of them new.

        page_table: int32 [B, max_pages]; the view is on its device.
        writes: False if the engine writes K/V itself.
        Raises BatchError if a request has more tokens than its row of the table can hold.
        """
        check_tensor("page_table", page_table, torch.int32, (None, None), rows=True)
        [page_size] = integers("page_size", [page_size])
        if page_size < 1:
            raise BatchError(f"page_size {page_size} (expected 1 or more)")
        device, capacity = page_table.device, page_table.shape[1] * page_size
        seq_lens, new_lens = integers("lengths", seq_lens), integers("query lengths", new_lens)
        if not len(seq_lens) == len(new_lens) == page_table.shape[0]:
            raise BatchError(
                f"{len(seq_lens)} lengths and {len(new_lens)} query lengths for a page table of "
                f"{page_table.shape[0]} rows (expected one length per table row)"
            )
        longest = max(seq_lens, default=0)
        if longest > capacity:
            raise BatchError(f"seq_len {longest} > {capacity}")
        bad = [(n, s) for n, s in zip(new_lens, seq_lens, strict=True) if not 0 <= n <= s]
        if bad:
            raise BatchError(f"{bad[0][0]} new tokens in a length of {bad[0][1]}")
        slots = None
        if writes:
            rows = torch.repeat_interleave(
                torch.arange(len(seq_lens), device="cpu"),
                torch.tensor(new_lens, dtype=torch.int64, device="cpu"),
            )
            rows, pos = rows.to(device), positions_of(seq_lens, new_lens).to(device)
            slots = page_table[rows, pos // page_size].long() * page_size + pos % page_size
        return cls(
            page_table=page_table,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            out_cache_loc=slots,
            max_seq_len=longest,
            seq_lens_host=seq_lens,
            page_size=page_size,
        )


def positions_of(seq_lens: Sequence[int], new_lens: Sequence[int]) -> Tensor:
    """Return the positions of the new tokens of all requests, int64 on the host."""
    parts = [torch.arange(s - n, s, device="cpu") for s, n in zip(seq_lens, new_lens, strict=True)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device="cpu")
