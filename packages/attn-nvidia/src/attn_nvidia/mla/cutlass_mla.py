"""cutlass_mla: CUTLASS's latent decode on sm100; FlashInfer's prefill and verification."""

from __future__ import annotations

import importlib
from typing import Any

from attn_core import (
    DECODE_MODES,
    AttentionLayer,
    BackendConfig,
    LayerGroup,
    Output,
    align16,
    copy_to_out,
    workspace,
)
from torch import Tensor

from attn_nvidia.flashinfer.mla import LATENT, ROPE
from attn_nvidia.mla.decode import DecodePlan, MlaDecode


class CutlassMLA(MlaDecode):
    """One query a request, 128 heads, pages of 128.

    The kernel is sglang-kernel's: FlashInfer's own wrapper of it copies the whole cache in every
    call and has the scale of heads of 192 built in (flashinfer 0.6.14).
    """

    modes = DECODE_MODES
    page = 128
    dense = True  # it takes the strides of the queries alone

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._library: Any = importlib.import_module("sgl_kernel.attention")

    def plan(self, group: LayerGroup, table: Tensor, seq_lens: Tensor, queries: int) -> Tensor:
        """Return the scratch that this batch needs."""
        batch, width = table.shape
        nbytes = self._library.cutlass_mla_get_workspace_size(width * self.page, batch)
        return workspace(table.device, "cutlass_mla", max(nbytes, 1))

    def attend(
        self,
        q: Tensor,
        pages: Tensor,
        layer: AttentionLayer,
        plan: DecodePlan,
        k_scale: float | Tensor,
        out: Tensor | None,
        return_lse: bool,
    ) -> Output:
        """Call the kernel; it has no LSE, and neither has the row."""
        q_latent, q_rope = align16(q).split_with_sizes((LATENT, ROPE), -1)
        result: Tensor = self._library.cutlass_mla_decode(
            q_latent,
            q_rope,
            pages.squeeze(2),
            plan.seq_lens,
            plan.table,
            plan.extra,
            layer.scale,
        )
        return copy_to_out(result, out)
