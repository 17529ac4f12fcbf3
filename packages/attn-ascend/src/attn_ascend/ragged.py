"""ascend without a cache: encoders, vision towers (ascend_attn), MLA's heads before absorption."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attn_core import (
    AttentionLayer,
    BackendConfig,
    Output,
    VisionBackend,
    refuse_call,
    refuse_window,
)
from torch import Tensor

from attn_ascend import merge
from attn_ascend.calls import PACKED_DIMS, Call, calls_of
from attn_ascend.fused import Fused


class Ragged:
    """Ragged requests, whose lengths the operator takes on the host.

    They are read back and planned once for all layers that pass the same tensors of lengths;
    tensors of inference mode keep no count of their changes and are read each time.
    """

    def __init__(self, attend: Fused) -> None:
        merge.register()  # chunks of a prefix are merged by their log-sum-exp
        self._attend = attend
        self._planned: tuple[Tensor, Tensor, tuple[object, ...], Sequence[Call]] | None = None

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
        packs = q.dtype == torch.bfloat16 and (q.shape[-1], v.shape[-1]) in PACKED_DIMS
        calls = self._calls(cu_seqlens_q, cu_seqlens_k, packs, causal)
        return self._attend(q, k, v, layer, calls, causal=causal, out=out, return_lse=return_lse)

    def _calls(
        self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, packs: bool, causal: bool
    ) -> Sequence[Call]:
        """Plan requests by their cumulative lengths, int32 [B + 1]."""
        if cu_seqlens_q.is_inference() or cu_seqlens_k.is_inference():
            return self._plan(cu_seqlens_q, cu_seqlens_k, packs, causal)
        state = (cu_seqlens_q._version, cu_seqlens_k._version, packs, causal)
        last = self._planned
        if last and last[0] is cu_seqlens_q and last[1] is cu_seqlens_k and last[2] == state:
            return last[3]
        calls = self._plan(cu_seqlens_q, cu_seqlens_k, packs, causal)
        self._planned = cu_seqlens_q, cu_seqlens_k, state, calls
        return calls

    def _plan(
        self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, packs: bool, causal: bool
    ) -> Sequence[Call]:
        query_lens, key_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        return calls_of(query_lens, key_lens, packs=packs, paged=False, causal=causal)


class AscendVision(VisionBackend):
    """Attention of a vision tower, which has no cache and no plan."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._ragged = Ragged(Fused())

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
