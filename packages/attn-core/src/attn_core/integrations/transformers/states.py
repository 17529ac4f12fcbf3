"""The slots of a model's linear layers: a StatePool that grows on demand, and its backends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from attn_core.cache.state_pool import StatePool
from attn_core.errors import OutOfPagesError, UnsupportedError, UsageError
from attn_core.integrations.transformers.architectures import ModelAttention
from attn_core.plugins.registry import Registry
from attn_core.runtime.linear_routes import LinearRoutes
from attn_core.runtime.routes import create_linear_routes
from attn_core.selection.result import Selection
from attn_core.spec.requirements import Speculation

NUM_DRAFTS = 32  # tokens of a pass that can be taken back one by one: transformers drafts 10 or 20


class States:
    """The pool of states of a model's linear layers, its free slots, and the backends.

    dtype: of the model, in which the convolution's inputs are kept. The pool holds records of
    drafts from the first time that tokens may be taken back. Raises UsageError for a selection
    without linear layers, and what creating the backends raises.
    """

    def __init__(
        self,
        attention: ModelAttention,
        selection: Selection,
        registry: Registry,
        *,
        dtype: str,
        device: torch.device,
    ) -> None:
        if "linear_decode" not in selection.roles:
            assumptions = [x for x in selection.assumptions if "linear" in x]
            raise UsageError(
                "the selection has no backends for the model's linear layers"
                f"{f' ({assumptions[0]})' if assumptions else ''}; select again with select_for()"
            )
        self.layers, self.device = attention.linear_layers, device
        conv = attention.linear_modules[0].conv1d
        self._conv = (conv.in_channels, conv.kernel_size[0], dtype)
        self._free: list[int] = []
        self._num_slots = self._num_drafts = 0
        # Slots of caches that became garbage, left here by finalizers as PagedCache.dropped.
        self.dropped: deque[list[list[int]]] = deque()
        pool = self._pool(1, NUM_DRAFTS)  # for what creating the backends checks
        speculation = Speculation(topk=1, num_draft_tokens=NUM_DRAFTS)
        needs = replace(selection.requirements, speculation=speculation)
        backends = create_linear_routes(
            replace(selection, requirements=needs),
            registry,
            pool,
            self.layers,
            max_bs=0,
            max_num_tokens=0,
            max_seq_len=0,
        )
        self.routes = LinearRoutes(backends, pool)

    @property
    def pool(self) -> StatePool:
        return self.routes.states

    @property
    def nbytes(self) -> int:
        """Size of the pool in bytes now."""
        return self.pool.states.nbytes if self._num_slots else 0

    @property
    def num_held(self) -> int:
        """Slots that some request holds."""
        self.collect()
        return self._num_slots - len(self._free)

    @property
    def can_verify(self) -> bool:
        """Whether tokens can be taken back: a backend verifies drafts, and decode keeps states."""
        routes = self.routes.routes
        return "linear_verify" in routes and all(
            x.config.row.separate_write_slots for x in routes.values()
        )

    def keep_records(self) -> None:
        """Give the pool room for records of drafts. Raises UnsupportedError, OutOfPagesError."""
        if not self.can_verify:
            names = sorted({x.config.name for x in self.routes.routes.values()})
            raise UnsupportedError(
                "assisted generation, or another rollback of the cache, needs a backend that "
                "verifies drafts in linear layers and all of them to keep the states that they "
                f"read, selected are {', '.join(names)}; name another --linear-attn-backend"
            )
        if not self._num_drafts:
            self._grow(self._num_slots, NUM_DRAFTS)

    def collect(self) -> None:
        """Take the slots of caches that became garbage back."""
        while self.dropped:
            self.release(self.dropped.popleft())

    def release(self, rows: list[list[int]]) -> None:
        """Take all slots of some requests back and empty the list."""
        for slots in rows:
            self._free += slots
        rows.clear()

    def give_back(self, slots: Sequence[int]) -> None:
        """Take single slots back."""
        self._free += slots

    def reserve(self, num_slots: int) -> None:
        """Make sure that so many slots are free. Raises OutOfPagesError and changes nothing."""
        self.collect()
        missing = num_slots - len(self._free)
        if missing > 0:
            self._grow(self._num_slots + missing, self._num_drafts)

    def take(self, num_slots: int) -> list[int]:
        """Return so many free slots. Raises OutOfPagesError."""
        self.reserve(num_slots)
        return [self._free.pop() for _ in range(num_slots)]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states from one slot to another, in all layers."""
        if copies:
            self.pool.copy_slots(*torch.tensor(copies, device=self.device).unbind(1))

    def _grow(self, num_slots: int, num_drafts: int) -> None:
        """Replace the pool by a larger one that holds the same."""
        pool = self._pool(max(1, num_slots), num_drafts)
        old_slots = self._num_slots
        for name, tensor in vars(self.pool.states).items():
            larger = getattr(pool.states, name)
            if old_slots and tensor is not None and larger is not None:
                larger[:, :old_slots] = tensor
        self.routes.states = pool
        self._free += range(old_slots, num_slots)
        self._num_slots, self._num_drafts = num_slots, num_drafts

    def _pool(self, num_slots: int, num_drafts: int) -> StatePool:
        channels, width, dtype = self._conv
        try:
            return StatePool(
                self.layers,
                num_slots=num_slots,
                num_drafts=num_drafts,
                conv_channels=channels,
                conv_width=width,
                conv_dtype=dtype,
                device=self.device,
            )
        except (RuntimeError, MemoryError) as error:  # torch has no class of its own
            message = str(error).partition("\n")[0][:300]
            raise OutOfPagesError(
                f"the states of {num_slots} requests in {len(self.layers)} linear layers do not "
                f"fit on {self.device} ({message}); drop a cache or ask for fewer rows"
            ) from error
