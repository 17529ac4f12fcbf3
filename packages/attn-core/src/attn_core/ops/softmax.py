"""The softmax of scores beside their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_lse(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax of scores [..., keys], alike, and their natural log-sum-exp [...].

    A row of -inf alone sees no key: its weights are zeros and its log-sum-exp is -inf. The weights
    are not exp(scores - lse): a large lse is rounded by more than a weight is, in every weight.
    """
    lse = scores.logsumexp(-1)
    return scores.softmax(-1).masked_fill_((lse == -torch.inf)[..., None], 0.0), lse
