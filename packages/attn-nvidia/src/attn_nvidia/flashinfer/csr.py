"""A pass as FlashInfer reads it: lengths scheduled on the host, the page table as one list."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import numpy as np
import torch
from attn_core import DECODE_MODES, BackendError, CacheView, ForwardBatch, ForwardMode
from torch import Tensor

from attn_nvidia.flashinfer.kernels import Lengths


class Csr(NamedTuple):
    """What kernels read, int32, of one buffer: qo_indptr, indptr [B + 1], last_page_len [B].

    The pages of request b begin at indptr[b] of the page table itself, seen as one list. From both
    the kernels take its keys: (indptr[b + 1] - indptr[b] - 1) · page_size + last_page_len[b]
    (get_length in page.cuh of flashinfer 0.6.14). Rows of the table are longer than their requests,
    so that last_page_len makes up for it and may be negative.
    """

    qo_indptr: Tensor
    indptr: Tensor
    last_page_len: Tensor

    @classmethod
    def of(cls, packed: Tensor, batch_size: int) -> Csr:
        """View a buffer int32 [3 B + 2]."""
        b = batch_size
        return cls(*packed.split_with_sizes([b + 1, b + 1, b]))


class HostCsr(NamedTuple):
    """What is scheduled by, on the host: a Csr and its buffer, and the true lengths beside it.

    pages: cumulative, int32 [B + 1]. keys: int32 [B].
    """

    packed: Tensor
    csr: Csr
    pages: Tensor
    keys: Tensor


def query_lengths(batch: ForwardBatch) -> Lengths:
    """Return the queries per request; asks the device where the batch does not say them."""
    if batch.forward_mode in DECODE_MODES:
        return np.ones(batch.batch_size, dtype=np.int32)
    spec = batch.spec
    if batch.forward_mode is ForwardMode.TARGET_VERIFY and spec is not None:
        return np.full(batch.batch_size, spec.num_draft_tokens, dtype=np.int32)
    lengths = batch.query_lens_host
    if lengths is None:
        lengths = tuple(batch.cu_seqlens_q.diff().tolist())
    return np.array(lengths, dtype=np.int32)


def key_lengths(view: CacheView) -> Lengths:
    """Return the keys per request; asks the device where the view does not say them."""
    lengths = view.seq_lens_host
    return np.array(view.seq_lens.tolist() if lengths is None else lengths, dtype=np.int32)


def adjacent(page_table: Tensor, keys: Lengths, page_size: int, *, captured: bool) -> Tensor:
    """Return a page table whose rows can be read as one list, itself where possible.

    keys int32 [B]. Rows must lie one after the other, and no token of the list may have a number
    beyond 31 bits: else a pass takes a copy of the pages that it needs. Raises BackendError for a
    captured one, which would go on reading the copy.
    """
    rows, width = page_table.shape
    if not width and not captured:  # no request has a key: any list serves
        return page_table.new_zeros(rows, 1)
    step = page_table.stride(0)
    in_line = step >= width or rows == 1
    if in_line and rows * step * page_size < 1 << 31:
        return page_table
    if captured:
        raise BackendError(
            f"flashinfer: a page table {[rows, width]} with strides {page_table.stride()} in a "
            f"captured pass over pages of {page_size}; its rows must not overlap, and all "
            "its pages hold fewer than 2^31 tokens: capture with a smaller or contiguous one"
        )
    needed = -(-int(keys.max(initial=1)) // page_size)
    return page_table[:, :needed].contiguous()


def refuse_moved(view: str) -> NoReturn:
    """Raise BackendError for a replay whose page table is not the one that was captured."""
    raise BackendError(
        f"flashinfer: the page table of view {view!r} lies elsewhere than when this pass was "
        "captured, and the graph reads it there: overwrite the captured batch in place"
    )


def page_list(page_table: Tensor) -> Tensor:
    """View an adjacent page table as one list: row b begins at b · stride(0)."""
    rows, width = page_table.shape
    return page_table.as_strided(((rows - 1) * page_table.stride(0) + width,), (1,))


def plan_csr(
    queries: Lengths, keys: Lengths, page_size: int, page_table: Tensor, window: int | None
) -> HostCsr:
    """Lay out a pass on the host. queries, keys int32 [B]; page_table adjacent, int32 [B, M].

    Pages that lie behind the window of every query are left out: masks count from the end, so that
    nothing else changes.
    """
    b, (rows, width), step = len(queries), page_table.shape, page_table.stride(0)
    packed = np.zeros(5 * b + 3, dtype=np.int32)
    first, last = packed[b + 1 : 2 * b + 2], packed[2 * b + 2 : 3 * b + 2]
    first[:b] = np.arange(0, b * step, step, dtype=np.int32) if step else 0
    first[b] = (rows - 1) * step + width
    if window is not None:
        skipped_pages = np.maximum(keys - queries - (window - 1), 0) // page_size
        keys = keys - skipped_pages * page_size
        first[:b] += skipped_pages
    # keys - (first[1:] - first[:-1] - 1) · page_size, in place: an array costs more than its sum
    np.subtract(first[:-1], first[1:], out=last)
    last += 1
    last *= page_size
    last += keys
    queries.cumsum(out=packed[1 : b + 1])
    ((keys + (page_size - 1)) // page_size).cumsum(out=packed[3 * b + 3 : 4 * b + 3])
    packed[4 * b + 3 :] = keys
    host_buffer = torch.from_numpy(packed)
    *lists, pages, tokens_left = host_buffer.split_with_sizes((b + 1, b + 1, b, b + 1, b))
    return HostCsr(host_buffer[: 3 * b + 2], Csr(*lists), pages, tokens_left)
