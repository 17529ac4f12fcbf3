"""Create the backends that a selection chose, by role."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from attn_core.cache.pool import CachePool
from attn_core.cache.state_pool import StatePool
from attn_core.errors import AttnError, UsageError
from attn_core.plugins.registry import Registry
from attn_core.runtime.backend import (
    AttentionBackend,
    BackendConfig,
    LinearAttentionBackend,
    Output,
    create_backend,
)
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.contract_checks import refuse_layer, refuse_pages, refuse_scales
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.linear import LinearLayer
from attn_core.runtime.trace import ranged, ranges
from attn_core.selection.result import LINEAR_ROLES, SOFTMAX_ROLES, Choice, Selection
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.kinds import Role

_T = TypeVar("_T")
Agree = Callable[[frozenset[str]], frozenset[str]]
logger = logging.getLogger("attn_core.routes")


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where the passes of one mode go: what is looked up once, not in every layer.

    checked: (layer, with LSE) whose output was found to keep the contract.
    """

    backend: AttentionBackend
    run: Callable[..., Output]
    writes: bool
    checked: set[tuple[int, bool]] = field(default_factory=set)

    @classmethod
    def of(cls, backend: AttentionBackend, role: Role) -> Route:
        """Return the route of a role's passes to a backend."""
        config = backend.config
        run = backend.forward
        if ranges():
            run = ranged(f"attn_core {role} {config.name}", run)
        return cls(backend, run, not config.row.fused_kv_write)


@dataclass(frozen=True, slots=True, eq=False)
class GroupRoutes:
    """Where the layers of a pass go that several backends run.

    by_group: each group of equal layers, in words, and its route. by_layer: layer id → its route;
    a layer that is not listed takes the route of the first group.
    """

    by_group: tuple[tuple[str, Route], ...]
    by_layer: Mapping[int, Route]

    @property
    def routes(self) -> tuple[Route, ...]:
        """Every route once."""
        return distinct(route for _, route in self.by_group)


Pick = Route | GroupRoutes


class ShadowRun(Protocol):
    """What runs a second backend on some passes and compares; attn_core.Shadow is one."""

    def attach(self, backends: Sequence[AttentionBackend], layout: str) -> None:
        """Prepare to be the shadow of these backends over a cache of this layout; called once."""

    def routes(self, routes: Sequence[Route], batch: ForwardBatch) -> Mapping[Route, Route]:
        """Return which routes this eager pass takes in place of its own; the others it keeps."""


ROLE_OF_MODE: Mapping[ForwardMode, Role] = {
    ForwardMode.EXTEND: "prefill",
    ForwardMode.MIXED: "prefill",
    ForwardMode.DECODE: "decode",
    ForwardMode.TARGET_VERIFY: "verify",
    ForwardMode.DRAFT_DECODE: "draft",
    ForwardMode.DRAFT_EXTEND: "draft",
}
MISSING: Mapping[Role, str] = {
    "verify": "without speculation; select again with --speculative-eagle-topk",
    "draft": "without speculation; select again with --speculative-eagle-topk",
    "encode": "without a vision tower; select again with the model's vision config",
}


def create_routes(
    selection: Selection,
    registry: Registry,
    caches: CachePool,
    layers: tuple[AttentionLayer, ...],
    vision_layers: tuple[AttentionLayer, ...],
    agree: Agree | None = None,
    **limits: int,
) -> dict[Role, tuple[AttentionBackend, ...]]:
    """Return role → the chosen backend, then its alternatives.

    There is one instance where roles name the same row of the same backend. An alternative that
    cannot be created is left out, and the log says so. agree: given the names of those, returns all
    that no rank may take; ranks that serve one model together call it at the same time. The other
    arguments and errors are those of HybridDispatcher.from_selection; limits: its max_*.
    """
    pool = (caches.page_size, caches.kv_cache_dtype, caches.layout)
    chosen = (selection.page_size, selection.kv_cache_dtype, selection.layout)
    if pool != chosen:
        raise UsageError(f"the pool is {pool}, the selection {chosen} (page size, store, layout)")
    created: dict[tuple[str, Capabilities, bool], AttentionBackend] = {}

    def create(role: Role, choice: Choice) -> AttentionBackend:
        encodes = role == "encode"
        # a vision tower has layers of its own, so its backend is a second instance
        key = (choice.backend, choice.row, encodes)
        if key not in created:
            config = _config(
                selection,
                choice,
                layers=vision_layers if encodes else layers,
                page_size=caches.page_size,
                kv_cache_dtype=caches.kv_cache_dtype,
                device=caches.device,
                **limits,
            )
            created[key] = create_backend(registry.get(choice.backend, "softmax"), config)
        return created[key]

    roles = [role for role in SOFTMAX_ROLES if role in selection.roles]
    routes = {role: [create(role, selection.roles[role])] for role in roles}
    failed: dict[str, str] = {}
    for role in roles:
        for choice in selection.alternatives.get(role, ()):
            try:
                backend = create(role, choice)
                refuse_backend(role, backend, caches)
                routes[role].append(backend)
            except AttnError as error:
                failed[choice.backend] = str(error)
    dropped = frozenset(failed)
    if agree is not None and selection.alternatives:
        dropped = agree(dropped)
    for name in sorted(dropped):
        logger.warning(
            "%s takes no passes of others: %s", name, failed.get(name, "another rank cannot use it")
        )
    return {
        role: (first, *(x for x in alternatives if x.config.name not in dropped))
        for role, (first, *alternatives) in routes.items()
    }


