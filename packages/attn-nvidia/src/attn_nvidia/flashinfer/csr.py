"""The page tables of a pass as FlashInfer reads them: lengths planned on the host, one upload."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from attn_core.forward import DECODE_MODES, CacheView, ForwardBatch, ForwardMode
from torch import Tensor

from attn_nvidia.flashinfer.kernels import Lengths


class Csr(NamedTuple):
    """Cumulative lengths and page counts, int32, all of one buffer.

    qo_indptr, indptr [B + 1]; last_page_len [B]; first [B]: where the row of a request begins in
    the flat page table, less where its pages begin in `indices`; keys [B]: KV lengths.
    """

    qo_indptr: Tensor
    indptr: Tensor
    last_page_len: Tensor
    first: Tensor
    keys: Tensor

    @classmethod
    def of(cls, packed: Tensor, batch_size: int) -> Csr:
        """View a buffer int32 [5 B + 2]."""
        b = batch_size
        return cls(*packed.split_with_sizes([b + 1, b + 1, b, b, b]))


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


def plan_csr(
    queries: Lengths, keys: Lengths, page_size: int, stride: int, window: int | None
) -> tuple[Tensor, Lengths]:
    """Return the buffer of a Csr on the host, and the keys that are left, int32 [B].

    stride: entries from one row of the page table to the next. Pages that lie behind the window of
    every query are left out: masks count from the end, so that nothing else changes.
    """
    batch = len(queries)
    behind = np.zeros(batch, dtype=np.int32)
    if window is not None:
        behind = np.maximum(keys - queries - (window - 1), 0) // page_size
        keys = keys - behind * page_size
    pages = -(-keys // page_size)
    packed = np.zeros(5 * batch + 2, dtype=np.int32)
    b = batch
    np.cumsum(queries, out=packed[1 : b + 1])
    np.cumsum(pages, out=packed[b + 2 : 2 * b + 2])
    packed[2 * b + 2 : 3 * b + 2] = keys - np.maximum(pages - 1, 0) * page_size
    rows = np.arange(batch, dtype=np.int32) * stride + behind
    packed[3 * b + 2 : 4 * b + 2] = rows - packed[b + 1 : 2 * b + 1]
    packed[4 * b + 2 :] = keys
    return torch.from_numpy(packed), keys


def fill_indices(csr: Csr, page_table: Tensor, places: Tensor, out: Tensor | None = None) -> Tensor:
    """Gather the pages of all requests, request by request: int32 [N].

    csr: on the device of page_table, int32 [B, M]. places: 0 … N - 1, int32, the same device. Its
    length says N, so that nothing syncs.
    """
    row = torch.searchsorted(csr.indptr[1:], places, right=True, out_int32=True)
    at = csr.first.index_select(0, row).add_(places)
    extent = (page_table.shape[0] - 1) * page_table.stride(0) + page_table.shape[1]
    flat = page_table.as_strided((extent,), (1,))
    if out is None:
        return flat.index_select(0, at)
    return torch.index_select(flat, 0, at, out=out)
