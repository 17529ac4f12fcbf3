"""SGLang's hybrid models: linear layers (GDN, KDA) on attn-core, over SGLang's pool of states."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
    MambaAttnBackendBase,
)
from torch import Tensor

from attn_core.errors import UnsupportedError
from attn_core.integrations.sglang.backend import AttnCoreBackend
from attn_core.integrations.sglang.linear_layers import ShortConvolution, raw_gates
from attn_core.integrations.sglang.linear_passes import checkpoint_slots, query_lens
from attn_core.integrations.sglang.linear_states import DraftTrees, commit, states_of
from attn_core.integrations.sglang.passes import MODES
from attn_core.integrations.sglang.pool import KV_DTYPE
from attn_core.integrations.sglang.selection import choose, publish
from attn_core.integrations.sglang.server import (
    captures,
    check_linear_arguments,
    draft_shape,
    speculation,
)
from attn_core.plugins.registry import Registry
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.linear import LinearLayer
from attn_core.runtime.linear_routes import LinearPart, LinearRoutes
from attn_core.runtime.routes import create_linear_routes
from attn_core.selection.result import Selection
from attn_core.spec.requirements import Requirements
from attn_core.tools.env_vars import variable

logger = logging.getLogger(__name__)
_Planned = tuple[ForwardBatch, tuple[LinearPart, ...]]


def hybrid_backend(runner: Any, full: Any, layers: Mapping[int, LinearLayer]) -> HybridBackend:
    """Put linear layers beside the backend of a runner's softmax layers."""
    config = mambaish_config(runner.model_config)
    return HybridBackend(full, LinearBackend(runner, layers, full), config.full_attention_layer_ids)


