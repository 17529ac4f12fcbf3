"""What an attention kernel is to the scheduler and the backend."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from attn_core.backends.triton.masks import mask_mode
from attn_core.backends.triton.portable.arguments import Outputs, Queries, Requests
from attn_core.backends.triton.tuning import Launch
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.launcher import alike, numbered
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
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


class Pass:
    """What all layers of a group read in a pass: its requests, and the drafts that it verifies.

    requests: cu_seqlens_q int32 [size + 1], seq_lens int32 [size], page_table int32 [size,
    columns]. In a ragged call there is no table, the cache is one page of all tokens, and seq_lens
    is its cu_seqlens. tree: its mask uint8 [size, n, n] if there is one. mask: see masks.py.
    batch: where they come from. key: of what Triton specialises of these.
    """

    __slots__ = ("batch", "drafts", "key", "mask", "positions", "requests", "size", "tree")

    def __init__(
        self,
        requests: Requests,
        positions: Tensor,
        *,
        causal: bool,
        drafts: SpecInfo | None = None,
        batch: ForwardBatch | None = None,
    ) -> None:
        tree = None if drafts is None else drafts.tree_mask
        self.batch = batch
        self.requests = requests
        self.size = requests.cu_seqlens_q.shape[0] - 1
        self.positions = positions
        self.tree = None if tree is None else tree.contiguous().view(torch.uint8)
        self.drafts = 0 if drafts is None else drafts.num_draft_tokens
        self.mask = mask_mode(drafts, causal=causal)
        tensors = (*requests, positions, *(() if self.tree is None else (self.tree,)))
        self.key = numbered((self.mask, self.table_stride >> 31, self.paged, *map(alike, tensors)))

    @classmethod
    def of(cls, group: LayerGroup, batch: ForwardBatch) -> Pass:
        """Return what layers of a group read of a batch."""
        view = batch.views[group.view]
        drafts = batch.spec if batch.forward_mode is ForwardMode.TARGET_VERIFY else None
        requests = Requests(batch.cu_seqlens_q, view.seq_lens, view.page_table)
        return cls(requests, batch.positions, causal=group.causal, drafts=drafts, batch=batch)

    @property
    def paged(self) -> bool:
        """Whether keys lie in pages."""
        return self.batch is not None

    @property
    def table_stride(self) -> int:
        """Elements from one row of the page table to the next; 0 without one."""
        return 0 if self.batch is None else int(self.requests.page_table.stride(0))


class Call(NamedTuple):
    """One layer's attention: q [T, Hq, D] over a cache into out [T, Hq, Dv], lse float32 [T, Hq].

    queries, outputs: q, out and lse with their strides, as kernels take them.
    key: of what Triton specialises of these, but for layer and cache.
    """

    q: Tensor
    layer: AttentionLayer
    cache: LayerCache
    inputs: Pass
    queries: Queries
    outputs: Outputs
    key: Hashable

    @classmethod
    def of(
        cls,
        q: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        inputs: Pass,
        out: Tensor,
        lse: Tensor,
    ) -> Call:
        """Return a call with its key."""
        of_q, of_out = q.stride(), out.stride()
        key = (inputs.key, of_q, of_out, alike(q), alike(out))
        outputs = Outputs(out, lse, of_out[0], of_out[1])
        return cls(q, layer, cache, inputs, Queries(q, of_q[0], of_q[1]), outputs, key)


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
