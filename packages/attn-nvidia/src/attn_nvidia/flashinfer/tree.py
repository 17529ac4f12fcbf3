"""The masks of draft trees as FlashInfer reads them: one bit per query and key."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attn_nvidia.flashinfer.kernels import Lengths


def loose_window(window: int, drafts: int) -> int:
    """Return the window_left that hides no key which some draft of a tree sees.

    FlashInfer counts a window by the place of a draft, the model by its depth. The place is at most
    `drafts` - 1 larger, or smaller where a child is named before its parent; mask_bits hides what
    is too much.
    """
    return window - 1 + drafts - 1


def mask_bytes(keys: Lengths, drafts: int) -> int:
    """Return how many bytes the masks of all requests take; each begins with a byte of its own."""
    return int((-(-drafts * keys.astype(np.int64) // 8)).sum())


def mask_bits(
    tree: Tensor,
    keys: Lengths,
    *,
    window: int | None = None,
    depth: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pack the masks of a pass: uint8 [N] and where each request begins, int32 [B + 1].

    tree: bool [B, n, n], query i sees draft j; keys [B] on the host, the drafts are the last n.
    With a window, `depth` [B, n] is that of the drafts, and keys behind loose_window are left to
    the kernel. Bits are row-major per request, the lowest of a byte first
    (attention/variants.cuh). All keys are visible but a few around the drafts: those are taken
    out of bytes full of ones, by sums that never carry.
    """
    batch, n, _ = tree.shape
    device = tree.device
    length = keys.astype(np.int64)
    starts = np.zeros(batch + 1, dtype=np.int64)
    np.cumsum(-(-n * length // 8), out=starts[1:])
    # where the drafts' own columns begin in each row, in bits
    rows = starts[:-1, None] * 8 + np.arange(n) * length[:, None] + (length[:, None] - n)
    packed = torch.from_numpy(np.concatenate((rows.ravel(), starts))).to(device, non_blocking=True)
    row, indptr = packed[: batch * n].view(batch, n, 1), packed[batch * n :].int()
    columns = torch.arange(n, device=device)
    hidden = ~tree
    if window is not None:
        assert depth is not None
        first = depth[:, :, None] - (window - 1)  # the first position that a query sees
        hidden |= depth[:, None, :] < first
        # from the kernel's first key to the model's, of the deepest draft that there can be
        early = torch.arange(2 * n - 2, device=device) + (
            columns[:, None] - loose_window(window, n)
        )
        prefix = torch.from_numpy(length - n).to(device, non_blocking=True)[:, None, None]
        before_window = (early < first) & (early < 0) & (early >= -prefix)
        hidden = torch.cat((hidden, before_window), 2)
        columns = torch.cat((columns.expand(n, n), early), 1)
    bits = torch.where(hidden, row + columns, 0)
    # a byte of 255 less some of its bits, modulo 256
    cleared = torch.where(hidden, 256 - (1 << (bits & 7)), 0).to(torch.uint8)
    mask = torch.empty(int(starts[-1]), dtype=torch.uint8, device=device) if out is None else out
    mask.fill_(255).index_add_(0, (bits >> 3).flatten(), cleared.flatten())
    return mask, indptr
