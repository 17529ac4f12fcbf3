"""What kernels keep of layers and their caches: strides, stores, descriptors and launchers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from attn_core.backends.triton.kernel import Call, Choice, Launchers, Part, PartT
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.launcher import Pointers, moved, pointers
from attn_core.runtime.layer import AttentionLayer


class _Bound(NamedTuple):
    """The launchers of one layer and its cache for calls with one key in alike passes.

    pointers: where their tensors lie.
    """

    layer: AttentionLayer
    pointers: Pointers
    choice: Choice[Any]
    launchers: Launchers


def run(call: Call, part: Part) -> None:
    """Launch the first kernel of a part that can read this call's cache, and its merge.

    Launchers are bound to a layer and its cache once for all passes that are alike, and again for
    another layer of this number and when one of their tensors lies at another address. They go when
    the cache goes.
    """
    layer, bindings = call.layer, call.cache.launchers
    if part.inputs is not call.inputs:
        part.read(call.inputs)
    key = (part.pass_key, layer.layer_id, call.key)
    bound = bindings.get(key)
    if bound is None or bound[0] is not layer or moved(bound[1]):
        bound = bindings[key] = _bind(call, part)
    _, _, choice, (attend, merge, change) = bound
    of_pass = part.launches.get(choice.kernel)
    if of_pass is None:
        of_pass = choice.kernel.pass_launch(call, choice.launch, part)
        part.launches[choice.kernel] = of_pass
    grid, shared, of_merge = of_pass
    if change is not None:
        call = change(call)
    outputs = call.outputs
    args = (call.queries, outputs, *shared.addresses, *call.rows)
    attend.launch(grid, args, call.tensors, call.with_row_tensors(shared.values))
    if merge is not None and of_merge is not None:
        grid, shared = of_merge
        merge.launch(grid, (outputs, *shared.addresses), call.output_tensors, shared.values)


def _bind(call: Call, part: Part) -> _Bound:
    layer, cache = call.layer, call.cache
    choice, bound = first_fit(part.choices, layer, cache, call.q.dtype)
    tensors = (cache.k, cache.v, *(cache.block_scales or ()), layer.sinks)
    launchers = choice.kernel.make_launchers(call, bound, choice.launch, part)
    return _Bound(layer, pointers(*tensors), choice, launchers)


def first_fit(
    choices: Sequence[Choice[PartT]],
    layer: AttentionLayer,
    cache: LayerCache,
    dtype: torch.dtype,
) -> tuple[Choice[PartT], Any]:
    """Return the first choice whose kernel can read this cache, and what the kernel is given of it.

    dtype: of the queries.
    """
    for choice in choices:
        bound = choice.kernel.bind(layer, cache, dtype)
        if bound is not None:
            return choice, bound
    raise AssertionError("the last kernel of a table takes every cache")
