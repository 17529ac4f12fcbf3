"""Page tables, their CSR form and token slots; splitting of pool pages; counting of whole pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

import torch
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import BatchError, UnsupportedError, UsageError
from attn_core.spec.requirements import is_count

# A token slot is page · page_size + offset. A page table is int32 [B, max_pages], row b holds the
# pages of request b in order; entries past its pages hold a valid page, the dummy page 0 here.


def check_page_size(page_size: int) -> None:
    """Raise UsageError for a page size that is no integer of 1 or more."""
    if not is_count(page_size):
        raise UsageError(f"page size {page_size!r} (expected an integer of 1 or more)")


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Return how many pages hold `num_tokens` tokens. Raises UsageError for a page size below 1."""
    check_page_size(page_size)
    return -(-num_tokens // page_size)


def reusable_prefix(num_tokens: int, page_size: int) -> int:
    """Return how many tokens of a shared prefix can be reused, which are those in whole pages.

    With page size 64: 65 tokens → 64, 32 tokens → 0. Raises UsageError for a page size below 1.
    """
    check_page_size(page_size)
    return num_tokens // page_size * page_size


def pad_page_table(
    rows: Sequence[Sequence[int]], *, width: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Build a page table int32 [B, max(width, longest row)] from page lists, padded with page 0."""
    columns = max(width, max((len(r) for r in rows), default=0))
    padded = chain.from_iterable(chain(r, repeat(0, columns - len(r))) for r in rows)
    table = torch.tensor(list(padded), dtype=torch.int32, device="cpu").view(len(rows), columns)
    return table.to(device)


def pad_batch(
    page_table: Tensor, seq_lens: Tensor, batch_size: int, fill_len: int = 1
) -> tuple[Tensor, Tensor]:
    """Append padded requests up to `batch_size`: tables of page 0 and lengths of `fill_len`.

    page_table int32 [B, M], seq_lens int32 [B]. A padded request with n queries needs
    fill_len >= n. Raises BatchError if the batch is already larger, or if it has not one length per
    request. Never syncs.
    """
    if seq_lens.shape != page_table.shape[:1]:
        raise BatchError(f"{seq_lens.shape[0]} lengths for {page_table.shape[0]} requests")
    extra = batch_size - page_table.shape[0]
    if extra < 0:
        raise BatchError(f"{page_table.shape[0]} requests do not fit a batch of {batch_size}")
    table = torch.cat((page_table, page_table.new_zeros(extra, page_table.shape[1])))
    return table, torch.cat((seq_lens, seq_lens.new_full((extra,), fill_len)))


@dataclass(frozen=True, eq=False)
class PageCsr:
    """A ragged page table in CSR form, as FlashInfer uses it.

    indptr: int32 [B + 1].
    indices: int32, at least indptr[-1] entries, the rest page 0. Request b holds
    indices[indptr[b]:indptr[b + 1]].
    last_page_len: int32 [B], tokens in the last page: 1..page_size, or 0 for an empty request.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor

    def seq_lens(self, page_size: int) -> Tensor:
        """Return KV lengths int32 [B]. Never syncs."""
        pages = self.indptr.diff()
        return torch.where(pages > 0, (pages - 1) * page_size + self.last_page_len, 0)


def to_csr(
    page_table: Tensor, seq_lens: Tensor, page_size: int, *, num_pages: int | None = None
) -> PageCsr:
    """Convert a page table int32 [B, M] and lengths int32 [B] to CSR form, without the padding.

    num_pages: the number of pages of all requests, or an upper bound such as B · M. `indices` then
    has that length and nothing syncs. None reads the number from the device, which syncs. Raises
    UsageError for a page size below 1.
    """
    check_page_size(page_size)
    pages = (seq_lens + (page_size - 1)) // page_size
    indptr = _indptr(pages)
    total = int(indptr[-1]) if num_pages is None else num_pages
    row, column, valid = _ragged(indptr, total)
    indices = page_table[row, column] * valid if page_table.numel() else indptr.new_zeros(total)
    last = torch.where(pages > 0, seq_lens - (pages - 1) * page_size, 0)
    return PageCsr(indptr, indices.to(torch.int32), last.to(torch.int32))


def slot_table(page_table: Tensor, page_size: int, max_len: int | None = None) -> Tensor:
    """Expand a page table to token slots int64 [B, max_len], by default max_pages · page_size.

    Column j is the slot of token j; past a request's length it is any valid slot. Never syncs.
    Raises UsageError for a page size below 1.
    """
    check_page_size(page_size)
    slots = page_table.long()[:, :, None] * page_size
    slots = slots + torch.arange(page_size, device=page_table.device)
    return slots.flatten(1)[:, :max_len]


def split_pages(page_table: Tensor, page_size: int, kernel_page_size: int) -> Tensor:
    """Split each pool page of P tokens into P / p kernel pages: [B, M] → int32 [B, M · P / p].

    p = 1 gives token slots. split_cache does the same for the memory. Raises UnsupportedError if p
    does not divide P. Never syncs.
    """
    parts = _parts(page_size, kernel_page_size)
    if parts == 1:
        return page_table
    offsets = torch.arange(parts, dtype=torch.int32, device=page_table.device)
    return (page_table[:, :, None] * parts + offsets).flatten(1)


def split_cache(cache: LayerCache, kernel_page_size: int) -> LayerCache:
    """View a layer's pool pages of P tokens as P / p kernel pages each.

    Raises UnsupportedError if p does not divide P, if the layout is "HND", in which the parts of a
    page are not contiguous across heads, or where kernel_pages does. Index keys in FP8 are left
    out: a page's scales follow all of its values.
    """
    parts = _parts(cache.page_size, kernel_page_size)
    if parts == 1:
        return cache
    if cache.layout != "NHD":
        raise UnsupportedError(
            f"layout {cache.layout}: pages of {cache.page_size} tokens cannot be split into "
            f"{kernel_page_size}; use layout NHD or page size {kernel_page_size}"
        )

    def split(t: Tensor) -> Tensor:
        return kernel_pages(t, kernel_page_size)

    k_blocks, v_blocks = cache.block_scales or (None, None)
    return replace(
        cache,
        k=split(cache.k),
        v=None if cache.v is None else split(cache.v),
        block_scales=None
        if k_blocks is None
        else (split(k_blocks), None if v_blocks is None else split(v_blocks)),
        index=None if cache.index is None or cache.index.dim() == 2 else split(cache.index),
    )


def kernel_pages(pages: Tensor, size: int, *, dense: bool = False) -> Tensor:
    """View pool pages [pages, P, ...] as pages of `size` tokens, which divides P.

    dense: for a kernel that takes an address and no strides. Raises UnsupportedError for pages that
    are parts of a larger tensor, if the kernel cannot read them where they lie.
    """
    page, strides = pages.shape[1], pages.stride()
    if page == size and not dense:
        return pages
    if pages.is_contiguous() if dense else strides[0] == page * strides[1]:
        return pages.view(-1, size, *pages.shape[2:])
    reads = "dense pages" if dense else f"pages ({size} of its tokens each) at one distance"
    raise UnsupportedError(
        f"pool pages {list(pages.shape)} with strides {list(strides)}: the kernel reads {reads}; "
        "create the pool with a tensor for each of K and V, as KVPool does, or name another backend"
    )


def _parts(page_size: int, kernel_page_size: int) -> int:
    check_page_size(page_size)
    check_page_size(kernel_page_size)
    parts, remainder = divmod(page_size, kernel_page_size)
    if remainder:
        raise UnsupportedError(
            f"kernel page {kernel_page_size} does not divide the pool's page {page_size}; "
            f"use a page size that is a multiple of {kernel_page_size}"
        )
    return parts


def _indptr(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def _ragged(indptr: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give entry i < total its row, its place in the row, and whether it is a real one."""
    i = torch.arange(total, dtype=torch.int32, device=indptr.device)
    valid = i < indptr[-1]
    # searchsorted, unlike repeat_interleave, needs no sum from the device
    row = torch.searchsorted(indptr[1:], i, right=True)
    row = row.clamp(max=max(indptr.shape[0] - 2, 0))
    return row, (i - indptr[row]) * valid, valid
