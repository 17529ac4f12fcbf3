"""The AttentionBackend that vLLM calls: a HybridDispatcher for each group of layers."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from attn_core.errors import UnsupportedError
from attn_core.integrations.ahead import compile_ahead
from attn_core.integrations.choice import choose, explained
from attn_core.integrations.metrics import export
from attn_core.integrations.ranks import united
from attn_core.integrations.vllm.layers import CachedPages, EnginePool, to_layer
from attn_core.integrations.vllm.passes import Pass, PassBuilder, check_pass
from attn_core.integrations.vllm.server import (
    CACHE_DTYPES,
    DTYPES,
    KV_DTYPE,
    NAME,
    captures,
    check_config,
    ranks,
    speculation,
    stays_finite,
    stored_dtype,
)
from attn_core.ops.kv import write_kv
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.kinds import Kind
from attn_core.spec.requirements import LayerRequirements, Requirements

logger = logging.getLogger("vllm.attn_core")  # vLLM shows what is below "vllm"


class AttnCoreBackend(AttentionBackend):
    """Says what vLLM must know before a model is loaded; what a model needs is selected then.

    A block holds keys and values apart: [2, blocks, block_size, Hkv, D].
    """

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = DTYPES
    supported_kv_cache_dtypes: ClassVar[list[Any]] = CACHE_DTYPES

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[AttnCoreImpl]:
        return AttnCoreImpl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


def create_passes(
    config: Any,
    kv_cache_spec: Any,
    modules: dict[int, Any],
    layers: tuple[AttentionLayer, ...],
    kind: Kind,
    device: torch.device,
) -> PassBuilder:
    """Select for layers that share a block table and say it in the log.

    config: vLLM's VllmConfig. modules: vLLM's layers, by layer id. Raises UnsupportedError for what
    is not served and NoBackendError where nothing fits, before the engine takes a request.
    """
    check_config(config, kv_cache_spec)
    from vllm import envs

    dtype, scheduler = config.model_config.dtype, config.scheduler_config
    stored = stored_dtype(modules[0].kv_cache_dtype, dtype)
    chain = speculation(config)
    requirements = Requirements(
        layers=LayerRequirements.counted(layers, kind),
        dtype=KV_DTYPE[dtype],
        kv_cache_dtype=stored,
        page_size=kv_cache_spec.block_size,
        speculation=chain,
        deterministic=bool(envs.VLLM_BATCH_INVARIANT),
        finite_padding=stays_finite(config, stored),
        graphs=captures(config),
    )
    selection, registry = choose(requirements, device, ranks=ranks())
    served = f"{len(layers)} layers from {modules[0].layer_name} on"
    logger.info("attn_core serves %s\n%s", served, explained(selection))
    pool = EnginePool(modules, kv_cache_spec.block_size, stored, device)
    drafts = 0 if chain is None else chain.num_draft_tokens
    tokens = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * max(drafts, 1))

    def create() -> HybridDispatcher:
        group = ranks()
        dispatcher = HybridDispatcher.from_selection(
            selection,
            registry,
            layers,
            pool,
            max_bs=scheduler.max_num_seqs,
            max_seq_len=config.model_config.max_model_len,
            adaptive=True,
            agree=partial(united, group=group),
        )
        if group is None or torch.distributed.get_rank(group) == 0:
            export(dispatcher, served)
        # a CPU's kernels are compiled; MLA's prefill is vLLM's, and graphs run all that decodes
        if kind == "mha" and device.type != "cpu":
            compile_ahead(dispatcher, scheduler.max_num_seqs, logger)
        return dispatcher

    return PassBuilder(
        create,
        selection,
        device=device,
        page_size=kv_cache_spec.block_size,
        drafts=drafts,
        max_bs=scheduler.max_num_seqs,
        max_num_tokens=tokens,
    )


class Builder(AttentionMetadataBuilder[Pass]):
    """Plans the passes of the layers of one KV-cache group."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        context = vllm_config.compilation_config.static_forward_context
        modules = {i: context[name] for i, name in enumerate(layer_names)}
        self.layers = {m.layer_name: to_layer(i, m) for i, m in modules.items()}
        layers = tuple(self.layers.values())
        self.passes = create_passes(vllm_config, kv_cache_spec, modules, layers, "mha", device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Pass:
        """Plan a pass: decode rows, which vLLM puts first, and prefill rows run apart."""
        common = common_attn_metadata
        check_pass(common, common_prefix_len)
        first, prefills, tokens, _rest = split_decodes_and_prefills(
            common, self.reorder_batch_threshold, require_uniform=True
        )
        if not self.passes.is_even(common, first, tokens):
            first, prefills, tokens = 0, common.num_reqs, 0
        parts = []
        if first:
            parts.append(self.passes.even(common, first, tokens))
        if prefills:
            parts.append(self.passes.ragged(common, slice(first, common.num_reqs)))
        return Pass(self.passes.dispatcher, self.layers, tuple(parts))

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Pass:
        """Plan a pass that a graph captures: decode or verification of every request."""
        common = common_attn_metadata
        check_pass(common)
        part = self.passes.capture(common)
        return Pass(self.passes.dispatcher, self.layers, (part,))


class AttnCoreImpl(AttentionImpl[Pass]):
    """One layer of vLLM: writes its keys and values, and attends."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise UnsupportedError(
                "ALiBi slopes on attn_core; use another --attention-backend for this model"
            )
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(
                f"attention of type {attn_type} on attn_core (serves decoder); use another "
                "--attention-backend for this model"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._pages: CachedPages | None = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values [N, Hkv, D] into slots [M <= N]; a slot of -1 writes nothing."""
        if self._pages is None:
            self._pages = CachedPages(stored_dtype(self.kv_cache_dtype, layer.dtype))
        slots = slot_mapping.flatten()
        new = len(slots)
        write_kv(self._pages.of(layer, kv_cache), key[:new], value[:new], slots)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Pass | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend; query [T, Hq, D], output [T, Hq, Dv] is filled but for padded tokens."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError(
                f"{layer.layer_name}: an output quantised by attention on attn_core; leave "
                "fuse_attn_quant out of vLLM's pass_config"
            )
        if attn_metadata is None:  # a run that measures memory
            return output.fill_(0)
        if self.kv_sharing_target_layer_name is not None:  # the cache has another layer's
            key = value = None
        own = attn_metadata.layers[layer.layer_name]
        for part in attn_metadata.parts:
            tokens, batch, plan = part
            k, v = part.new_keys(key, value)
            attn_metadata.dispatcher.forward(
                query[tokens], k, v, own, batch, plan, out=output[tokens]
            )
        return output
