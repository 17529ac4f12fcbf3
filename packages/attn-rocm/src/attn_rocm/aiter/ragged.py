"""aiter without a cache: encoders, vision towers (aiter_attn), MLA's heads before absorption."""

from __future__ import annotations

from typing import Any, Final

from attn_core import (
    AttentionLayer,
    BackendConfig,
    Output,
    VisionBackend,
    align16,
    empty_attention,
    refuse_call,
)
from torch import Tensor

from attn_rocm.aiter.library import function

RAGGED: Final = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *("softmax_scale", "logits_soft_cap", "causal", "return_lse", "out"),
)


class Ragged:
    """Composable Kernel's attention over ragged requests, which a backend calls."""

    def __init__(self) -> None:
        self._attend = function("flash_attn_varlen_func", RAGGED)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        causal: bool,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        """Attend as AttentionBackend.forward_ragged says."""
        if not (q.shape[0] and k.shape[0]):
            return empty_attention(q, layer, out, return_lse)
        if out is None:
            out = q.new_empty(*q.shape[:2], layer.v_head_dim)
        result: Any = self._attend(
            q=align16(q),
            k=align16(k),
            v=align16(v),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            softmax_scale=layer.scale,
            logits_soft_cap=layer.logit_cap or 0.0,
            causal=causal,
            return_lse=return_lse,
            out=out,
        )
        return (out, result[1].T) if return_lse else out  # the LSE is [Hq, T]


class AiterVision(VisionBackend):
    """Attention of a vision tower, which has no cache and no plan."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._ragged = Ragged()

    def forward_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        causal: bool,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Output:
        """Attend without a cache; no length is read on the host."""
        refuse_call(self.config, return_lse=return_lse)
        lengths = (cu_seqlens_q, cu_seqlens_k, max_q, max_k)
        return self._ragged(q, k, v, layer, *lengths, causal=causal, out=out, return_lse=return_lse)
