"""ascend without a cache: encoders, vision towers (ascend_attn), MLA's heads before absorption."""

from __future__ import annotations

from typing import NoReturn

import torch
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
    refuse_window,
)
from torch import Tensor

from attn_ascend.calls import PACKED_DIMS, calls_of
from attn_ascend.fused import Fused


class Ragged:
    """Ragged requests, whose lengths the operator takes on the host.

    They are read back once for all layers that pass the same tensor of lengths; a tensor of
    inference mode keeps no count of its changes and is read each time.
    """

    def __init__(self, attend: Fused) -> None:
        self._attend = attend
        self._read: dict[str, tuple[Tensor, int, list[int]]] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        causal: bool,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        """Attend as AttentionBackend.forward_ragged says."""
        query_lens = self._lengths("queries", cu_seqlens_q)
        key_lens = self._lengths("keys", cu_seqlens_k)
        packs = q.dtype == torch.bfloat16 and (q.shape[-1], v.shape[-1]) in PACKED_DIMS
        calls = calls_of(query_lens, key_lens, packs=packs, paged=False)
        return self._attend(q, k, v, layer, calls, causal=causal, out=out, return_lse=return_lse)

    def _lengths(self, name: str, cu_seqlens: Tensor) -> list[int]:
        """Return the lengths behind cumulative ones, int32 [B + 1]."""
        version = -1 if cu_seqlens.is_inference() else cu_seqlens._version
        last = self._read.get(name)
        if last is not None and last[0] is cu_seqlens and last[1] == version >= 0:
            return last[2]
        lengths: list[int] = cu_seqlens.diff().tolist()
        self._read[name] = cu_seqlens, version, lengths
        return lengths


class AscendVision(AttentionBackend):
    """Attention of a vision tower, which has no cache and no plan."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        for layer in config.layers:
            refuse_layer(config, layer)
        self._ragged = Ragged(Fused())

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
        """Attend without a cache; the lengths are read back once for all layers."""
        refuse_call(self.config, return_lse=return_lse)
        refuse_window(self.config.name, layer, causal=causal)
        lengths = (cu_seqlens_q, cu_seqlens_k)
        return self._ragged(q, k, v, layer, *lengths, causal=causal, out=out, return_lse=return_lse)
