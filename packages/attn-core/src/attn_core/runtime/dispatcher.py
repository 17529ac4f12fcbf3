"""Route each forward pass to the backend of its mode, after writing new K/V to the cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from torch import Tensor

from attn_core.cache.pool import CachePool
from attn_core.cache.state_pool import StatePool
from attn_core.errors import AttnError, UnsupportedError, UsageError
from attn_core.ops.kv import write_kv
from attn_core.plugins.registry import Registry
from attn_core.runtime.adaptive import Pickers, Planned, shadowed
from attn_core.runtime.backend import AttentionBackend, Metadata, Output
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.contract_checks import (
    refuse_call,
    refuse_capture,
    refuse_drafts,
    refuse_mode,
    refuse_output,
)
from attn_core.runtime.kernel_tensors import empty_attention
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.linear import LinearLayer
from attn_core.runtime.linear_routes import HybridMetadata, LinearRoutes
from attn_core.runtime.operands import check_pass, check_ragged, fillable, readable, returned
from attn_core.runtime.routes import (
    MISSING,
    ROLE_OF_MODE,
    Route,
    ShadowRun,
    captured_backends,
    create_linear_routes,
    create_routes,
    distinct,
    refuse_routes,
)
from attn_core.runtime.run_errors import backend_errors, run_error
from attn_core.runtime.sparse import check_topk, select_keys
from attn_core.selection.result import Selection
from attn_core.spec.kinds import Role


class HybridDispatcher:
    """Routes the passes of one model to its backends over one KV cache.

    routes: role → backend; "prefill" and "decode" are required. The selection has decided which
    backend verifies and drafts.
    caches: a KVPool or an engine's own pool. A pool of the same form may replace it between passes.
    linear: the backends and the pool of linear layers, if the model has any.
    pickers: pick the backend of each pass, of the roles that have several over this cache.
    shadow: compares a second backend on a sample of the passes (attn_core.Shadow).
    Raises UnsupportedError if a backend's row does not support a field of its config's layers or
    the form of their scales. Any exception other than an AttnError that a backend raises is
    re-raised as BackendRunError, with the original as its cause. Unless `restart` is True, cache
    and dispatcher can run the next pass; with linear layers, the requests of the failed one start
    over, unless they write other slots than they read.
    """

    def __init__(
        self, routes: Mapping[Role, AttentionBackend], caches: CachePool,
        linear: LinearRoutes | None = None, pickers: Pickers | None = None,
        shadow: ShadowRun | None = None,
    ) -> None:  # fmt: skip
        self.routes, self.shadow = dict(routes), shadow
        self.caches, self.linear, self.pickers = caches, linear, pickers or Pickers({})
        self._by_mode: dict[ForwardMode, Route] = {}
        self._ragged: set[tuple[Role, int, bool]] = set()  # as Route.checked
        refuse_routes(self._every(), caches)
        if shadow is not None:
            shadow.attach([b for role, b in self._every() if role != "encode"], caches.layout)

    @classmethod
    def from_selection(
        cls,
        selection: Selection,
        registry: Registry,
        layers: Iterable[AttentionLayer],
        caches: CachePool,
        *,
        vision_layers: Iterable[AttentionLayer] = (),
        linear_layers: Iterable[LinearLayer] = (),
        states: StatePool | None = None,
        max_bs: int = 0,
        max_num_tokens: int = 0,
        max_seq_len: int = 0,
        adaptive: bool = False,
        shadow: ShadowRun | None = None,
    ) -> HybridDispatcher:
        """Create the selected backends; roles with the same backend and row share one instance.

        adaptive: take in each pass the one of the selection's backends that was measured fastest.
        dtype, speculation and determinism come from the selection; limits are BackendConfig's.
        Linear layers run over `states`; without it, the model runs its own. Raises UsageError for a
        pool of another page size, dtype or layout, and all that create_backend and LinearRoutes do.
        """
        limits = {"max_bs": max_bs, "max_num_tokens": max_num_tokens, "max_seq_len": max_seq_len}
        created = create_routes(
            selection, registry, caches, tuple(layers), tuple(vision_layers),
            adaptive=adaptive, **limits,
        )  # fmt: skip
        routes, linear = {role: backends[0] for role, backends in created.items()}, None
        if states is not None:
            own = create_linear_routes(selection, registry, states, tuple(linear_layers), **limits)
            linear = LinearRoutes(own, states)
        return cls(routes, caches, linear, Pickers.of(selection, created), shadow)

    def backend(self, role: Role) -> AttentionBackend:
        """Return the backend of a role. Raises UnsupportedError if the selection has none."""
        if role not in self.routes:
            raise UnsupportedError(f"no backend for {role}: selected {MISSING[role]}")
        return self.routes[role]

    def _every(self) -> list[tuple[Role, AttentionBackend]]:
        return [*self.routes.items(), *self.pickers.items()]

    def _of(self, batch: ForwardBatch) -> AttentionBackend:
        return self.backend(ROLE_OF_MODE[batch.forward_mode])

    def _route(self, mode: ForwardMode) -> Route:
        backend = self.backend(ROLE_OF_MODE[mode])
        refuse_mode(backend.config, mode)
        route = Route(backend, backend.forward, not backend.config.row.fused_kv_write)
        self._by_mode[mode] = route
        return route

    def _planned(self, batch: ForwardBatch, route: Route | None, method: str) -> Metadata:
        backend = self._of(batch) if route is None else route.backend
        refuse_drafts(backend.config, batch)
        with backend_errors(backend.config, method, batch):
            metadata = getattr(backend, method)(batch)
        return metadata if route is None else Planned(route, metadata)

    def init_forward_metadata(self, batch: ForwardBatch) -> Metadata:
        """Plan this pass with its backends, once, before its first layer; None if idle.

        Raises UnsupportedError if the backend's row cannot verify the drafts.
        """
        if batch.forward_mode is ForwardMode.IDLE:
            return None
        metadata = self._planned(batch, self.pickers.pick(batch), "init_forward_metadata")
        if self.shadow is not None and self._of(batch).config.row.absorbed:
            mode = batch.forward_mode
            own = self._by_mode.get(mode) or self._route(mode)
            metadata = shadowed(self.shadow, own, batch, metadata)
        return metadata if not self.linear else HybridMetadata(metadata, self.linear.plan(batch))

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer,
        batch: ForwardBatch, metadata: Metadata, *,
        out: Tensor | None = None, return_lse: bool = False, topk_indices: Tensor | None = None,
    ) -> Output:  # fmt: skip
        """Write new K/V into the cache and attend; called once per layer.

        q [T, Hq, D], or [T, 3 or 5, Hq, D] for dual chunk attention; k [N, Hkv, D], v [N, Hkv, Dv]
        are written to the N slots of the layer's view. k None writes nothing. If the view has no
        slots, the engine has already written them. Any strides are accepted. Returns [T, Hq, Dv],
        with return_lse also the LSE, natural log, float32 [T, Hq]; IDLE returns empty tensors.
        Raises UnsupportedError, in a backward pass too; BatchError for a missing view and for
        shapes that do not match the pass; BackendError if the backend's first output for a layer
        violates the contract. A layer with index_topk needs topk_indices in passes of more keys.
        """
        mode = batch.forward_mode
        if mode is ForwardMode.IDLE:
            return empty_attention(q, layer, out, return_lse)
        if type(metadata) is HybridMetadata:
            metadata = metadata.softmax
        if type(metadata) is Planned:
            route, metadata = metadata
        else:
            route = self._by_mode.get(mode) or self._route(mode)
        config = route.backend.config
        if return_lse or topk_indices is not None:
            refuse_call(config, return_lse=return_lse, sparse=topk_indices is not None)
        if layer.index_topk is not None:
            check_topk(topk_indices, layer, batch)
        layer_id = layer.layer_id
        cache = self.caches.layer(layer_id)
        check_pass(q, k, v, layer, batch, out)
        q, dense = readable(q), fillable(out)
        if k is not None:
            k, v = readable(k), None if v is None else readable(v)
            slots = batch.views[layer.view].out_cache_loc if route.writes else None
            if slots is not None:
                write_kv(cache, k, v, slots)
        try:
            result = route.run(
                q, k, v, layer, cache, batch, metadata,
                out=dense, return_lse=return_lse, topk_indices=topk_indices,
            )  # fmt: skip
        except AttnError:
            raise
        except Exception as error:  # a plugin's code: keep its error, name its owner
            raise run_error(config, "forward", error, batch, layer) from error
        if (layer_id, return_lse) not in route.checked:
            refuse_output(config, result, q, layer, dense, return_lse)
            route.checked.add((layer_id, return_lse))
        plain = out is dense and not (q.requires_grad or (k is not None and k.requires_grad))
        return result if plain else returned(result, out, dense, q, *(() if k is None else (k,)))

    def index_topk(
        self, q_index: Tensor, k_index: Tensor | None, weights: Tensor, layer: AttentionLayer,
        batch: ForwardBatch, metadata: Metadata,
    ) -> Tensor | None:  # fmt: skip
        """Write index keys [T, Di] and select, as AttentionBackend does; None selects all keys."""
        if batch.forward_mode is ForwardMode.IDLE:
            return None
        cache = self.caches.layer(layer.layer_id)
        plan = metadata.softmax if type(metadata) is HybridMetadata else metadata
        return select_keys(self._of(batch), q_index, k_index, weights, layer, cache, batch, plan)

    def forward_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer,
        cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int, *,
        causal: bool, out: Tensor | None = None, return_lse: bool = False,
        role: Literal["prefill", "encode"] = "prefill",
    ) -> Output:  # fmt: skip
        """Attend without a cache, as AttentionBackend.forward_ragged; vision uses role "encode"."""
        backend = self.backend(role)
        refuse_call(backend.config, return_lse=return_lse)
        lengths = (cu_seqlens_q, cu_seqlens_k, max_q, max_k)
        check_ragged(q, k, v, layer, *lengths, out)
        q, k, v, dense = readable(q), readable(k), readable(v), fillable(out)
        with backend_errors(backend.config, "forward_ragged", layer=layer):
            result = backend.forward_ragged(
                q, k, v, layer, *lengths, causal=causal, out=dense, return_lse=return_lse
            )
        if (role, layer.layer_id, return_lse) not in self._ragged:
            refuse_output(backend.config, result, q, layer, dense, return_lse)
            self._ragged.add((role, layer.layer_id, return_lse))
        return returned(result, out, dense, q, k, v)

    def forward_linear(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        batch: ForwardBatch, metadata: Metadata, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run a linear layer over the states, as LinearAttentionBackend; called once per layer.

        The decode rows in front of a mixed pass run on the decode backend. Returns [T, Hv, V], and
        raises as `forward` does.
        """
        if batch.forward_mode is ForwardMode.IDLE:
            return q.new_empty(0, layer.num_v_heads, layer.head_v_dim) if out is None else out
        return self._linear().forward(q, k, v, g, beta, layer, batch, metadata.linear, out)

    def commit(self, batch: ForwardBatch, metadata: Metadata, accepted: Tensor) -> None:
        """Take in a verified pass's drafts up to the last accepted one [B], -1 = none; once."""
        self._linear().commit(batch, metadata.linear, accepted)

    def _linear(self) -> LinearRoutes:
        if self.linear is None:
            raise UsageError("no linear layers: the dispatcher was created without their states")
        return self.linear

    @property
    def captured(self) -> tuple[AttentionBackend, ...]:
        """The backends captured in CUDA graphs; none if the decode backend's row has no graphs."""
        return captured_backends(self._every())

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create the static buffers of the captured backends; called once."""
        linear = () if self.linear is None else self.linear.captured
        for backend in (*self.captured, *linear):
            with backend_errors(backend.config, "init_cuda_graph_state"):
                backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> Metadata:
        """Plan a pass into static buffers; None if idle.

        Raises UnsupportedError if the backend of this pass is not captured, or not in this mode.
        """
        if batch.forward_mode is ForwardMode.IDLE:
            return None
        route = self.pickers.captured(batch)
        backend = self._of(batch) if route is None else route.backend
        refuse_capture(backend.config, batch, self.captured)
        metadata = self._planned(batch, route, "init_forward_metadata_capture_cuda_graph")
        return metadata if not self.linear else HybridMetadata(metadata, self.linear.capture(batch))

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Metadata
    ) -> None:
        """Refill the static buffers before a replay."""
        if batch.forward_mode is not ForwardMode.IDLE:
            backend = self._of(batch)
            if type(metadata) is HybridMetadata:
                self._linear().replay(batch, metadata.linear)
                metadata = metadata.softmax
            if type(metadata) is Planned:
                backend, metadata = metadata.route.backend, metadata.metadata
            with backend_errors(backend.config, "init_forward_metadata_replay_cuda_graph", batch):
                backend.init_forward_metadata_replay_cuda_graph(batch, metadata)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the KV length of padded requests, as the decode backends define it."""
        every = distinct(b for role, b in self._every() if role == "decode")
        return max(b.get_cuda_graph_seq_len_fill_value() for b in every)
