"""aiter without a cache: encoders, vision towers (aiter_attn), MLA's heads before absorption."""

from __future__ import annotations

from typing import Any, Final, NoReturn

from attn_core import (
    AttentionBackend,
    AttentionLayer,
    BackendConfig,
    ForwardBatch,
    LayerCache,
    Output,
    UnsupportedError,
    refuse_call,
    refuse_layer,
)
from torch import Tensor

from attn_rocm.aiter.library import function
from attn_rocm.tensors import align16, empty_attention

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


class AiterVision(AttentionBackend):
    """Attention of a vision tower, which has no cache and no plan."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
        self._ragged = Ragged()

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Raise UnsupportedError: a vision tower has no passes over a cache."""
        self._refuse()

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        metadata: None,
        *,
        out: Tensor | None = None,
        return_lse: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Output:
        """Raise UnsupportedError, as init_forward_metadata does."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.config.name} was created for a vision tower, which has no cache; its layers "
            "go through forward_ragged"
        )

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
