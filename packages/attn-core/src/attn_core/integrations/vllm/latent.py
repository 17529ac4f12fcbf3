"""MLA: the AttentionBackend that vLLM calls for absorbed heads; prefill unfolds in `unfolded`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf

from attn_core.integrations.vllm.backend import create_passes
from attn_core.integrations.vllm.layers import to_latent_layer
from attn_core.integrations.vllm.passes import Part, Pass, check_pass
from attn_core.integrations.vllm.server import CACHE_DTYPES, DTYPES, NAME
from attn_core.integrations.vllm.unfolded import PrefillBackend


class LatentBackend(MLACommonBackend):
    """Says what vLLM must know of MLA; a block is [block_size, 576], the latent and the rope."""

    supported_dtypes: ClassVar[list[torch.dtype]] = DTYPES
    supported_kv_cache_dtypes: ClassVar[list[Any]] = CACHE_DTYPES

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentBuilder]:
        return LatentBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


@dataclass
class LatentDecode(MLACommonDecodeMetadata):
    """vLLM's metadata of the requests whose heads are absorbed, with attn-core's plan."""

    planned: Pass


class LatentBuilder(MLACommonMetadataBuilder[MLACommonMetadata[LatentDecode]]):
    """Plans decode and verification of MLA's layers; vLLM's own builder lays out their prefill."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.UNIFORM

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        modules = {i: context[name] for i, name in enumerate(layer_names)}
        self.layers = {m.layer_name: to_latent_layer(i, m) for i, m in modules.items()}
        layers = tuple(self.layers.values())
        self.passes = create_passes(vllm_config, kv_cache_spec, modules, layers, "mla", device)
        if isinstance(self._prefill_backend, PrefillBackend):
            self._prefill_backend.serve(self.passes)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Plan a pass as vLLM splits it: absorbed requests first."""
        check_pass(common_attn_metadata, common_prefix_len)
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        requests, tokens = metadata.num_decodes, metadata.num_decode_tokens
        if not requests:
            return metadata
        if self.passes.is_even(common_attn_metadata, requests, tokens):
            part = self.passes.even(common_attn_metadata, requests, tokens)
        else:
            part = self.passes.ragged(common_attn_metadata, slice(0, requests))
        return self._with(metadata, part)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Plan a pass that a graph captures: decode or verification of every request."""
        check_pass(common_attn_metadata)
        part = self.passes.capture(common_attn_metadata)
        return self._with(super().build(0, common_attn_metadata), part)

    def _with(self, metadata: Any, part: Part) -> Any:
        decode = metadata.decode
        metadata.decode = LatentDecode(
            block_table=decode.block_table,
            seq_lens=decode.seq_lens,
            dcp_tot_seq_lens=decode.dcp_tot_seq_lens,
            planned=Pass(self.passes.dispatcher, self.layers, (part,)),
        )
        return metadata


class LatentImpl(MLACommonImpl[MLACommonMetadata[LatentDecode]]):
    """One layer of MLA: vLLM writes its latents, folds and unfolds; attn-core attends."""

    supports_pcp = False
    supports_dcp = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attend with absorbed heads; q [T, H, 576], or its two parts, → [T, H, 512]."""
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        dispatcher, layers, [part] = attn_metadata.decode.planned
        own = layers[layer.layer_name]
        out = q.new_empty(q.shape[0], own.num_q_heads, own.v_head_dim)
        real = part.tokens
        dispatcher.forward(q[real], None, None, own, part.batch, part.plan, out=out[real])
        return out, None
