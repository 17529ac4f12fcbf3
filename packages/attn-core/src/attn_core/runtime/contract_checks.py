"""Refuse what a backend's row does not support, so that nothing is dropped silently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn, get_args

import torch
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache
from attn_core.cache.pool import CachePool
from attn_core.errors import BackendError, BatchError, UnsupportedError
from attn_core.runtime.backend import AttentionBackend, BackendConfig, Output
from attn_core.runtime.batch import DECODE_MODES, ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.selection.compatibility import layer_gaps
from attn_core.spec.kinds import GraphLevel
from attn_core.spec.requirements import LayerRequirements


def refuse_layer(config: BackendConfig, layer: AttentionLayer) -> None:
    """Raise UnsupportedError for a layer's shape or field that the row does not support."""
    row, chunks = config.row, layer.dual_chunk
    needs = LayerRequirements.of(layer, row.kind)
    if chunks is not None and chunks.chunk_len % config.page_size:
        raise UnsupportedError(
            f"layer {layer.layer_id} has dual chunk attention {chunks}, which pages of "
            f"{config.page_size} do not divide; create the pool with pages that do"
        )
    gaps = "; ".join(map(str, layer_gaps(row, needs, row.family)))
    if layer.index_topk is not None and row.kind != "dsa":
        raise UnsupportedError(
            f"layer {layer.layer_id} attends to {layer.index_topk} keys per query, the chosen row "
            f"of {config.name} is of kind {row.kind!r} and attends to all; select with layers of "
            "kind 'dsa'"
        )
    if gaps:
        raise UnsupportedError(
            f"layer {layer.layer_id} needs {gaps}, the chosen row of {config.name} does not honour "
            "it; state it in the Requirements, so that select() finds a backend that does"
        )


def refuse_scales(config: BackendConfig, layer: AttentionLayer, cache: LayerCache) -> None:
    """Raise UnsupportedError for scales in tensors, of a row that takes numbers alone."""
    if config.row.tensor_scales:
        return
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if isinstance(scale, Tensor):
            raise UnsupportedError(
                f"layer {layer.layer_id}: {name} is a tensor, the chosen row of {config.name} has "
                "no tensor_scales and takes numbers; create the pool with numbers, or name a "
                "backend that reads scales on the device"
            )


def refuse_pages(config: BackendConfig, caches: CachePool) -> None:
    """Raise UnsupportedError for a pool of pages that the backend was not created for."""
    row, pool = config.row, (caches.page_size, caches.kv_cache_dtype)
    if pool != (config.page_size, config.kv_cache_dtype):
        raise UnsupportedError(
            f"a pool of {pool[0]} tokens a page in {pool[1]}, {config.name} was created for "
            f"{config.page_size} in {config.kv_cache_dtype}; create both alike"
        )
    if caches.layout not in row.layouts:
        raise UnsupportedError(
            f"a pool in layout {caches.layout}, the chosen row of {config.name} takes "
            f"{', '.join(sorted(row.layouts))}; create the pool in the selection's layout"
        )
    split = row.page_sizes and caches.page_size not in row.page_sizes
    if split and caches.layout == "HND":
        raise UnsupportedError(
            f"a pool in layout HND of {caches.page_size} tokens a page, which {config.name} would "
            f"split into its own ({', '.join(map(str, sorted(row.page_sizes)))}): the parts of a "
            "page are not contiguous across heads; take layout NHD or one of these page sizes"
        )


def refuse_lengths(batch: ForwardBatch, page_size: int) -> None:
    """Raise BatchError for a view of other pages, and for more keys than its table has columns for.

    The latter where the host knows the lengths.
    """
    for name, view in batch.views.items():
        if view.page_size not in (None, page_size):
            raise BatchError(
                f"view {name!r} was built for pages of {view.page_size} tokens, the pool has pages "
                f"of {page_size}: its slots would be those of other tokens; build it with the "
                "pool's page_size"
            )
        capacity = view.page_table.shape[1] * page_size
        if view.max_seq_len <= capacity:  # an upper bound, which may be above it
            continue
        lengths: Sequence[int] | None = view.seq_lens_host
        if lengths is None and view.seq_lens.is_cpu:
            lengths = view.seq_lens.tolist()
        if lengths is not None and max(lengths, default=0) > capacity:
            raise BatchError(
                f"view {name!r}: a request of {max(lengths)} tokens, and a page table of "
                f"{view.page_table.shape[1]} columns of {page_size} tokens; give it more columns"
            )


