"""npu_attention_update: attn_core.merge_states on an NPU, in one kernel."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from attn_ascend.library import operator

UPDATE: Final = ("lse", "local_out", "update_type")
WITH_LSE: Final = 1  # of update_type: the merged log-sum-exp is returned too


@cache
def register() -> None:
    """Give attn_core.merge_states this kernel for tensors of an NPU, once in a process."""
    operator("npu_attention_update", UPDATE)  # refuses a torch-npu without it
    torch.library.impl("attn_core::merge_states", "PrivateUse1", merge_states)


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge out [n, T, H, Dv] by lse [n, T, H], as attn_core.merge_states says.

    The operator's formula is NaN where every part is empty (-inf) and where a part is +inf, and
    0 · NaN is NaN. So parts without weight are zeros with the lowest finite log-sum-exp, and parts
    with +inf have 0 in place of it.
    """
    parts, width = lse.shape[0], out.shape[-1]
    if not lse.numel() or not width:
        return out.new_zeros(out.shape[1:]), lse.new_full(lse.shape[1:], -torch.inf)
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
