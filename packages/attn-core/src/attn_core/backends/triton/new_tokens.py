"""Passes whose new tokens are all the keys there are: prompts without a prefix in the cache."""

from __future__ import annotations

from dataclasses import replace

from attn_core.backends.triton.kernel import Choice, NewTokensKernel, Pass, Shape
from attn_core.backends.triton.portable.arguments import Requests
from attn_core.backends.triton.schedule import Tiles
from attn_core.runtime.backend import BackendConfig
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.layer import LayerGroup


def are_all_keys(config: BackendConfig, group: LayerGroup, batch: ForwardBatch) -> bool:
    """Say whether a pass's own K and V are all that its requests attend to, as lengths say.

    A cache of another dtype holds rounded keys, and an encoder's are not those of the pass.
    """
    if batch.forward_mode is not ForwardMode.EXTEND or group.view == "cross":
        return False
    if config.row.kind != "mha" or config.kv_cache_dtype != config.dtype:
        return False
    queries, keys = batch.query_lens_host, batch.views[group.view].seq_lens_host
    return queries is not None and queries == keys


def new_tokens(
    kernel: NewTokensKernel | None, shape: Shape, batch: ForwardBatch, tiles: Tiles
) -> tuple[Pass, Tiles] | None:
    """Return what reads a pass's own K and V, and its tiles; None without a kernel for it.

    Keys of a request begin where its queries do. tiles: over the cache, whose order is the same.
    """
    launch = None if kernel is None or not tiles.ordered else kernel.choose(shape, None)
    if kernel is None or launch is None:
        return None
    starts = batch.cu_seqlens_q
    requests = Requests(starts, starts, starts)
    inputs = Pass(requests, batch.positions, causal=shape.group.causal)
    return inputs, replace(tiles, choices=(Choice(kernel, launch),))