def refuse_host_lengths(batch: ForwardBatch) -> None:
    """Raise BatchError for lengths on the host that are not those of the tensor, only on a CPU.

    Backends read the one or the other. A request that only pads the batch may be as long as its
    queries on the host alone.
    """
    for name, view in batch.views.items():
        host = view.seq_lens_host
        if host is None or type(view.seq_lens) is not Tensor or not view.seq_lens.is_cpu:
            continue
        lengths: list[int] = view.seq_lens.tolist()
        if lengths == [*host]:
            continue
        queries = None if name == "cross" else batch.query_lens_host
        least = queries or (0,) * len(lengths)
        for i, (n, known, q) in enumerate(zip(lengths, host, least, strict=True)):
            if known != max(n, q):
                raise BatchError(
                    f"view {name!r}, request {i}: seq_lens_host {known}, seq_lens {n}; give the "
                    "same, or leave seq_lens_host out"
                )


def refuse_window(name: str, layer: AttentionLayer, *, causal: bool | None = None) -> None:
    """Raise UnsupportedError for a non-causal sliding window, which `name` does not support.

    causal: that of this call, if it differs from the layer's.
    """
    causal = layer.is_causal if causal is None else causal
    if layer.sliding_window is not None and (layer.is_cross or not causal):
        raise UnsupportedError(
            f"layer {layer.layer_id}: a sliding window of {layer.sliding_window} without causal "
            f"order; {name} windows only causal self-attention: unset the one or the other"
        )


def refuse_unplanned(layer: AttentionLayer, planned: Iterable[object]) -> NoReturn:
    """Raise BackendError for a layer that is not in this pass's plan; planned: what is in it."""
    raise BackendError(
        f"layer {layer.layer_id} (view {layer.view!r}) was not planned: its group is not in "
        f"BackendConfig.layers or the batch has no such view; planned: {list(planned)}"
    )


def refuse_call(config: BackendConfig, *, return_lse: bool, sparse: bool = False) -> None:
    """Raise UnsupportedError for an LSE, or sparse topk_indices, that the row does not support."""
    if return_lse and not config.row.lse:
        raise UnsupportedError(
            f"return_lse: the chosen row of {config.name} returns no log-sum-exp; select with "
            "Requirements(lse=True)"
        )
    if sparse and config.row.kind != "dsa":
        raise UnsupportedError(
            f"topk_indices: the chosen row of {config.name} is of kind {config.row.kind!r} (only "
            "'dsa' takes them); select with layers of kind 'dsa'"
        )


def refuse_mode(config: BackendConfig, mode: ForwardMode) -> None:
    """Raise UnsupportedError for a pass over the cache if the MLA row is for ragged attention."""
    if config.row.absorbed:
        return
    raise UnsupportedError(
        f"{mode.value}: the chosen row of {config.name} has no absorbed attention, no pass over "
        "the latent cache; write the new latents with write_kv and call forward_ragged on the "
        "heads before absorption (192/128), for a prefix chunk by chunk, merged by log-sum-exp; "
        "or select another prefill backend"
    )


def graph_level(batch: ForwardBatch) -> GraphLevel:
    """Return the lowest level of CUDA graphs at which such a pass can be captured."""
    if batch.forward_mode in DECODE_MODES:
        return "decode"
    return "uniform" if batch.num_tokens == batch.batch_size * batch.max_q_len else "always"


