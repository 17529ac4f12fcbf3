"""What an attention kernel is to the scheduler and the backend."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from attn_core.backends.triton.tuning import Launch
from attn_core.cache.layer_cache import LayerCache
from attn_core.runtime.batch import SpecInfo
from attn_core.runtime.layer import AttentionLayer, LayerGroup

Part = TypeVar("Part", contravariant=True)


class Shape(NamedTuple):
    """What decides which kernels run a pass of a group of layers.

    page_size: 0 for plain K and V. mask: see masks.py. longest: an upper bound of the keys of a
    request. tiles: an upper bound of the tiles of TILE_ROWS rows of all requests and KV heads.
    """

    arch: str
    processors: int
    group: LayerGroup
    dtype: str
    kv_cache_dtype: str
    page_size: int
    mask: int
    longest: int
    tiles: int


class Call(NamedTuple):
    """One layer's attention: q [T, Hq, D] over a cache into out [T, Hq, Dv], lse float32 [T, Hq].

    cu_seqlens_q int32 [batch + 1], seq_lens int32 [batch], page_table int32 [batch, columns]. In a
    ragged call page_table is None, the cache is one page of all tokens, and seq_lens is its
    cu_seqlens. spec: the drafts that a pass verifies. mask: see masks.py.
    """

    q: Tensor
    layer: AttentionLayer
    cache: LayerCache
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    page_table: Tensor | None
    positions: Tensor
    spec: SpecInfo | None
    mask: int
    out: Tensor
    lse: Tensor


class Kernel(Protocol[Part]):
    """An attention kernel for one part of a schedule.

    takes_order: whether it takes requests in the order that `order_requests` finds.
    """

    takes_order: ClassVar[bool]

    def choose(self, shape: Shape, launch: Launch | None) -> Launch | None:
        """Return its launch parameters; None where it cannot run such a shape.

        launch: that of the part, which all kernels of split-KV share.
        """

    def bind(self, layer: AttentionLayer, cache: LayerCache, dtype: torch.dtype) -> Any | None:
        """Return what it keeps of a layer and its cache; None where it cannot read them.

        dtype: of the queries.
        """

    def launch(self, call: Call, kept: Any, launch: Launch, part: Part) -> None:
        """Run it for one layer."""


@dataclass(frozen=True, eq=False)
class Choice(Generic[Part]):
    """A kernel that fits the shape of a pass, with its launch parameters."""

    kernel: Kernel[Part]
    launch: Launch


@dataclass(frozen=True, eq=False)
class _Binding:
    layer: AttentionLayer
    cache: weakref.ref[LayerCache]
    dtype: torch.dtype
    kept: Any | None


class Bindings:
    """What kernels keep of layers and their caches: strides, stores and descriptors.

    It is computed once for a layer and a cache, and again when one of them is another object, or
    the queries are of another dtype. A cache that is no longer used elsewhere is not kept alive.
    """

    def __init__(self) -> None:
        self._bindings: dict[tuple[int, Kernel[Any]], _Binding] = {}

    def first(
        self,
        choices: Sequence[Choice[Part]],
        layer: AttentionLayer,
        cache: LayerCache,
        dtype: torch.dtype,
    ) -> tuple[Choice[Part], Any]:
        """Return the first choice whose kernel can read this cache, and what it keeps.

        dtype: of the queries.
        """
        for choice in choices:
            key = (layer.layer_id, choice.kernel)
            binding = self._bindings.get(key)
            if (
                binding is None
                or binding.layer is not layer
                or binding.cache() is not cache
                or binding.dtype is not dtype
            ):
                binding = self._bind(key, layer, cache, dtype)
            if binding.kept is not None:
                return choice, binding.kept
        raise AssertionError("the last kernel of a table takes every cache")

    def _bind(
        self,
        key: tuple[int, Kernel[Any]],
        layer: AttentionLayer,
        cache: LayerCache,
        dtype: torch.dtype,
    ) -> _Binding:
        bindings = self._bindings

        def forget(dead: weakref.ref[LayerCache]) -> None:
            binding = bindings.get(key)
            if binding is not None and binding.cache is dead:
                del bindings[key]

        kept = key[1].bind(layer, cache, dtype)
        binding = _Binding(layer, weakref.ref(cache, forget), dtype, kept)
        bindings[key] = binding
        return binding
