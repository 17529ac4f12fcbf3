"""Route each forward pass to the backend of its mode, after writing new K/V to the cache."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

from torch import Tensor

from attn_core.cache.pool import CachePool
from attn_core.cache.state_pool import StatePool
from attn_core.errors import AttnError, UnsupportedError
from attn_core.ops.kv import write_kv
from attn_core.plugins.registry import Registry
from attn_core.runtime.adaptive import GroupPlans, Pickers, Planned, pruned
from attn_core.runtime.backend import AttentionBackend, Metadata, Output
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.contract_checks import refuse_call, refuse_layer, refuse_output
from attn_core.runtime.kernel_tensors import empty_attention
from attn_core.runtime.known import Known
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.linear import LinearLayer
from attn_core.runtime.linear_routes import HybridMetadata, LinearRoutes
from attn_core.runtime.operands import check_pass, check_ragged, fillable, readable, returned
from attn_core.runtime.planner import Planner
from attn_core.runtime.routes import (
    ROLE_OF_MODE,
    Agree,
    ShadowRun,
    create_linear_routes,
    create_routes,
    refuse_routes,
)
from attn_core.runtime.run_errors import backend_errors, run_error
from attn_core.runtime.sparse import check_topk, select_keys
from attn_core.selection.result import Selection
from attn_core.spec.kinds import Role


class HybridDispatcher(Planner):
    """Routes the passes of one model to its backends over one KV cache.

    routes: role → backend; "prefill" and "decode" are required. The selection has decided which
    backend verifies and drafts.
    caches: a KVPool or an engine's own pool. A pool of the same form may replace it between passes.
    linear: the backends and the pool of linear layers, if the model has any.
    pickers: pick the backend of each pass, of the roles that have several over this cache.
    shadow: compares a second backend on a sample of the passes (attn_core.Shadow).
    Raises UnsupportedError if a backend's row does not support a field of its config's layers, the
    form of their scales or the pool's pages. Any exception other than an AttnError that a backend
    raises is re-raised as BackendRunError, with the original as its cause. Unless `restart` is
    True, cache and dispatcher can run the next pass; with linear layers, the requests of the failed
    one start over, unless they write other slots than they read.
    """

    def __init__(
        self, routes: Mapping[Role, AttentionBackend], caches: CachePool,
        linear: LinearRoutes | None = None, pickers: Pickers | None = None,
        shadow: ShadowRun | None = None,
    ) -> None:  # fmt: skip
        super().__init__(routes, caches, linear, pickers or Pickers({}), shadow)
        self._ragged: set[tuple[Role, int, bool]] = set()  # as Route.checked
        refuse_routes(self._every(), caches)
        if shadow is not None:
            shadow.attach([b for role, b in self._every() if role != "encode"], caches.layout)

    def __reduce_ex__(self, protocol: object) -> str:
        raise UnsupportedError(
            "a dispatcher cannot be copied or pickled: its backends keep addresses of this "
            "process's memory; copy the selection, the layers and the pool, and make another by "
            "HybridDispatcher.from_selection()"
        )

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
        agree: Agree | None = None,
        shadow: ShadowRun | None = None,
    ) -> HybridDispatcher:
        """Create the selected backends; roles with the same backend and row share one instance.

        adaptive: take in each pass the one of the selection's backends that was measured fastest.
        The caches must then be finite everywhere, as some of them may require.
        Alternatives that win no pass are not created; one that cannot be is left out, with a line
        in the log. agree: given the names of those, returns the names that no rank may take.
        dtype, speculation and determinism come from the selection; limits are BackendConfig's.
        Linear layers run over `states`; without it, the model runs its own. Raises UsageError for a
        pool of another page size, dtype or layout, and all that create_backend and LinearRoutes do.
        """
        limits = {"max_bs": max_bs, "max_num_tokens": max_num_tokens, "max_seq_len": max_seq_len}
        layers = tuple(layers)
        selection = pruned(selection) if adaptive else replace(selection, alternatives={})
        created = create_routes(
            selection, registry, caches, layers, tuple(vision_layers), agree, **limits
        )
        routes, linear = {role: backends[0] for role, backends in created.items()}, None
        if states is not None:
            own = create_linear_routes(selection, registry, states, tuple(linear_layers), **limits)
            linear = LinearRoutes(own, states)
        return cls(routes, caches, linear, Pickers.of(selection, created, layers), shadow)

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
        layer_id = layer.layer_id
        if type(metadata) is GroupPlans:
            metadata = metadata.of(layer_id)
        if type(metadata) is Planned:
            route, metadata = metadata
        else:
            route = self._by_mode.get(mode) or self._route(mode)
        config = route.backend.config
        cache = self.caches.layer(layer_id)
        # others than the absent ones are compared with those of the layer before, all at once
        tensors = [x for x in (q, k, v, out, topk_indices) if x is not None]
        key = (
            route, layer.form, return_lse, k is None, v is None, out is None, topk_indices is None
        )  # fmt: skip
        known: Known | None = batch.known.get(key)
        first = (layer_id, return_lse) not in route.checked
        trained, dense, slots = False, out, None
        if (
            first or known is None or not known.fits(*tensors)
            or (out is not None and out.data_ptr() % 16)
            or (k is not None and batch.views[layer.view].out_cache_loc is not known.slots)
        ):  # fmt: skip
            known = None
            if return_lse or topk_indices is not None:
                refuse_call(config, return_lse=return_lse, sparse=topk_indices is not None)
            if layer.index_topk is not None:
                check_topk(topk_indices, layer, batch)
            if first:  # it may be one that the config does not list
                refuse_layer(config, layer)
            check_pass(q, k, v, layer, batch, out)
            trained = any(x.requires_grad for x in tensors)
            q = readable(q)
            dense = fillable(out, None if route.backend.casts_output else q.dtype)
            if k is not None:
                k, v = readable(k), None if v is None else readable(v)
                slots = batch.views[layer.view].out_cache_loc
            used = [x for x in (q, k, v, dense, topk_indices) if x is not None]
            if not trained and all(map(operator.is_, used, tensors)):
                known = batch.known[key] = Known.of(tensors, (k, v), slots)
        else:
            slots = known.slots
        if k is not None and slots is not None and route.writes:
            if known is None:
                write_kv(cache, k, v, slots)
            else:
                again = cache.launchers.get(known.form)
                if again is None or not again(k, v, slots, known.tokens):
                    write_kv(cache, k, v, slots, known.form)
        try:
            result = route.run(
                q, k, v, layer, cache, batch, metadata,
                out=dense, return_lse=return_lse, topk_indices=topk_indices,
            )  # fmt: skip
        except AttnError:
            raise
        except Exception as error:  # a plugin's code: keep its error, name its owner
            raise run_error(config, "forward", error, batch, layer) from error
        if first:
            refuse_output(config, result, q, layer, dense, return_lse)
            route.checked.add((layer_id, return_lse))
        if out is dense and not trained:
            return result
        return returned(result, out, dense, q, *(x for x in (k, v) if x is not None))

    def index_topk(
        self, q_index: Tensor, k_index: Tensor | None, weights: Tensor, layer: AttentionLayer,
        batch: ForwardBatch, metadata: Metadata, *, k: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Write index keys [T, Di] and select, as AttentionBackend does; None selects all keys.

        k: new latents [T, 1, D], which are written with the keys, on a GPU in one launch; the
        layer's `forward` is then given None in their place.
        """
        if batch.forward_mode is ForwardMode.IDLE:
            return None
        cache = self.caches.layer(layer.layer_id)
        plan = metadata.softmax if type(metadata) is HybridMetadata else metadata
        backend = self.routes.get(ROLE_OF_MODE[batch.forward_mode]) or self._of(batch)
        return select_keys(backend, q_index, k_index, weights, k, layer, cache, batch, plan)

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
        first = (role, layer.layer_id, return_lse) not in self._ragged
        if first:
            refuse_layer(backend.config, layer)
        q, k, v = readable(q), readable(k), readable(v)
        dense = fillable(out, None if backend.casts_output else q.dtype)
        with backend_errors(backend.config, "forward_ragged", layer=layer):
            result = backend.forward_ragged(
                q, k, v, layer, *lengths, causal=causal, out=dense, return_lse=return_lse
            )
        if first:
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