def create_linear_routes(
    selection: Selection,
    registry: Registry,
    states: StatePool,
    layers: tuple[LinearLayer, ...],
    **limits: int,
) -> dict[Role, LinearAttentionBackend]:
    """Return role → linear backend, one instance where roles name the same row of the same backend.

    The arguments and errors are those of HybridDispatcher.from_selection; limits: its max_*.
    """
    created: dict[tuple[str, Capabilities], LinearAttentionBackend] = {}
    routes: dict[Role, LinearAttentionBackend] = {}
    for role in LINEAR_ROLES:
        if role not in selection.roles:
            continue
        choice = selection.roles[role]
        key = (choice.backend, choice.row)
        if key not in created:
            config = _config(
                selection,
                choice,
                layers=(),
                linear_layers=layers,
                page_size=selection.page_size or 1,
                kv_cache_dtype=states.dtype,
                device=states.device,
                **limits,
            )
            created[key] = create_backend(registry.get(choice.backend, "linear"), config, "linear")
        routes[role] = created[key]
    return routes


def _config(selection: Selection, choice: Choice, **limits: Any) -> BackendConfig:
    """Return the config of a choice.

    limits: the fields of the config that follow from the pool, the layers and the engine.
    """
    needs, speculation = selection.requirements, selection.requirements.speculation
    return BackendConfig(
        name=choice.backend,
        row=choice.row,
        dtype=needs.dtype,
        arch=selection.device.arch,
        topk=speculation.topk if speculation else 0,
        num_draft_tokens=speculation.num_draft_tokens if speculation else 0,
        deterministic=needs.deterministic,
        shared_prefix=needs.shared_prefix,
        **limits,
    )


def refuse_routes(routes: Sequence[tuple[Role, AttentionBackend]], caches: CachePool) -> None:
    """Raise UnsupportedError for a layer, scales or pages that a backend's row does not support.

    Raises UsageError where nobody prefills or decodes.
    """
    roles, checked = {role for role, _ in routes}, set()
    for name in ("prefill", "decode"):
        if name not in roles:
            raise UsageError(f"no backend for {name!r} (routes: {sorted(roles)})")
    for role, backend in routes:
        if id(backend) not in checked:
            refuse_backend(role, backend, caches)
        checked.add(id(backend))


def refuse_backend(role: Role, backend: AttentionBackend, caches: CachePool) -> None:
    """Raise UnsupportedError for a layer, scales or pages that a backend's row does not support."""
    if role != "encode":
        refuse_pages(backend.config, caches)
    for layer in backend.config.layers:
        refuse_layer(backend.config, layer)
        if role != "encode":
            with contextlib.suppress(UsageError):  # a layer without a cache is ragged
                refuse_scales(backend.config, layer, caches.layer(layer.layer_id))


def captured_backends(
    routes: Sequence[tuple[Role, AttentionBackend]],
) -> tuple[AttentionBackend, ...]:
    """Return the backends whose passes are captured in CUDA graphs: of decode, verify and draft.

    The first that decodes is the chosen one: if its row does not support graphs, nothing is.
    """
    if next(b for role, b in routes if role == "decode").config.row.cuda_graph == "never":
        return ()
    roles: tuple[Role, ...] = ("decode", "verify", "draft")
    backends = (b for role in roles for name, b in routes if name == role)
    return distinct(b for b in backends if b.config.row.cuda_graph != "never")


def distinct(items: Iterable[_T]) -> tuple[_T, ...]:
    """Return the items without those that come again."""
    return tuple({id(x): x for x in items}.values())
