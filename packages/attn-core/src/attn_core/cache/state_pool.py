"""The pool that holds the states of a model's linear attention layers, and what drafts leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.memory import zeros
from attn_core.errors import UsageError

CHUNK_SIZE = 64  # new tokens of a request between two checkpoints of its state
STATE_DTYPES = ("fp32", "bf16")


class StateLayer(Protocol):
    """The attributes of a layer that a pool reads: LinearLayer or an engine's own class."""

    @property
    def layer_id(self) -> int: ...
    @property
    def num_k_heads(self) -> int: ...
    @property
    def num_v_heads(self) -> int: ...
    @property
    def head_k_dim(self) -> int: ...
    @property
    def head_v_dim(self) -> int: ...
    @property
    def g_dims(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class StateCache:
    """The slots of one linear layer or, with one more dimension in front, of all layers.

    state: [slots, Hv, V, K], fp32 or bf16.
    u, k, g: float32, what verify writes for the n drafts of a slot and commit reads: the update
    [slots, n, Hv, V], the normalised key [slots, n, Hk, K] and the log decay [slots, n, Hv] or
    [slots, n, Hv, K]. None without drafts.
    conv: [slots, channels, width - 1], the last raw inputs of a short convolution, the newest last;
    None without a convolution.
    conv_drafts: [slots, n, channels], the raw inputs of the drafts.
    Layers and slots are at any strides, a layer's part of a slot is contiguous.
    """

    state: Tensor
    u: Tensor | None = None
    k: Tensor | None = None
    g: Tensor | None = None
    conv: Tensor | None = None
    conv_drafts: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor], *, drafts: bool = True) -> StateCache:
        """Return what `change` makes of each tensor; drafts: of what drafts left too."""
        names = [f.name for f in fields(self)] if drafts else ["state", "conv"]
        tensors = {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {n: None if x is None else change(x) for n, x in tensors.items()}
        return StateCache(**changed)

    @property
    def records(self) -> tuple[Tensor, Tensor, Tensor]:
        """u, k and g of drafts. Raises UsageError for a pool without them."""
        if self.u is None or self.k is None or self.g is None:
            raise UsageError(
                "a pool without records of drafts; create the StatePool with num_drafts"
            )
        return self.u, self.k, self.g

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(x.nbytes for x in vars(self).values() if x is not None)


class StatePool:
    """The states of all linear layers of a model, zeros at first. Slots are the engine's to assign.

    layers: all of the same heads, dims and kind.
    dtype: of the states, "fp32" or "bf16".
    num_drafts: the drafts that verify takes per request; each leaves a small record, not a state.
    conv_channels, conv_width, conv_dtype: of the short convolution, if the pool has its state too.
    Raises UsageError.
    """

    def __init__(
        self,
        layers: Iterable[StateLayer],
        *,
        num_slots: int,
        dtype: str = "fp32",
        num_drafts: int = 0,
        conv_channels: int = 0,
        conv_width: int = 4,
        conv_dtype: str = "bf16",
        device: torch.device | str = "cpu",
    ) -> None:
        layers = tuple(layers)
        ids, dims = [x.layer_id for x in layers], {_dims(x): x.layer_id for x in layers}
        if len(dims) != 1 or len(set(ids)) < len(ids):
            dims_text = ", ".join(f"layer {i} {d}" for d, i in dims.items()) or "no layers"
            raise UsageError(
                f"a pool of states for layers {ids}, {dims_text} (expected layers of the same Hk, "
                "Hv, K, V and g, each layer_id once)"
            )
        if dtype not in STATE_DTYPES:
            raise UsageError(
                f"linear-attention states of dtype {dtype!r} (supports {', '.join(STATE_DTYPES)})"
            )
        if num_slots < 1 or num_drafts < 0 or conv_channels < 0 or conv_width < 2:
            raise UsageError(
                f"num_slots {num_slots}, num_drafts {num_drafts}, conv_channels {conv_channels}, "
                f"conv_width {conv_width} (expected at least 1, 0, 0 and 2)"
            )
        hk, hv, k, v, g = _dims(layers[0])
        slots, n = (len(layers), num_slots), num_drafts

        def states(*dims: int, store: str = "fp32") -> Tensor:
            return zeros((*slots, *dims), TORCH_DTYPES[store], device)

        c = conv_channels
        self._wrap(
            [x.layer_id for x in layers],
            StateCache(
                state=states(hv, v, k, store=dtype),
                u=states(n, hv, v) if n else None,
                k=states(n, hk, k) if n else None,
                g=states(n, *g) if n else None,
                conv=states(c, conv_width - 1, store=conv_dtype) if c else None,
                conv_drafts=states(n, c, store=conv_dtype) if c and n else None,
            ),
        )

    @classmethod
    def of(cls, layer_ids: Sequence[int], states: StateCache) -> StatePool:
        """Wrap an engine's own tensors [layers, slots, …], one layer per id. Raises UsageError."""
        pool = cls.__new__(cls)
        pool._wrap(layer_ids, states)
        return pool

    def _wrap(self, layer_ids: Sequence[int], states: StateCache) -> None:
        _check(len(layer_ids), states)
        self.states, self.layer_ids = states, tuple(layer_ids)
        self._layers = {
            layer_id: states.map(partial(torch.select, dim=0, index=i))
            for i, layer_id in enumerate(layer_ids)
        }

    def __getstate__(self) -> tuple[tuple[int, ...], StateCache]:
        return self.layer_ids, self.states

    def __setstate__(self, saved: tuple[tuple[int, ...], StateCache]) -> None:
        self._wrap(*saved)  # a pickle would make tensors of their own of the layers' views

    def layer(self, layer_id: int) -> StateCache:
        """Return one layer's slots. Raises UsageError for a layer that is not in the pool."""
        try:
            return self._layers[layer_id]
        except KeyError:
            layer_ids = sorted(self._layers)
            raise UsageError(f"layer {layer_id} has no state (layers: {layer_ids})") from None

    @property
    def device(self) -> torch.device:
        return self.states.state.device

    @property
    def num_slots(self) -> int:
        return self.states.state.shape[1]

    @property
    def num_drafts(self) -> int:
        return 0 if self.states.u is None else self.states.u.shape[2]

    @property
    def dtype(self) -> str:
        """What the states are stored in: "fp32" or "bf16"."""
        return "fp32" if self.states.state.dtype == torch.float32 else "bf16"

    @property
    def bytes_per_slot(self) -> int:
        """Size in bytes of one slot over all layers, with its drafts."""
        return self.states.nbytes // self.num_slots

    @staticmethod
    def slots_that_fit(
        memory: int,
        layers: Iterable[StateLayer],
        *,
        dtype: str = "fp32",
        num_drafts: int = 0,
        conv_channels: int = 0,
        conv_width: int = 4,
        conv_dtype: str = "bf16",
    ) -> int:
        """Return how many slots fit into `memory` bytes, before anything is allocated."""
        pool = StatePool(
            layers, num_slots=1, dtype=dtype, num_drafts=num_drafts, conv_channels=conv_channels,
            conv_width=conv_width, conv_dtype=conv_dtype, device="meta",
        )  # fmt: skip
        return max(0, memory // pool.bytes_per_slot)

    # What a slot is copied, kept or cleared with: states and convolution of all layers. The drafts
    # of a slot belong to one pass and stay. A look at slots would wait for a device, not for a CPU.
    def copy_slots(self, src: Tensor, dst: Tensor) -> None:
        """Copy slots, int64 [N] each, all read before any is written. Raises UsageError."""
        self.from_host(self._read(src), dst)

    def zero_slots(self, slots: Tensor) -> None:
        """Clear slots, int64 [N]; -1 is padding. Never syncs. Raises UsageError."""
        self._check_slots(slots, lowest=-1)
        if not slots.numel():
            return
        top = slots.amax()  # in the place of padding; below 0 where all is
        valid_slots = torch.where(slots < 0, top, slots).clamp(min=0)

        def clear(t: Tensor) -> Tensor:
            cleared = t.index_select(1, valid_slots).masked_fill_(top >= 0, 0)
            return t.index_copy_(1, valid_slots, cleared)

        self.states.map(clear, drafts=False)

    def to_host(self, slots: Tensor) -> StateCache:
        """Return a copy of slots, int64 [N], in the host's memory. Raises UsageError."""
        return self._read(slots).map(lambda t: t.cpu())

    def from_host(self, saved: StateCache, slots: Tensor) -> None:
        """Write what to_host returned into slots, int64 [N]; these need not be the same.

        Raises UsageError for a copy of another shape or dtype than these slots have, and if it or
        this pool alone has a convolution.
        """
        self._check_slots(slots)
        if (saved.conv is None) != (self.states.conv is None):
            has, lacks = ("pool", "copy") if saved.conv is None else ("copy", "pool")
            raise UsageError(
                f"from_host: the {has} has the state of a convolution, the {lacks} has none; "
                "create both pools with the same conv_channels"
            )
        both = ((self.states.state, saved.state), (self.states.conv, saved.conv))
        pairs = [(t, s) for t, s in both if t is not None and s is not None]
        for target, source in pairs:
            shape = [target.shape[0], slots.numel(), *target.shape[2:]]
            if list(source.shape) != shape or source.dtype != target.dtype:
                got, wanted = f"{source.dtype} {list(source.shape)}", f"{target.dtype} {shape}"
                raise UsageError(f"{got} for {slots.numel()} slots (expected {wanted})")
        for target, source in pairs:
            target.index_copy_(1, slots, source.to(target.device))

    def _read(self, slots: Tensor) -> StateCache:
        self._check_slots(slots)
        return self.states.map(lambda t: t.index_select(1, slots), drafts=False)

    def _check_slots(self, slots: Tensor, *, lowest: int = 0) -> None:
        if slots.dtype != torch.int64 or slots.dim() != 1:
            raise UsageError(f"slots {slots.dtype} {list(slots.shape)} (expected torch.int64 [N])")
        if slots.is_cpu and slots.numel():
            (low, high), top = map(int, slots.aminmax()), self.num_slots - 1
            if low < lowest or high > top:
                raise UsageError(f"state slots {low} to {high} (expected {lowest} to {top})")


def _dims(x: StateLayer) -> tuple[int, int, int, int, tuple[int, ...]]:
    return x.num_k_heads, x.num_v_heads, x.head_k_dim, x.head_v_dim, x.g_dims


def _check(layers: int, states: StateCache) -> None:
    """Raise UsageError for an engine's tensors that do not fit each other."""
    state = states.state
    if state.dim() != 5 or state.dtype not in (torch.float32, torch.bfloat16):
        raise UsageError(
            f"states {state.dtype} {list(state.shape)} (expected fp32 or bf16 [layers, slots, Hv, "
            "V, K], V before K)"
        )
    slots, hv, v, k = state.shape[1:]
    if len({x is None for x in (states.u, states.k, states.g)}) > 1:
        raise UsageError("records of drafts need all of u, k and g")
    shapes: dict[str, tuple[int | None, ...]] = {"u": (None, hv, v), "k": (None, None, k)}
    shapes["g"] = (None, hv, k) if states.g is not None and states.g.dim() == 5 else (None, hv)
    shapes |= {"state": (hv, v, k), "conv": (None, None), "conv_drafts": (None, None)}
    for name, dims in shapes.items():
        x: Tensor | None = getattr(states, name)
        if x is None:
            continue
        expected = (layers, slots, *dims)
        fits = x.dim() == len(expected) and all(
            size is None or size == n for size, n in zip(expected, x.shape, strict=True)
        )
        if not fits or not x[0, 0].is_contiguous() or x.device != state.device:
            raise UsageError(
                f"pool of states: {name} is {list(x.shape)} of strides {x.stride()} on {x.device} "
                f"(expected {list(expected)}, None = any, each slot contiguous, on {state.device})"
            )
        if name in ("u", "k", "g") and x.dtype != torch.float32:
            raise UsageError(f"pool of states: {name} is {x.dtype} (expected torch.float32)")
