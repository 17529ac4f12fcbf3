"""Trees of drafts as AITER's extend kernel reads them: a prefix of tokens, drafts, one mask."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from attn_core import CacheView, ForwardBatch
from torch import Tensor

from attn_rocm.page_list import PageList, num_pages


@dataclass(frozen=True, eq=False)
class TreePlan:
    """What a pass over trees of n drafts per request reads.

    prefix: the tokens before the drafts. drafts: the slots of the drafts, int64 [B · n].
    mask: of request b, n rows of all its keys from mask_indptr[b] on, bool; int64 [B]. Only the
    columns of drafts are filled: the kernel skips those of the prefix, which every draft sees.
    """

    prefix: PageList
    drafts: Tensor
    mask: Tensor
    mask_indptr: Tensor

    @classmethod
    def of(
        cls, batch: ForwardBatch, view: CacheView, page_size: int, *, captured: bool
    ) -> TreePlan:
        """Plan a verify pass; captured: for the longest requests of its replays."""
        assert batch.spec is not None
        n = batch.spec.num_draft_tokens
        tokens = num_pages(view, 1, captured=captured)
        device = view.page_table.device
        prefix_view = _before(view, n)
        plan = cls(
            PageList.of(prefix_view, page_size, 1, tokens),
            torch.empty(batch.num_tokens, dtype=torch.int64, device=device),
            torch.empty(n * tokens, dtype=torch.bool, device=device),
            torch.empty(batch.batch_size, dtype=torch.int64, device=device),
        )
        plan._fill(batch, view, prefix_view, page_size)
        return plan

    def refill(self, batch: ForwardBatch, view: CacheView, page_size: int) -> None:
        """Plan a replay into the tensors of its capture."""
        assert batch.spec is not None
        prefix_view = _before(view, batch.spec.num_draft_tokens)
        self.prefix.refill(prefix_view, page_size, 1)
        self._fill(batch, view, prefix_view, page_size)

    def _fill(
        self, batch: ForwardBatch, view: CacheView, prefix_view: CacheView, page_size: int
    ) -> None:
        assert batch.spec is not None
        assert batch.spec.tree_mask is not None
        n, lengths, table = batch.spec.num_draft_tokens, view.seq_lens.long(), view.page_table
        draft = torch.arange(n, device=table.device)
        position = prefix_view.seq_lens.long()[:, None] + draft
        slots = table.gather(1, position // page_size).long() * page_size + position % page_size
        self.drafts.copy_(slots.flatten())
        self.mask_indptr.copy_((lengths * n).cumsum(0) - lengths * n)
        row = self.mask_indptr[:, None] + draft * lengths[:, None]
        self.mask[row[:, :, None] + position[:, None]] = batch.spec.tree_mask


def _before(view: CacheView, drafts: int) -> CacheView:
    """Return a view of the tokens before the drafts, for the lengths alone."""
    return replace(view, seq_lens=view.seq_lens - drafts, seq_lens_host=None)
