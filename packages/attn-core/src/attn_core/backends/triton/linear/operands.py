"""Tensors of one call as the kernels of linear attention take them, and what decides a launch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from torch import Tensor

from attn_core.backends.triton.linear.arguments import Inputs, Rows, Slots, States
from attn_core.ops.triton.launcher import alike


def rows_of(x: Tensor) -> Rows:
    strides = x.stride()
    return Rows(x, strides[0], strides[1])


def inputs_of(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Inputs:
    return Inputs(rows_of(q), rows_of(k), rows_of(v), rows_of(g), rows_of(beta))


def placed(x: Tensor) -> tuple[tuple[int, int, int], Hashable]:
    """Return the address and the strides of a tensor, and what Triton specialises of it."""
    strides, address = x.stride(), x.data_ptr()
    first, second = strides[0], strides[1]
    return (address, first, second), (alike(x, address), first, second)


def placed_slots(x: Tensor) -> tuple[tuple[int, int, int], Hashable]:
    """Return the same of one layer's slots [slots, …]."""
    slot, address = x.stride(0), x.data_ptr()
    return (address, 0, slot), (alike(x, address), slot)


def slots_of(slots: Tensor, slots_out: Tensor | None, fresh: Tensor | None) -> Slots:
    out = slots if slots_out is None else slots_out
    return Slots(slots, out, slots if fresh is None else fresh)


def at_slots_of(
    slots: Tensor, slots_out: Tensor | None, fresh: Tensor | None
) -> tuple[tuple[int, int, int], Hashable]:
    """Return the addresses of what slots_of returns, and what Triton specialises of it."""
    at = slots.data_ptr()
    if slots_out is None and fresh is None:
        return (at, at, at), alike(slots, at)
    places = slots_of(slots, slots_out, fresh)
    return places.addresses(), tuple(map(alike, places))


def states_of(x: Tensor, *, layers: bool = False) -> States:
    """Return one layer's slots [slots, …], or those of all layers [layers, slots, …]."""
    strides = x.stride()
    return States(x, strides[0], strides[1]) if layers else States(x, 0, strides[0])


def like(parts: Iterable[Rows | States]) -> list[Hashable]:
    """Return what Triton specialises of tensors with strides: dtypes, alignment, the strides."""
    return [(alike(x), first, second) for x, first, second in parts]
