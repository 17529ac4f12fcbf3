"""Plan each forward pass with the backend of its mode, once, before its layers run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attn_core.cache.pool import CachePool
from attn_core.costs.table import Bucket
from attn_core.errors import UnsupportedError, UsageError
from attn_core.runtime.adaptive import GroupPlans, Pickers, Planned, shadowed
from attn_core.runtime.backend import AttentionBackend, Metadata
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.contract_checks import (
    refuse_capture,
    refuse_drafts,
    refuse_host_lengths,
    refuse_lengths,
    refuse_mode,
)
from attn_core.runtime.linear_routes import HybridMetadata, LinearRoutes
from attn_core.runtime.routes import (
    MISSING,
    ROLE_OF_MODE,
    GroupRoutes,
    Pick,
    Route,
    ShadowRun,
    captured_backends,
    distinct,
)
from attn_core.runtime.run_errors import backend_errors
from attn_core.runtime.shared_keys import SharedKeys
from attn_core.runtime.trace import PassKind, Trace, ranged, ranges, size_of
from attn_core.spec.kinds import Role

_EAGER = "init_forward_metadata"
_CAPTURE = "init_forward_metadata_capture_cuda_graph"
_REPLAY = "init_forward_metadata_replay_cuda_graph"


class Planner:
    """The half of a HybridDispatcher that plans; its parameters are those of that class."""

    def __init__(
        self,
        routes: Mapping[Role, AttentionBackend],
        caches: CachePool,
        linear: LinearRoutes | None,
        pickers: Pickers,
        shadow: ShadowRun | None,
    ) -> None:
        self.routes, self.caches = dict(routes), caches
        self.linear, self.pickers, self.shadow = linear, pickers, shadow
        self.trace = Trace()
        self._by_mode: dict[ForwardMode, Route] = {}
        self._ranges = ranges()
        self._sharing: tuple[AttentionBackend, Metadata] | None = None  # the last plan that may

    @property
    def passes(self) -> Mapping[PassKind, int]:
        """How many passes of each kind there were, in CUDA graphs too; see PassKind."""
        return self.trace.passes()

    @property
    def shared_keys(self) -> SharedKeys | None:
        """What the requests of the last pass without prompts read together.

        None before the first one, and where none of its backends was asked for shared prefixes.
        Reads the plan on the device, in eager passes and CUDA graphs alike, and waits for it: call
        it between passes.
        """
        if self._sharing is None:
            return None
        backend, metadata = self._sharing
        with backend_errors(backend.config, "shared_keys"):
            if backend.config.device.type != "cpu":
                torch.accelerator.synchronize(backend.config.device)
            return backend.shared_keys(metadata)

    def backend(self, role: Role) -> AttentionBackend:
        """Return the backend of a role. Raises UnsupportedError if the selection has none."""
        if role not in self.routes:
            raise UnsupportedError(f"no backend for {role}: selected {MISSING[role]}")
        return self.routes[role]

    def init_forward_metadata(self, batch: ForwardBatch) -> Metadata:
        """Plan this pass with its backends, once, before its first layer; None if idle.

        Raises UnsupportedError if the backend's row cannot verify the drafts, BatchError for a view
        of other pages than the pool's, for a request of more tokens than its page table has columns
        for, where the host knows, and on a CPU for lengths on the host that are not those of the
        tensor.
        """
        mode = batch.forward_mode
        if mode is ForwardMode.IDLE:
            return None
        refuse_lengths(batch, self.caches.page_size)
        refuse_host_lengths(batch)
        size = size_of(batch)
        pick = self.pickers.pick(mode, size)
        metadata = self._planned(batch, pick, _EAGER)
        self._count(batch, pick, size, captured=False)
        if self.shadow is not None and self._of(batch).config.row.absorbed:
            chosen = self._by_mode.get(mode) or self._route(mode)
            metadata = shadowed(self.shadow, chosen, batch, metadata)
        return metadata if not self.linear else HybridMetadata(metadata, self.linear.plan(batch))

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

    def init_forward_metadata_capture_cuda_graph(
        self, batch: ForwardBatch, pick: Pick | None = None
    ) -> Metadata:
        """Plan a pass into static buffers; None if idle.

        pick: one of pickers.by_length, for a graph of some lengths; by default that of all lengths
        of the workload. Raises UnsupportedError if the backend of this pass is not captured, or not
        in this mode, and BatchError as init_forward_metadata does.
        """
        mode = batch.forward_mode
        if mode is ForwardMode.IDLE:
            return None
        refuse_lengths(batch, self.caches.page_size)
        pick = pick or self.pickers.captured(mode, size_of(batch))
        for backend in self._backends(batch, pick):
            refuse_capture(backend.config, batch, self.captured)
        metadata = self._planned(batch, pick, _CAPTURE)
        return metadata if not self.linear else HybridMetadata(metadata, self.linear.capture(batch))

    def init_forward_metadata_replay_cuda_graph(
        self, batch: ForwardBatch, metadata: Metadata
    ) -> None:
        """Refill the static buffers before a replay."""
        mode = batch.forward_mode
        if mode is ForwardMode.IDLE:
            return
        if type(metadata) is HybridMetadata:
            self._linear().replay(batch, metadata.linear)
            metadata = metadata.softmax
        pick: Pick | None = None
        if type(metadata) is GroupPlans:
            pick, plans = metadata.routes, list(metadata.plans.values())
        elif type(metadata) is Planned:
            pick, plans = metadata.route, [metadata]
        else:
            plans = []
        parts = [(x.route.backend, x.metadata) for x in plans] or [(self._of(batch), metadata)]
        for backend, plan in parts:
            self._call(backend, _REPLAY, batch, plan)
        self._keep(batch, parts)
        self._count(batch, pick, size_of(batch), captured=True)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the KV length of padded requests, as the decode backends define it."""
        backends = distinct(b for role, b in self._every() if role == "decode")
        return max(b.get_cuda_graph_seq_len_fill_value() for b in backends)

    def _every(self) -> list[tuple[Role, AttentionBackend]]:
        return [*self.routes.items(), *self.pickers.items()]

    def _of(self, batch: ForwardBatch) -> AttentionBackend:
        return self.backend(ROLE_OF_MODE[batch.forward_mode])

    def _route(self, mode: ForwardMode) -> Route:
        role = ROLE_OF_MODE[mode]
        backend = self.backend(role)
        refuse_mode(backend.config, mode)
        route = Route.of(backend, role)
        self._by_mode[mode] = route
        return route

    def _backends(self, batch: ForwardBatch, pick: Pick | None) -> tuple[AttentionBackend, ...]:
        if pick is None:
            return (self._of(batch),)
        routes = pick.routes if isinstance(pick, GroupRoutes) else (pick,)
        return tuple(route.backend for route in routes)

    def _planned(self, batch: ForwardBatch, pick: Pick | None, method: str) -> Metadata:
        backends = self._backends(batch, pick)
        parts = [(backend, self._plan(backend, batch, method)) for backend in backends]
        self._keep(batch, parts)
        if isinstance(pick, GroupRoutes):
            plans = {x: Planned(x, plan) for x, (_, plan) in zip(pick.routes, parts, strict=True)}
            return GroupPlans(pick, plans)
        [(_, metadata)] = parts
        return metadata if pick is None else Planned(pick, metadata)

    def _plan(self, backend: AttentionBackend, batch: ForwardBatch, method: str) -> Metadata:
        refuse_drafts(backend.config, batch)
        return self._call(backend, method, batch)

    def _count(
        self, batch: ForwardBatch, pick: Pick | None, size: Bucket, *, captured: bool
    ) -> None:
        role = ROLE_OF_MODE[batch.forward_mode]
        if isinstance(pick, GroupRoutes):
            for group, route in pick.by_group:
                self.trace.count(role, route.backend.config.name, size, captured, group)
        else:
            backend = self._of(batch) if pick is None else pick.backend
            self.trace.count(role, backend.config.name, size, captured)

    def _keep(
        self, batch: ForwardBatch, parts: Sequence[tuple[AttentionBackend, Metadata]]
    ) -> None:
        """Keep the plan of a pass that may share keys, until the next one: see shared_keys."""
        if ROLE_OF_MODE[batch.forward_mode] != "prefill":
            sharing = [part for part in parts if part[0].config.shared_prefix]
            self._sharing = sharing[-1] if sharing else None

    def _call(self, backend: AttentionBackend, method: str, batch: ForwardBatch, *args: Any) -> Any:
        call = getattr(backend, method)
        if self._ranges:
            call = ranged(f"attn_core {method} {backend.config.name}", call)
        with backend_errors(backend.config, method, batch):
            return call(batch, *args)

    def _linear(self) -> LinearRoutes:
        if self.linear is None:
            raise UsageError("no linear layers: the dispatcher was created without their states")
        return self.linear
