"""MLA's heads before absorption: vLLM unfolds the latents of a prefill, attn-core attends.

Chosen by mla_prefill_backend CUSTOM in vLLM's --attention-config.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from attn_core.errors import UnsupportedError
from attn_core.integrations.vllm.passes import PassBuilder
from attn_core.integrations.vllm.server import DTYPES, NAME
from attn_core.runtime.layer import AttentionLayer

_REMEDY = "leave mla_prefill_backend out of --attention-config"


class PrefillBackend(MLAPrefillBackend):
    """Attends to the new tokens of prefilled requests and to chunks of their prefix."""

    supported_dtypes: ClassVar[list[torch.dtype]] = DTYPES
    passes: PassBuilder | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._layer = AttentionLayer(
            layer_id=0,
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            scale=self.scale,
        )

    @staticmethod
    def get_name() -> str:
        return NAME

    def serve(self, passes: PassBuilder) -> None:
        """Take the passes of a group of layers. Raises UnsupportedError without chunks."""
        row = passes.roles["prefill"].row
        if not row.chunked_prefix:
            raise UnsupportedError(
                f"{passes.roles['prefill'].backend}, which attn_core chose for prefill, does not "
                f"attend to chunks of a prefix; {_REMEDY}, or name another backend by "
                "ATTN_PREFILL_ATTENTION_BACKEND"
            )
        self.passes = passes

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Keep vLLM's metadata of the pass."""
        if self.passes is None:
            raise UnsupportedError(
                f"mla_prefill_backend {NAME} beside another --attention-backend; {_REMEDY}, or "
                f"use --attention-backend {NAME}"
            )
        super().prepare_metadata(prefill_metadata)

    def run_prefill_new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool,
        out: Tensor | None = None, output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attend causally; q, k [T, H, D], v [T, H, Dv] → [T, H, Dv], with its LSE [H, T]."""
        if output_scale is not None:
            raise UnsupportedError(f"an output quantised by prefill on attn_core; {_REMEDY}")
        metadata = self._prefill_metadata
        starts, longest = metadata.query_start_loc, metadata.max_query_len
        result: Tensor | tuple[Tensor, Tensor] = self._attend(
            q, k, v, starts, longest, True, return_softmax_lse, out
        )
        return result

    def run_prefill_context_chunk(
        self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend to every token of a chunk of the prefix; returns the output and its LSE."""
        chunks = self._prefill_metadata.chunked_context
        assert chunks is not None
        starts, longest = chunks.cu_seq_lens[chunk_idx], chunks.max_seq_lens[chunk_idx]
        out, lse = self._attend(q, k, v, starts, longest, False, True)
        return out, lse

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_starts: Tensor, longest: int, causal: bool,
        lse: bool, out: Tensor | None = None,
    ) -> Any:  # fmt: skip
        metadata = self._prefill_metadata
        assert self.passes is not None
        result = self.passes.dispatcher.forward_ragged(
            q, k, v, self._layer, metadata.query_start_loc, key_starts, metadata.max_query_len,
            longest, causal=causal, out=out, return_lse=lse,
        )  # fmt: skip
        # vLLM merges chunks by an LSE whose heads come first
        return (result[0], result[1].T.contiguous()) if isinstance(result, tuple) else result
