"""npu_fused_infer_attention_score_v2: the one operator behind MHA, encoders and ragged MLA."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from attn_core import AttentionLayer, Output
from torch import Tensor

from attn_ascend import tasks
from attn_ascend.calls import PAGE, Call
from attn_ascend.library import operator

FUSED: Final = (
    *("query", "key", "value", "atten_mask", "actual_seq_qlen", "actual_seq_kvlen", "block_table"),
    *("num_query_heads", "num_key_value_heads", "softmax_scale", "pre_tokens", "next_tokens"),
    *("input_layout", "sparse_mode", "block_size", "return_softmax_lse"),
)
NO_MASK, CAUSAL, BAND = 0, 3, 4  # of sparse_mode; the last query sees the last key
LARGEST: Final = 2**31 - 1  # numbers of a cache
_COLUMNS: Final = 16  # head dims are multiples


@cache
def triangle(device: torch.device) -> Tensor:
    """Return the mask that causal order and bands take, bool [2048, 2048], True is hidden."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


class Fused:
    """Runs planned calls and puts their results together."""

    def __init__(self) -> None:
        self._attend = operator("npu_fused_infer_attention_score_v2", FUSED)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        calls: Sequence[Call],
        *,
        causal: bool,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        """Attend with q [T, Hq, D]; requests that no call has give zeros and an LSE of -inf.

        k, v: pages [P, 128, Hkv · D] where the calls have a table, else [S, Hkv, D].
        The operator's LSE is natural. Sinks are merged into its output by it, which is exact for
        any head dim; the operator's own take the head dims of packed calls and bf16.
        """
        sums = return_lse or layer.sinks is not None
        if len(calls) == 1 and calls[0].queries == (0, q.shape[0]):
            result, lse = self._call(q, k, v, layer, calls[0], causal, sums)
        else:
            result = q.new_zeros(*q.shape[:2], layer.v_head_dim)
            lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32) if sums else None
            for call in calls:
                tokens = slice(*call.queries)
                part, part_lse = self._call(q[tokens], k, v, layer, call, causal, sums)
                result[tokens] = part
                if lse is not None and part_lse is not None:
                    lse[tokens] = part_lse
        if layer.sinks is not None and lse is not None:
            result, lse = merge_sinks(result, lse, layer.sinks.detach())
        out = result if out is None else out.copy_(result)
        return (out, lse) if return_lse and lse is not None else out

    def update(self, calls: Sequence[Call]) -> None:
        """Give the captured layers the present lengths of their calls."""
        for call in calls:
            tasks.update(self._attend, call.tasks or (), call.lengths)

    def _call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        call: Call,
        causal: bool,
        sums: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [T, Hq, Dv] of one call and, if asked, its LSE float32 [T, Hq]."""
        tokens, heads, _ = q.shape
        options: dict[str, Any] = {}
        if call.table is None:
            k, v = (x[slice(*call.keys)] for x in (k, v))
            q, k, v = (padded(x) for x in (q, k, v))
        else:
            options = {"block_table": call.table, "block_size": PAGE}
        if not call.packed:
            requests = len(call.query_lens)
            q = q.view(requests, call.size, *q.shape[1:])
            if call.table is None:
                k, v = (x.view(requests, call.key_lens[0], *x.shape[1:]) for x in (k, v))
        operands = {
            "query": q.contiguous(),
            "key": k.contiguous(),
            "value": v.contiguous(),
            "num_query_heads": layer.num_q_heads,
            "num_key_value_heads": layer.num_kv_heads,
            "softmax_scale": layer.scale,
            "input_layout": "TND" if call.packed else "BSND",
            "return_softmax_lse": sums,
            **masked(call, layer.sliding_window, causal, q.device),
            **options,
        }
        if call.tasks is not None and tasks.capturing():
            task, (result, lse) = tasks.captured(self._attend, operands, call.lengths)
            call.tasks.append(task)
        else:
            result, lse = self._attend(**operands, **call.lengths)
        result = result.reshape(tokens, heads, -1)[..., : layer.v_head_dim]
        if not sums:
            return result, None
        # [T, H, 1] of a packed call, else [B, H, S, 1]
        lse = lse if call.packed else lse.transpose(1, 2)
        return result, lse.reshape(tokens, heads)


def masked(call: Call, window: int | None, causal: bool, device: torch.device) -> dict[str, Any]:
    """Return the mask of a call; a window of W tokens is a band of W - 1 before each query."""
    if call.mask is not None:
        return {"sparse_mode": NO_MASK, "atten_mask": call.mask}
    lone = not call.packed and call.size == 1  # the last query, which sees every key
    if not causal or (lone and window is None):
        return {"sparse_mode": NO_MASK}
    if window is None:
        return {"sparse_mode": CAUSAL, "atten_mask": triangle(device)}
    if lone:  # without a cache
        keys = call.key_lens[0]
        hidden = torch.arange(keys, device=device) < keys - window
        return {"sparse_mode": NO_MASK, "atten_mask": hidden[None, None, None]}
    return {
        "sparse_mode": BAND,
        "atten_mask": triangle(device),
        "pre_tokens": window - 1,
        "next_tokens": 0,
    }


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add one more logit per head, without a value, to the softmax; sinks [Hq]."""
    sinks = sinks.float()
    # what the keys keep of the weight; of no keys and no sink, -inf both, nothing
    share = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sinks))
    return (out * share[..., None]).to(out.dtype), torch.logaddexp(lse, sinks)


def padded(x: Tensor) -> Tensor:
    """Return x [T, H, D] with zeros up to a head dim that the operator takes."""
    missing = -x.shape[-1] % _COLUMNS
    return torch.nn.functional.pad(x, (0, missing)) if missing else x
