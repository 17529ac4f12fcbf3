"""FlashInfer's log-sum-exp: base 2, and a finite number for that of no keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LN2 = math.log(2)
_NO_KEYS = -3e4  # one below is that of no keys: -5e4 in base 2 (math::inf of flashinfer 0.6.14)


def natural(lse: Tensor, *, empty: bool = False) -> Tensor:
    """Turn base 2 into the natural log, in place; with `empty` some query may have no key."""
    lse.mul_(_LN2)
    return lse.masked_fill_(lse < _NO_KEYS, -torch.inf) if empty else lse
