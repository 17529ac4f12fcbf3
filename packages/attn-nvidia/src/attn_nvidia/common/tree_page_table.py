"""Which tokens of the cache each draft token of a tree sees, as a page table of its own."""

from __future__ import annotations

import torch
from torch import Tensor


def seen_slots(
    page_table: Tensor,
    prefix: Tensor,
    tree_mask: Tensor,
    page_size: int,
    *,
    window: int | None,
    width: int,
) -> tuple[Tensor, Tensor]:
    """List token slots per draft: the drafts that it sees and, with a window, its prefix too.

    page_table int32 [B, M], prefix int32 [B] (tokens before the drafts), tree_mask bool [B, n, n].
    Returns a table of pages of one token, int32 [B · n, width + 1], and how many of each row are
    meant, int32 [B · n]; the other entries are valid slots. width >= n, and with a window W
    >= min(W, the longest request). A window counts positions: the depth of a draft in its tree.
    Never syncs.
    """
    b, n, _ = tree_mask.shape

    def slot(token: Tensor) -> Tensor:
        pages = page_table.gather(1, (token // page_size).flatten(1)).view(token.shape)
        return pages * page_size + (token % page_size).int()

    drafts = slot(prefix[:, None] + torch.arange(n, device=prefix.device))
    in_window = tree_mask
    if window is None:
        num_before = prefix.new_zeros(b, n)
        table = page_table.new_zeros(b, n, width + 1)
    else:
        # the position of a draft, counted from the prefix's end: the other drafts that it sees
        depth = tree_mask.sum(-1) - tree_mask.diagonal(dim1=1, dim2=2).long()
        in_window = tree_mask & (depth[:, None] > depth[:, :, None] - window)
        num_before = torch.minimum((window - 1 - depth).clamp_(min=0), prefix[:, None])
        column = torch.arange(width + 1, device=prefix.device)
        token = (prefix[:, None] - num_before)[..., None] + column
        table = slot(token.clamp_(max=page_table.shape[1] * page_size - 1))
    # one column more takes the drafts that are not seen
    place = torch.where(in_window, num_before[..., None] + in_window.cumsum(-1) - 1, width)
    table.scatter_(2, place, drafts[:, None].expand(b, n, n))
    lengths = num_before + in_window.sum(-1)
    return table.flatten(0, 1), lengths.flatten().int()
