"""What kernels keep of layers and their caches: strides, stores, descriptors and launchers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from attn_core.backends.triton.kernel import Choice, Kernel, PartT
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.launcher import Pointers, moved, pointers
from attn_core.runtime.layer import AttentionLayer


class _Binding(NamedTuple):
    layer: AttentionLayer
    pointers: Pointers
    kept: Any | None


def first_binding(
    choices: Sequence[Choice[PartT]],
    layer: AttentionLayer,
    cache: LayerCache,
    dtype: torch.dtype,
) -> tuple[Choice[PartT], Any]:
    """Return the first choice whose kernel can read this cache, and what it keeps.

    That is computed once for a layer, its cache and the dtype of the queries, and again for another
    layer of this number and when one of their tensors lies at another address. It goes when the
    cache goes.
    """
    for choice in choices:
        key = (choice.kernel, layer.layer_id, dtype)
        binding = cache.launchers.get(key)
        if binding is None or binding.layer is not layer or moved(binding.pointers):
            binding = cache.launchers[key] = _bind(choice.kernel, layer, cache, dtype)
        if binding.kept is not None:
            return choice, binding.kept
    raise AssertionError("the last kernel of a table takes every cache")


def _bind(
    kernel: Kernel[PartT], layer: AttentionLayer, cache: LayerCache, dtype: torch.dtype
) -> _Binding:
    tensors = (cache.k, cache.v, *(cache.block_scales or ()), layer.sinks)
    return _Binding(layer, pointers(*tensors), kernel.bind(layer, cache, dtype))
