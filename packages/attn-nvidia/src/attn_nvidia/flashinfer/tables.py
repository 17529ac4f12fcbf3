"""The page table of one view of a pass, cut to a window, on the host and on the device."""

from __future__ import annotations

import torch
from attn_core.forward import ForwardBatch
from torch import Tensor

from attn_nvidia.flashinfer.csr import Csr, fill_indices, key_lengths, plan_csr
from attn_nvidia.flashinfer.kernels import Lengths
from attn_nvidia.flashinfer.tree import mask_bits, mask_bytes


class Table:
    """What the plans of all layer classes of one view and window share.

    Filled anew for each replay where it is static; its buffers then hold whatever the page table
    of the captured batch has room for.
    """

    host: Csr
    device: Csr
    indices: Tensor
    keys: Lengths
    mask: tuple[Tensor, Tensor] | None

    def __init__(
        self, view: str, window: int | None, batch: ForwardBatch, *, page_size: int, static: bool
    ) -> None:
        self._view, self._window, self._page_size = view, window, page_size
        self._static, self.mask = static, None
        if not static:
            return
        rows, width = batch.views[view].page_table.shape
        device = batch.positions.device
        self._packed = torch.zeros(5 * rows + 2, dtype=torch.int32, device=device)
        self.device = Csr.of(self._packed, rows)
        self.indices = torch.zeros(rows * width, dtype=torch.int32, device=device)
        if (tree := _tree(batch)) is not None:
            room = rows * -(-tree.shape[1] * width * page_size // 8)
            bits = torch.zeros(room, dtype=torch.uint8, device=device)
            self.mask = bits, torch.zeros(rows + 1, dtype=torch.int32, device=device)

    def fill(self, batch: ForwardBatch, queries: Lengths, places: Places) -> None:
        """Take the lengths, pages and tree of a pass; queries int32 [B] on the host."""
        view, rows = batch.views[self._view], batch.batch_size
        pages_of = view.page_table
        if pages_of.stride(1) != 1:
            pages_of = pages_of.contiguous()
        packed, self.keys = plan_csr(
            queries,
            key_lengths(view),
            self._page_size,
            pages_of.stride(0),
            self._window,
        )
        self.host = Csr.of(packed, rows)
        pages = int(packed[2 * rows + 1])
        at = places.first(pages)
        if self._static:
            self._packed.copy_(packed, non_blocking=True)
            fill_indices(self.device, pages_of, at, self.indices[:pages])
        else:
            self.device = Csr.of(packed.to(at.device, non_blocking=True), rows)
            self.indices = fill_indices(self.device, pages_of, at)
        if (tree := _tree(batch)) is not None:
            self._fill_mask(tree, batch)

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


def _tree(batch: ForwardBatch) -> Tensor | None:
    return None if batch.spec is None else batch.spec.tree_mask


class Places:
    """The numbers 0, 1, … on a device, created once for the longest page table so far."""

    def __init__(self, device: torch.device) -> None:
        self._all = torch.arange(1024, dtype=torch.int32, device=device)

    def first(self, count: int) -> Tensor:
        """Return 0 … count - 1, int32."""
        if count > self._all.shape[0]:
            room = 1 << (count - 1).bit_length()
            self._all = torch.arange(room, dtype=torch.int32, device=self._all.device)
        return self._all[:count]
