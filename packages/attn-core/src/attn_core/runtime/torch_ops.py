"""Attention and the write of new K/V as torch operators that torch.compile keeps whole."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attn_core.errors import UsageError
from attn_core.ops import kv
from attn_core.runtime.backend import Metadata
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.operands import check_pass, readable
from attn_core.runtime.routes import ROLE_OF_MODE


class Attends(Protocol):
    """What runs a layer of the pass that is planned now."""

    def attend_into(
        self, out: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, layer_id: int
    ) -> None:
        """Attend and fill `out`; new K/V that were not written by write_kv are written first."""


_NUMBERS = itertools.count(1)
# A graph holds a number alone: it may outlive what it was compiled for.
_RUNNERS: weakref.WeakValueDictionary[int, Attends] = weakref.WeakValueDictionary()


def numbered(runner: Attends) -> int:
    """Return the number by which attn_core::attention finds `runner`, as long as that lives."""
    number = next(_NUMBERS)
    _RUNNERS[number] = runner
    return number


def _runner(runner: int) -> Any:
    attends = _RUNNERS.get(runner)
    if attends is None:
        raise UsageError("a compiled model attends in a pool that is gone; compile the model again")
    return attends


# The tensors of a pass are its plan's, not arguments: inductor's CUDA graphs would keep the first
# pass's. Operators with this tag stay outside of them.
_TAGS = tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))


@torch.library.custom_op("attn_core::write_kv", mutates_args=(), tags=_TAGS)
def write_kv(k: Tensor, v: Tensor | None, runner: int, layer_id: int) -> Tensor:
    """Write a layer's new K/V into the cache of `runner`, the number of a CompiledAttention.

    The cache is no argument: compilers copy what an operator writes into, and attention would read
    the original. The empty tensor that is returned stands for what was written. Attention takes
    it, so that the two keep their order and neither is left out. Raises UsageError where the
    runner is gone.
    """
    _runner(runner).write(k, v, layer_id)
    return k.new_empty(0)


@write_kv.register_fake
def _(k: Tensor, v: Tensor | None, runner: int, layer_id: int) -> Tensor:
    return k.new_empty(0)


@torch.library.custom_op("attn_core::attention", mutates_args=("out",), tags=_TAGS)
def attention(
    out: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    runner: int,
    layer_id: int,
    written: Tensor | None = None,
) -> None:
    """Fill `out` with a layer's attention in the pass that `runner`, a number, has planned.

    The runner defines what the tensors are.
    written: what write_kv returned, or None if it was not called.
    Raises UsageError if the runner no longer exists.
    """
    _runner(runner).attend_into(out, q, k, v, layer_id)


@attention.register_fake
def _(
    out: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    runner: int,
    layer_id: int,
    written: Tensor | None = None,
) -> None:
    """Compute nothing: `out` has its shape already."""


class CompiledAttention:
    """A dispatcher's attention for model code that torch.compile compiles.

    Plan the pass outside the compiled code, `with attention.planned(batch)`; inside it, each layer
    calls `attention(q, k, v, layer)`, which is two operators of the graph: the write of new K/V and
    the attention. One graph serves all passes of its shapes. Only one pass may run at a time:
    threads take turns, or each has its own CompiledAttention.
    """

    def __init__(self, dispatcher: HybridDispatcher, layers: Iterable[AttentionLayer]) -> None:
        self.dispatcher = dispatcher
        self._layers = {x.layer_id: x for x in layers}
        self._pass: _Pass | None = None
        self._number = numbered(self)

    @contextlib.contextmanager
    def planned(self, batch: ForwardBatch) -> Iterator[None]:
        """Plan a pass for the layers that attend inside the `with` block."""
        metadata = self.dispatcher.init_forward_metadata(batch)
        self._pass = _Pass(batch, metadata, self._written(batch))
        try:
            yield
        finally:
            self._pass = None

    def _written(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch for layers whose K/V are written: without slots, unless rows write."""
        if batch.forward_mode is ForwardMode.IDLE:
            return batch
        backend = self.dispatcher.backend(ROLE_OF_MODE[batch.forward_mode])
        if backend.config.row.fused_kv_write:
            return batch
        views = {name: replace(view, out_cache_loc=None) for name, view in batch.views.items()}
        return replace(batch, views=views)

    def __call__(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer
    ) -> Tensor:
        """Write new K/V and attend, as HybridDispatcher.forward; returns [T, Hq, Dv]."""
        out = q.new_empty(q.shape[0], layer.num_q_heads, layer.v_head_dim)
        number, layer_id = self._number, layer.layer_id
        written = None if k is None else torch.ops.attn_core.write_kv(k, v, number, layer_id)
        torch.ops.attn_core.attention(out, q, k, v, number, layer_id, written)
        return out

    def write(self, k: Tensor, v: Tensor | None, layer_id: int) -> None:
        """Write new K/V of the planned pass, unless its backend does. Raises as HybridDispatcher.

        Raises UsageError where no pass is planned.
        """
        batch, layer = self._planned().batch, self._layers[layer_id]
        if batch is self._planned().written:  # nothing to write, or the backend does it
            return
        check_pass(None, k, v, layer, batch, None)
        slots = batch.views[layer.view].out_cache_loc
        if slots is not None:
            cache = self.dispatcher.caches.layer(layer_id)
            kv.write_kv(cache, readable(k), None if v is None else readable(v), slots)

    def attend_into(
        self, out: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, layer_id: int
    ) -> None:
        """Run a layer of the planned pass. Raises UsageError if no pass is planned."""
        planned = self._planned()
        layer = self._layers[layer_id]
        self.dispatcher.forward(q, k, v, layer, planned.written, planned.metadata, out=out)

    def _planned(self) -> _Pass:
        if self._pass is None:
            raise UsageError("no pass is planned; run the model `with attention.planned(batch)`")
        return self._pass


class _Pass(NamedTuple):
    """A planned pass; written: its batch for layers whose new K/V are in the cache."""

    batch: ForwardBatch
    metadata: Metadata
    written: ForwardBatch
