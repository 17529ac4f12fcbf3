"""Vision towers by cuDNN's attention, through FlashInfer."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

from attn_core import (
    AttentionLayer,
    BackendConfig,
    Output,
    UnsupportedError,
    VisionBackend,
    contiguous16,
    contiguous_out,
    copy_to_out,
    refuse_call,
    workspace,
)
from torch import Tensor

from attn_nvidia.common.jit_log import building
from attn_nvidia.common.workspace_bytes import RECOMMENDED
from attn_nvidia.flashinfer.ragged import UnchangedTensors

_ROUND = 64  # tokens: cuDNN builds a graph per longest sequence, so few different ones are asked


class Cudnn(VisionBackend):
    """Attention without a cache; the requests are named by offsets, nothing is planned.

    FlashInfer keeps a graph per shape, and takes it for other strides, scales and dtypes of offsets
    too. So all calls have the same: dense tensors, 1 / sqrt(D), and int32.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        library: Any = importlib.import_module("flashinfer.cudnn")
        self._recent, self._strides = UnchangedTensors(), tuple[int, ...]()
        self._layout: Mapping[str, Tensor] = {}
        self._attend: Any = library.cudnn_batch_prefill_with_kv_cache

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
        """Attend without a cache; no length is read on the host.

        Another scale than 1 / sqrt(D) is multiplied into q, which is rounded once more.
        """
        refuse_call(self.config, return_lse=return_lse)
        scale = q.shape[2] ** -0.5
        if not math.isclose(layer.scale, scale, rel_tol=1e-6):
            q = (q * (layer.scale / scale)).to(q.dtype)
        q, k, v = dense(q), dense(k), dense(v)
        result = contiguous_out(q, layer.v_head_dim, out)
        if q.shape[0]:
            filled = dense(result)
            places = self._places(cu_seqlens_q, cu_seqlens_k, (q, k, v, filled))
            with building(f"{self.config.name}, cuDNN attention"):
                self._attend(
                    q,
                    k,
                    v,
                    scale,
                    workspace(q.device, "cudnn", RECOMMENDED),
                    max_token_per_sequence=-(-max_q // _ROUND) * _ROUND,
                    max_sequence_kv=-(-max_k // _ROUND) * _ROUND,
                    causal=causal,
                    return_lse=False,
                    out=filled,
                    **places,
                )
        return copy_to_out(result, out)

    def _places(
        self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tensors: tuple[Tensor, ...]
    ) -> Mapping[str, Tensor]:
        """Return the lengths [B, 1, 1, 1], and where requests begin, in elements [B + 1, 1, 1, 1].

        tensors: q, k, v and the output. The layers of a tower share what the first one got.
        """
        strides = tuple(x.stride(0) for x in tensors)
        same = self._recent.same(cu_seqlens_q, cu_seqlens_k)
        if not same or strides != self._strides:
            if any(x.numel() >= 1 << 31 for x in tensors):
                raise UnsupportedError(
                    f"{self.config.name}: tensors of {max(x.numel() for x in tensors)} numbers "
                    "(supports fewer than 2^31); pass fewer requests at once"
                )
            q, k = (x.view(-1, 1, 1, 1).int() for x in (cu_seqlens_q, cu_seqlens_k))
            self._strides = strides
            self._layout = {
                "actual_seq_lens_q": q.diff(dim=0).int(),
                "actual_seq_lens_kv": k.diff(dim=0).int(),
                "batch_offsets_q": q * strides[0],
                "batch_offsets_k": k * strides[1],
                "batch_offsets_v": k * strides[2],
                "batch_offsets_o": q * strides[3],
            }
        return self._layout


def dense(x: Tensor) -> Tensor:
    """Return x [T, H, D] at the strides of its shape, a copy where it is not contiguous.

    torch calls a tensor contiguous at any stride of a dimension of size 1.
    """
    return contiguous16(x).view(-1).view(x.shape)