def refuse_capture(
    config: BackendConfig, batch: ForwardBatch, captured: Sequence[AttentionBackend] | None = None
) -> None:
    """Raise UnsupportedError for a pass beyond the row's CUDA graph level.

    captured: the backends that are captured; None if this one is.
    """
    levels = get_args(GraphLevel)
    if captured is not None and config not in [b.config for b in captured]:
        names = ", ".join(b.config.name for b in captured) or "nothing"
        raise UnsupportedError(
            f"{batch.forward_mode.value} passes run on {config.name}, which is not "
            f"captured in CUDA graphs (captured: {names}); run the pass eagerly"
        )
    level, needed = config.row.cuda_graph, graph_level(batch)
    if levels.index(level) < levels.index(needed):
        raise UnsupportedError(
            f"this {batch.forward_mode.value} pass in a CUDA graph needs cuda_graph {needed!r}, "
            f"the chosen row of {config.name} has {level!r}; run the pass eagerly, or select "
            "with Requirements(graphs=True)"
        )
    refuse_sparse_capture(config, batch)


def refuse_sparse_capture(config: BackendConfig, batch: ForwardBatch) -> None:
    """Raise UnsupportedError for a captured pass in which a prompt may be sparse."""
    if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
        return
    for layer in config.layers:
        chunks, view = layer.dual_chunk, batch.views.get(layer.view)
        threshold = None if chunks is None else chunks.sparse_threshold
        if threshold is not None and view is not None and view.max_seq_len > threshold:
            raise UnsupportedError(
                f"this {batch.forward_mode.value} pass in a CUDA graph may have prompts of "
                f"{view.max_seq_len} tokens, and layer {layer.layer_id} has dual chunk attention "
                f"{chunks}: lengths decide on the host; run the pass eagerly, or capture it for "
                f"at most {threshold} tokens"
            )


def refuse_drafts(config: BackendConfig, batch: ForwardBatch) -> None:
    """Raise UnsupportedError for a verify pass whose drafts the row cannot verify."""
    if batch.forward_mode is not ForwardMode.TARGET_VERIFY or batch.spec is None:
        return
    limit, topk = config.row.max_verify_topk, batch.spec.topk
    tree = batch.spec.tree_mask is not None
    if any(layer.dual_chunk is not None for layer in config.layers):
        limit = min(limit, 1)  # chunks are cut by the order of the drafts
    if topk <= limit and (limit > 1 or not tree):
        return
    chains = "chains, topk 1 without a tree_mask" if limit == 1 else "no drafts"
    supported = f"trees up to topk {limit}" if limit > 1 else chains
    raise UnsupportedError(
        f"{config.name} asked to verify topk {topk}{' with a tree_mask' * tree}, its chosen row "
        f"verifies {supported}; select with this speculation in the Requirements"
    )


def refuse_output(
    config: BackendConfig,
    result: Output,
    q: Tensor,
    layer: AttentionLayer,
    out: Tensor | None,
    return_lse: bool,
) -> None:
    """Raise BackendError if a backend's output violates the contract.

    The output is [T, Hq, Dv] in the dtype of q, or `out` itself if it was passed; with return_lse
    also the LSE, float32 [T, Hq].
    """
    rows = (q.shape[0], layer.num_q_heads)
    promised: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("out", (*rows, layer.v_head_dim), q.dtype if out is None else out.dtype)
    ]
    outputs: tuple[Output, ...] = (result,)
    if return_lse:
        promised.append(("lse", rows, torch.float32))
        outputs = result if isinstance(result, tuple) else (result,)
    if len(outputs) != len(promised):
        _broke(config, layer, f"{len(outputs)} value", "(out, lse)")
    for value, (name, shape, dtype) in zip(outputs, promised, strict=True):
        expected = f"{list(shape)} {dtype}"
        if not isinstance(value, Tensor):
            _broke(config, layer, f"{name} as {type(value).__name__}", f"a tensor {expected}")
        if value.shape != shape or value.dtype != dtype:
            _broke(config, layer, f"{name} {list(value.shape)} {value.dtype}", expected)
    if out is not None and outputs[0] is not out:
        _broke(config, layer, "a new tensor", "the one given as `out`, filled")


def _broke(config: BackendConfig, layer: AttentionLayer, returned: str, expected: str) -> NoReturn:
    raise BackendError(
        f"{config.name} returned {returned} for layer {layer.layer_id} (expected {expected}): its "
        "backend breaks the contract, tell its author"
    )
