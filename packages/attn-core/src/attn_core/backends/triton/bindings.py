"""What kernels keep of layers and their caches, as long as these are the same."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_core.backends.triton.kernel import Choice, Kernel, PartT
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.launcher import Pointers, moved, pointers
from attn_core.runtime.layer import AttentionLayer


@dataclass(frozen=True, eq=False)
class _Binding:
    layer: AttentionLayer
    cache: weakref.ref[LayerCache]
    dtype: torch.dtype
    pointers: Pointers
    kept: Any | None


class Bindings:
    """What kernels keep of layers and their caches: strides, stores and descriptors.

    It is computed once for a layer and a cache, and again when one of them is another object, one
    of their tensors lies at another address, or the queries are of another dtype. A cache that is
    no longer used elsewhere is not kept alive.
    """

    def __init__(self) -> None:
        self._bindings: dict[tuple[int, Kernel[Any]], _Binding] = {}

    def first(
        self,
        choices: Sequence[Choice[PartT]],
        layer: AttentionLayer,
        cache: LayerCache,
        dtype: torch.dtype,
    ) -> tuple[Choice[PartT], Any]:
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
                or moved(binding.pointers)
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
        tensors = (cache.k, cache.v, *(cache.block_scales or ()), layer.sinks)
        binding = _Binding(layer, weakref.ref(cache, forget), dtype, pointers(*tensors), kept)
        bindings[key] = binding
        return binding