class HybridBackend(HybridLinearAttnBackend):  # type: ignore[misc]  # SGLang ships no types
    """SGLang's pair of softmax and linear attention, whose linear half is a LinearBackend."""

    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None,
        mamba_steps_to_track: Tensor | None,
        model: Any,
    ) -> None:
        """Commit the accepted drafts of the verified pass, and write its checkpoints."""
        self.linear_attn_backend.commit(
            last_correct_step_indices, mamba_track_indices, mamba_steps_to_track
        )

    # SGLang's own pair does not pass these on to the backend that verifies
    def get_verify_buffers_to_fill_after_draft(self) -> list[Tensor | None]:
        """Return the tree mask that attn-core's softmax backend keeps for SGLang to fill."""
        if not isinstance(self.full_attn_backend, AttnCoreBackend):
            return [None, None]
        return self.full_attn_backend.get_verify_buffers_to_fill_after_draft()

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Let the softmax backend plan again with the mask."""
        full = self.full_attn_backend
        full.update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)


class LinearBackend(MambaAttnBackendBase):  # type: ignore[misc]  # SGLang ships no types
    """Serves the linear layers of one model runner.

    SGLang keeps the slots, the short convolution and their metadata, which its base class makes.

    runner: SGLang's ModelRunner with its model loaded and its pools created.
    layers: its linear layers by their number, all of one kind.
    full: the backend of its softmax layers; attn-core's own has selected for both.
    Raises UnsupportedError for what is not served and NoBackendError where nothing fits.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, layers: Mapping[int, LinearLayer], full: Any) -> None:
        super().__init__(runner)
        args = runner.server_args
        check_linear_arguments(args)
        self.layers = dict(layers)
        self._layer = next(iter(layers.values()))  # all are alike
        self._dtype = runner.dtype
        self.convolution = ShortConvolution(self._layer.kind)
        pool = runner.req_to_token_pool.mamba_pool
        self.conv_states_shape = self.convolution.states(pool.mamba_cache.conv[0]).shape
        selection, registry = _selection(runner, self._layer, full)
        self.topk, self.drafts = draft_shape(args)
        states = states_of(runner.req_to_token_pool, self._layer, self.drafts)
        routes = create_linear_routes(
            selection, registry, states, tuple(self.layers.values()), max_bs=self._max_bs
        )
        self.routes = LinearRoutes(routes, states)
        if args.enable_mamba_extra_buffer():  # keeps states inside prompts
            self._check_checkpoints()
        self._rows = torch.arange(self._max_bs, dtype=torch.int32, device=self.device)
        self._trees = DraftTrees(self._max_bs, self.drafts, self.device)
        self._checkpoints: Tensor | None = None
        self._static_out: Tensor | None = None
        self._captured: dict[tuple[ForwardMode, int], _Planned] = {}
        self._pass: _Planned | None = None
        self._out: Tensor | None = None  # of the pass, where it is captured
        self._is_padded = False  # of the pass: some requests are padding

    @property
    def _max_bs(self) -> int:
        return int(self.req_to_token_pool.req_to_token.shape[0])

    def _check_checkpoints(self) -> None:
        """Raise UnsupportedError where SGLang's prefix cache needs states that no prefill keeps."""
        config = self.routes.routes["linear_prefill"].config
        if not config.row.checkpoints:
            raise UnsupportedError(
                f"{config.name} writes no checkpoints of linear layers, which SGLang's prefix "
                f"cache needs; name another one by {variable('--linear-attn-prefill-backend')}, or "
                "choose --mamba-radix-cache-strategy no_buffer"
            )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a pass that no graph replays."""
        self._checkpoints = self._out = self._pass = None
        super().init_forward_metadata(forward_batch)
        metadata = self.forward_metadata
        if metadata.has_mamba_track_mask:
            rows = forward_batch.mamba_track_mask.nonzero(as_tuple=True)[0]
            metadata.mamba_track_mask_indices = rows
            metadata.conv_states_mask_indices = forward_batch.mamba_track_indices[rows]
        mode = MODES[forward_batch.forward_mode.name]
        if mode is ForwardMode.IDLE or not forward_batch.batch_size:
            return
        known = getattr(forward_batch, "_original_batch_size", None)
        self._is_padded = known is not None and known < forward_batch.batch_size
        batch = self._batch(forward_batch, mode, query_lens(forward_batch, mode, self.drafts))
        self._pass = (batch, self.routes.plan(batch))

    def _batch(self, forward_batch: Any, mode: ForwardMode, lens: tuple[int, ...]) -> ForwardBatch:
        """Return the batch of a pass over what SGLang's metadata points at."""
        metadata, tokens, spec = self.forward_metadata, sum(lens), None
        if mode is ForwardMode.TARGET_VERIFY:
            tree = self._trees.fill(metadata, len(lens))
            topk = 1 if tree is None else self.topk
            spec = SpecInfo(topk=topk, num_draft_tokens=self.drafts, tree_mask=tree)
        return ForwardBatch(
            forward_mode=mode,
            cu_seqlens_q=metadata.query_start_loc,
            positions=forward_batch.positions[:tokens].long(),
            max_q_len=max(lens),
            spec=spec,
            state_slots=metadata.mamba_cache_indices,
            query_lens_host=lens,
            checkpoint_slots=self._checkpoints,
        )

    def _init_track_ssm_indices(
        self, mamba_cache_indices: Tensor, forward_batch: Any
    ) -> tuple[None, None, None, None]:
        """Note where a pass keeps states for the prefix cache; SGLang copies them afterwards."""
        lens = query_lens(forward_batch, ForwardMode.EXTEND, self.drafts)
        self._checkpoints = checkpoint_slots(forward_batch, lens).to(self.device)
        return None, None, None, None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create the buffers of captured passes."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        heads, dim = self._layer.num_v_heads, self._layer.head_v_dim
        # one for all layers, each of which is read before the next; padded rows keep finite numbers
        self._static_out = torch.zeros(
            max_num_tokens, heads, dim, dtype=self._dtype, device=self.device
        )
        for backend in self.routes.captured:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan a pass to be captured, or refill what the captured one points at."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        mode, size = MODES[forward_batch.forward_mode.name], forward_batch.batch_size
        if mode is ForwardMode.IDLE:
            self._pass = None
            return
        assert self._static_out is not None  # SGLang calls init_cuda_graph_state first
        if in_capture:
            batch = self._batch(forward_batch, mode, query_lens(forward_batch, mode, self.drafts))
            self._captured[mode, size] = (batch, self.routes.capture(batch))
        else:
            batch, parts = self._captured[mode, size]
            if mode is ForwardMode.TARGET_VERIFY:
                self._trees.fill(self.forward_metadata, size)
            self.routes.replay(batch, parts)
        self._pass = self._captured[mode, size]
        self._out = self._static_out[: batch.num_tokens]

    def forward_decode(
        self, layer: Any, forward_batch: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, **_: Any
    ) -> Tensor:
        """Convolve and run a token of each request: mixed_qkv [B, channels] → [1, B, Hv, V]."""
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        slots = self.forward_metadata.mamba_cache_indices
        x = self.convolution.decode(mixed_qkv, layer, cache, slots)
        out = self._attend(x, layer, a, b)
        self._track_mamba_state_decode(forward_batch, cache.conv[0], cache.temporal, slots)
        return out

    def forward_extend(
        self, layer: Any, forward_batch: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, **_: Any
    ) -> Tensor:
        """Convolve and run new tokens or drafts: mixed_qkv [T, channels] → [1, T, Hv, V]."""
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        metadata = self.forward_metadata
        if forward_batch.forward_mode.is_target_verify():
            x = self.convolution.verify(mixed_qkv, layer, cache, self.drafts, metadata, self._rows)
        else:
            x = self.convolution.extend(mixed_qkv, layer, cache, forward_batch, metadata)
        return self._attend(x, layer, a, b)

    def _attend(self, x: Tensor, module: Any, a: Tensor, b: Tensor) -> Tensor:
        """Run a layer over q, k and v side by side, x [T, channels] → [1, T, Hv, V]."""
        layer, tokens = self.layers[module.layer_id], x.shape[0]
        out, shape = self._out, (tokens, layer.num_v_heads, layer.head_v_dim)
        if self._pass is None:
            return x.new_zeros(1, *shape)
        batch, parts = self._pass
        real = batch.num_tokens
        if out is None:  # rows of padding stay zeros
            out = x.new_zeros(shape) if self._is_padded or real < tokens else x.new_empty(shape)
        q, k, v = torch.split(x[:real], [module.q_dim, module.k_dim, module.v_dim], -1)
        f, b = raw_gates(layer, a, b, x.dtype, decodes=batch.forward_mode is ForwardMode.DECODE)
        self.routes.forward(
            q.view(real, layer.num_k_heads, layer.head_k_dim),
            k.view(real, layer.num_k_heads, layer.head_k_dim),
            v.view(real, layer.num_v_heads, layer.head_v_dim),
            f[:real],
            b[:real],
            layer,
            batch,
            parts,
            out[:real],
        )
        return out[None]

    def commit(
        self, accepted: Tensor, checkpoint_slots: Tensor | None, checkpoints: Tensor | None
    ) -> None:
        """Bring the states of the verified pass up to its accepted drafts.

        accepted: int [B], the last accepted draft of each request.
        checkpoint_slots, checkpoints: int [B], the slots that also take a state for the prefix
        cache, and the last draft that it takes in; -1 takes none. None: no request does.
        """
        assert self._pass is not None
        batch, parts = self._pass
        if self._out is not None:  # a graph leaves no plan of this pass
            parts = self.routes.plan(batch)
        commit(
            self.routes,
            batch,
            parts,
            self.req_to_token_pool.get_speculative_mamba2_params_all_layers(),
            accepted,
            checkpoint_slots,
            checkpoints,
        )


def _selection(runner: Any, layer: LinearLayer, full: Any) -> tuple[Selection, Registry]:
    """Return the selection that attn-core's softmax backend has made, or one of linear layers."""
    if isinstance(full, AttnCoreBackend):
        return full.selection, full.registry
    args, device = runner.server_args, torch.device(runner.device)
    topk, _drafts = draft_shape(args)
    requirements = Requirements(
        layers=(layer.requirements,),
        dtype=KV_DTYPE[runner.dtype],
        speculation=speculation(args, topk),
        deterministic=bool(args.enable_deterministic_inference),
        graphs=captures(args, device.type),
    )
    selection, registry = choose(requirements, device)
    logger.info("attn_core serves linear attention\n%s", selection.explain())
    publish(selection, args)
    return selection, registry
