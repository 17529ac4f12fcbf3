"""Attention, with its write of new K/V, as one torch operator that torch.compile keeps whole."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from attn_core.errors import UsageError
from attn_core.runtime.backend import Metadata
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer


class Attends(Protocol):
    """What runs a layer of the pass that is planned now."""

    def attend_into(
        self, out: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, layer_id: int
    ) -> None:
        """Write new K/V into the cache, attend, and fill `out`."""


_NUMBERS = itertools.count(1)
# A graph holds a number alone: it may outlive what it was compiled for.
_KNOWN: weakref.WeakValueDictionary[int, Attends] = weakref.WeakValueDictionary()


def numbered(runner: Attends) -> int:
    """Return the number by which attn_core::attention finds `runner`, as long as that lives."""
    number = next(_NUMBERS)
    _KNOWN[number] = runner
    return number


@torch.library.custom_op("attn_core::attention", mutates_args=("out",))
def attention(
    out: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, runner: int, layer_id: int
) -> None:
    """Fill `out` with a layer's attention in the pass that `runner`, a number, has planned.

    The runner defines what the tensors are. Raises UsageError if the runner no longer exists.
    """
    attends = _KNOWN.get(runner)
    if attends is None:
        raise UsageError("a compiled model attends in a pool that is gone; compile the model again")
    attends.attend_into(out, q, k, v, layer_id)


@attention.register_fake
def _(
    out: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, runner: int, layer_id: int
) -> None:
    """Compute nothing: `out` has its shape already."""


class CompiledAttention:
    """A dispatcher's attention for model code that torch.compile compiles.

    Plan the pass outside the compiled code, `with attention.planned(batch)`; inside it, each layer
    calls `attention(q, k, v, layer)`. One graph serves all passes of its shapes. Only one pass may
    run at a time: threads take turns, or each has its own CompiledAttention.
    """

    def __init__(self, dispatcher: HybridDispatcher, layers: Iterable[AttentionLayer]) -> None:
        self.dispatcher = dispatcher
        self._layers = {x.layer_id: x for x in layers}
        self._pass: tuple[ForwardBatch, Metadata] | None = None
        self._number = numbered(self)

    @contextlib.contextmanager
    def planned(self, batch: ForwardBatch) -> Iterator[None]:
        """Plan a pass for the layers that attend inside the `with` block."""
        self._pass = batch, self.dispatcher.init_forward_metadata(batch)
        try:
            yield
        finally:
            self._pass = None

    def __call__(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer
    ) -> Tensor:
        """Write new K/V and attend, as HybridDispatcher.forward; returns [T, Hq, Dv]."""
        out = q.new_empty(q.shape[0], layer.num_q_heads, layer.v_head_dim)
        torch.ops.attn_core.attention(out, q, k, v, self._number, layer.layer_id)
        return out

    def attend_into(
        self, out: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, layer_id: int
    ) -> None:
        """Run a layer of the planned pass. Raises UsageError if no pass is planned."""
        if self._pass is None:
            raise UsageError("no pass is planned; run the model `with attention.planned(batch)`")
        self.dispatcher.forward(q, k, v, self._layers[layer_id], *self._pass, out=out)
