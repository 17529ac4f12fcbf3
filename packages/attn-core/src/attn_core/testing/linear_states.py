"""Pools of states for the suite: random states where a pass reads them, and NaN everywhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.state_pool import StateCache, StatePool
from attn_core.runtime.linear import LinearLayer
from attn_core.testing.linear_cases import LinearCase, LinearPoint
from attn_core.testing.tolerance import require

RECORDS = ("u", "k", "g")
OTHERS = (
    64  # other numbers behind each layer's part of an engine's page, as many as keep it aligned
)


@dataclass(frozen=True, eq=False)
class PoolMemory:
    """A pool, and all memory that its slots lie in, by the names of StateCache's fields."""

    pool: StatePool
    whole: dict[str, Tensor]

    def copy(self) -> PoolMemory:
        """Return a pool of the same strides over a copy of the memory."""
        tensors = {name: x.clone() for name, x in self.whole.items()}
        states = self.pool.states
        views = {}
        for name, memory in self.whole.items():
            view: Tensor = getattr(states, name)
            start = view.storage_offset() - memory.storage_offset()
            views[name] = tensors[name].as_strided(view.shape, view.stride(), start)
        return PoolMemory(StatePool.of(self.pool.layer_ids, StateCache(**views)), tensors)

    def require_kept(
        self,
        old_memory: PoolMemory,
        label: str,
        *,
        states: Iterable[int],
        records: Iterable[int] = (),
    ) -> None:
        """Raise CheckFailed if anything but the states and records of these slots has changed.

        `old_memory` is a copy, which is overwritten.
        """
        for name, slots in (("state", states), *((x, records) for x in RECORDS)):
            if name not in self.whole:
                continue
            for slot in slots:
                old, new = (getattr(x.pool.states, name)[:, slot] for x in (old_memory, self))
                old.copy_(new)
            old, new = (x.whole[name].view(torch.uint8) for x in (old_memory, self))
            changed = (old != new).nonzero()
            require(
                changed.shape[0] == 0,
                f"{label}: {changed.shape[0]} bytes of {name} were written that belong to no "
                "request of the pass, or to one that does not write them",
            )


def make_memory(
    case: LinearCase,
    layers: Sequence[LinearLayer],
    point: LinearPoint,
    rng: torch.Generator,
    device: torch.device,
) -> PoolMemory:
    """Return a pool whose live slots hold random states, and NaN in the rest of its memory."""
    drafts = case.drafts + 1 if case.drafts else 0  # one more than a pass has
    plain = StatePool(
        layers, num_slots=case.num_slots, dtype=point.state_dtype, num_drafts=drafts, device="meta"
    )
    tensors, views = {}, {}
    for field in fields(StateCache):
        meta: Tensor | None = getattr(plain.states, field.name)
        if meta is None:
            continue
        num_layers, slots, *dims = meta.shape
        size = meta[0, 0].numel()
        step = size + OTHERS if case.pages else size
        shape = (slots, num_layers, step) if case.pages else (num_layers, slots, step)
        memory = torch.full(shape, torch.nan, dtype=meta.dtype, device=device)
        view = torch.unflatten(memory[..., :size], -1, dims)
        tensors[field.name] = memory
        views[field.name] = view.transpose(0, 1) if case.pages else view
    pool = StatePool.of([x.layer_id for x in layers], StateCache(**views))
    state = pool.states.state
    for slot in sorted(case.live_slots):
        values = torch.randn(len(layers), *state.shape[2:], generator=rng)
        state[:, slot] = values.to(TORCH_DTYPES[point.state_dtype]).to(device)
    return PoolMemory(pool, tensors)


def poison_records(pool: StatePool, slot: int, drafts: Sequence[int]) -> None:
    """Write NaN into what these drafts of a slot have left."""
    for x in pool.states.records:
        x[:, slot, list(drafts)] = torch.nan
