"""The page table of one view of a pass, cut to a window, on the host and on the device."""

from __future__ import annotations

import torch
from attn_core import ForwardBatch, ForwardMode
from torch import Tensor

from attn_nvidia.flashinfer.csr import (
    Csr,
    HostCsr,
    adjacent,
    key_lengths,
    page_list,
    plan_csr,
    refuse_moved,
)
from attn_nvidia.flashinfer.kernels import Lengths
from attn_nvidia.flashinfer.tree import mask_bits, mask_bytes


class Table:
    """What the plans of all layer classes of one view, window and order share.

    The tree of a pass masks causal layers alone: the others see all keys of their view. Filled
    anew for each replay where it is static: a graph reads its buffers, and the pages where the
    captured batch has them.
    """

    host: HostCsr
    device: Csr
    indices: Tensor
    mask: tuple[Tensor, Tensor] | None

    def __init__(
        self,
        view: str,
        window: int | None,
        causal: bool,
        batch: ForwardBatch,
        *,
        page_size: int,
        static: bool,
    ) -> None:
        self._view, self._window, self._causal = view, window, causal
        self._page_size = page_size
        self._static, self.mask = static, None
        self._captured: int | None = None  # where the pages lie that a graph reads
        if not static:
            return
        rows, width = batch.views[view].page_table.shape
        device = batch.positions.device
        self._packed = torch.zeros(3 * rows + 2, dtype=torch.int32, device=device)
        self.device = Csr.of(self._packed, rows)
        if (tree := self._tree(batch)) is not None:
            nbytes = rows * -(-tree.shape[1] * width * page_size // 8)
            bits = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            self.mask = bits, torch.zeros(rows + 1, dtype=torch.int32, device=device)

    @property
    def keys(self) -> Lengths:
        """The keys that a window leaves of each request, int32 [B] on the host."""
        return self.host.keys.numpy()

    def fill(self, batch: ForwardBatch, queries: Lengths) -> None:
        """Take the lengths, pages and tree of a pass; queries int32 [B] on the host."""
        view = batch.views[self._view]
        keys, size = key_lengths(view), self._page_size
        pages = adjacent(view.page_table, keys, size, captured=self._static)
        self.host = plan_csr(queries, keys, size, pages, self._window)
        indices = page_list(pages)
        if self._captured not in (None, indices.data_ptr()):
            refuse_moved(self._view)
        self._captured = indices.data_ptr() if self._static else None
        self.indices = indices
        self.upload()
        if (tree := self._tree(batch)) is not None:
            self._fill_mask(tree, batch)

    def upload(self) -> None:
        """Copy to the device what kernels read of the host's lists."""
        if self._static:
            self._packed.copy_(self.host.packed, non_blocking=True)
        else:
            packed = self.host.packed.to(self.indices.device, non_blocking=True)
            self.device = Csr.of(packed, len(self.host.keys))

    def _fill_mask(self, tree: Tensor, batch: ForwardBatch) -> None:
        drafts, depth = tree.shape[1], None
        if self._window is not None:
            roots = batch.views[self._view].seq_lens - drafts
            depth = batch.positions.view(-1, drafts) - roots[:, None]
        if not self._static:
            self.mask = mask_bits(tree, self.keys, window=self._window, depth=depth)
            return
        assert self.mask is not None
        out = self.mask[0][: mask_bytes(self.keys, drafts)]
        _, indptr = mask_bits(tree, self.keys, window=self._window, depth=depth, out=out)
        self.mask[1].copy_(indptr)

    def _tree(self, batch: ForwardBatch) -> Tensor | None:
        verifies = batch.forward_mode is ForwardMode.TARGET_VERIFY and self._causal
        return batch.spec.tree_mask if verifies and batch.spec is not None else None
