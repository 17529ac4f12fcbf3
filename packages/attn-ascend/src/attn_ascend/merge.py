"""npu_attention_update: attn_core.merge_states on an NPU, in one kernel."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from attn_ascend.library import operator

UPDATE: Final = ("lse", "local_out", "update_type")
WITH_LSE: Final = 1  # of update_type: the merged log-sum-exp is returned too
MOST_PARTS: Final = 16  # that the operator takes, by CANN's documentation of aclnnAttentionUpdate
WIDTHS: Final = range(8, 513, 8)  # of a head that the operator takes, by the same page


@cache
def register() -> None:
    """Give attn_core.merge_states this kernel for tensors of an NPU, once in a process."""
    operator("npu_attention_update", UPDATE)  # refuses a torch-npu without it
    torch.library.impl("attn_core::merge_states", "PrivateUse1", merge_states)


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge out [n, T, H, Dv] by lse [n, T, H], as attn_core.merge_states says.

    The operator's formula is NaN where every part is empty (-inf) and where a part is +inf, and
    0 · NaN is NaN. So parts without weight are zeros with the lowest finite log-sum-exp, and parts
    with +inf have 0 in place of it. What the operator does not take is merged by torch's operators.
    """
    parts, width = lse.shape[0], out.shape[-1]
    if not lse.numel() or parts > MOST_PARTS or width not in WIDTHS:
        merged, total = torch.ops.attn_core.merge_states.default.decompose(out, lse)
        return merged, total
    update = operator("npu_attention_update", UPDATE)
    lse = lse.float()
    endless = lse == torch.inf
    any_endless = endless.any(0)
    ignored = (lse == -torch.inf) | (any_endless & ~endless)
    finite = lse.masked_fill(endless, 0.0).masked_fill(ignored, torch.finfo(lse.dtype).min)
    merged, total = update(
        lse=list(finite.reshape(parts, -1).unbind()),
        local_out=list(out.masked_fill(ignored[..., None], 0.0).reshape(parts, -1, width).unbind()),
        update_type=WITH_LSE,
    )
    total = total.view(lse.shape[1:]).masked_fill(ignored.all(0), -torch.inf)
    return merged.view(out.shape[1:]), total.masked_fill(any_endless, torch.inf)
