"""Merge partial attention outputs by their natural log-sum-exp."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from attn_core.errors import UsageError

OPERATOR: Final = "attn_core::merge_states"
torch.library.define(OPERATOR, "(Tensor out, Tensor lse) -> (Tensor, Tensor)")


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge n partial attentions over disjoint keys into the attention over all of them.

    out [n, T, H, Dv]; lse [n, T, H], the natural log of the sum of exp(scores) of each part.
    Returns out [T, H, Dv] in the dtype of `out` and lse float32 [T, H], accumulated in float32.
    A part with lse -inf is empty, and its `out` is ignored. If all parts are empty, the result is
    zeros and -inf. A part with lse +inf outweighs all finite ones, whose `out` is ignored; several
    such parts weigh alike, and the merged lse is +inf.
    Raises UsageError for shapes that do not fit and for integers.
    It is torch's operator attn_core::merge_states: torch.library.impl() registers a kernel for the
    tensors of another device.
    out = Σ exp(lse_i - lse) · out_i, lse = log Σ exp(lse_i) (FlashAttention-2, section 3.1).
    """
    if lse.shape != out.shape[:-1]:
        raise UsageError(
            f"states to merge: out {list(out.shape)} and lse {list(lse.shape)} (expected [n, T, H, "
            "Dv] and [n, T, H])"
        )
    if not (out.is_floating_point() and lse.is_floating_point()):
        raise UsageError(f"states to merge: out {out.dtype} and lse {lse.dtype} (expected floats)")
    merged: tuple[Tensor, Tensor] = torch.ops.attn_core.merge_states(out, lse)
    return merged


@torch.library.impl(OPERATOR, "CompositeImplicitAutograd")
def _merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge by torch's own operators: for every device that has no kernel.

    A CPU's exp of float32 may differ by a bit by where in a tensor a number stands. Of float64 it
    differs as well, but that is lost when the weights are rounded.
    """
    dtype, lse = torch.float32, lse.double() if lse.device.type == "cpu" else lse.float()
    total = lse.logsumexp(0)
    endless = lse == torch.inf
    weights = lse.softmax(0)  # NaN where one is +inf or all are -inf
    weights = torch.where(total == torch.inf, endless / endless.sum(0), weights)
    ignored = (lse == -torch.inf) | ((total == torch.inf) & ~endless)  # 0 · out may be NaN
    weights = weights.masked_fill(ignored, 0.0).to(dtype)[..., None]
    merged = (out.masked_fill(ignored[..., None], 0.0) * weights).sum(0)
    return merged.to(out.dtype), total.to(dtype)
