"""Sparse MLA (DSA): when a pass attends to all keys, and what its indexer and selection must be."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as cached

import torch
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache
from attn_core.cache.page_table import slot_table
from attn_core.errors import AttnError, BatchError, UnsupportedError
from attn_core.ops.index import write_index, write_latents_and_index
from attn_core.ops.kv import has_triton, read_pages, write_kv
from attn_core.runtime.backend import AttentionBackend, BackendConfig, Metadata
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.known import Known
from attn_core.runtime.layer import AttentionLayer
from attn_core.runtime.operands import check_pass
from attn_core.runtime.run_errors import run_error

_FEWEST = 128  # keys of a selection of all, which kernels take in steps of so many


def select_keys(
    backend: AttentionBackend,
    q_index: Tensor,
    k_index: Tensor | None,
    weights: Tensor,
    k: Tensor | None,
    layer: AttentionLayer,
    cache: LayerCache,
    batch: ForwardBatch,
    metadata: Metadata,
) -> Tensor | None:
    """Write new index keys and latents; return the slots that queries attend to, None for all.

    The arguments are those of HybridDispatcher.index_topk. Without slots in the layer's view the
    engine has written the keys.
    """
    key = (backend, layer.form, k_index is None, k is None)
    tensors = [x for x in (q_index, weights, k_index, k) if x is not None]
    slots = batch.views[layer.view].out_cache_loc
    known: Known | None = batch.known.get(key)
    if known is None or not known.fits(*tensors) or slots is not known.slots:
        check_indexer(backend.config, q_index, k_index, weights, layer, batch)
        check_pass(None, k, None, layer, batch, None)
        if k_index is not None and slots is not None and slots.shape[0] != batch.num_tokens:
            raise BatchError(
                f"layer {layer.layer_id}: out_cache_loc of view {layer.view!r} has "
                f"{slots.shape[0]} slots for the {batch.num_tokens} tokens of this pass"
            )
        known = batch.known[key] = Known.of(tensors, (k_index, k), slots)
    if slots is not None and k_index is not None:
        writer = cache.launchers.get(known.form)
        new = (k_index,) if k is None else (k_index, k)
        if writer is None or not writer(*new, slots, known.tokens):
            if k is None:
                write_index(cache, k_index, slots, known.form)
            else:
                write_latents_and_index(cache, k_index, k, slots, known.form)
    elif slots is not None and k is not None:
        write_kv(cache, k, None, slots)
    if batch.forward_mode is ForwardMode.EXTEND and dense_pass(layer, batch):
        return None
    try:
        return backend.index_topk(q_index, weights, layer, cache, batch, metadata)
    except AttnError:
        raise
    except Exception as error:  # a plugin's code: keep its error, name its owner
        raise run_error(backend.config, "index_topk", error, batch, layer) from error


def dense_pass(layer: AttentionLayer, batch: ForwardBatch) -> bool:
    """Say whether a layer of sparse MLA attends to all keys in this pass.

    It does in an extend whose requests hold at most layer.index_topk tokens: all of them would be
    selected. Only the index keys must be written. Decode and verification always select, so that a
    graph serves every length.
    """
    topk = layer.index_topk
    if topk is None or batch.forward_mode is not ForwardMode.EXTEND:
        return False
    return batch.views[layer.view].max_seq_len <= topk


def every_slot(layer: AttentionLayer, batch: ForwardBatch, page_size: int) -> Tensor:
    """Select every key that a query sees: token slots int32 [T, L], then -1.

    It makes a selection of a pass without one, for kernels and stores that only serve selections.
    L is the longest request, in steps: few numbers of keys are then compiled for. Never syncs.
    """
    view = batch.views[layer.view]
    slots = slot_table(view.page_table, page_size, view.max_seq_len)
    request = torch.searchsorted(
        batch.cu_seqlens_q[1:],
        torch.arange(batch.num_tokens, dtype=torch.int32, device=slots.device),
        right=True,
    ).clamp_(max=max(0, batch.batch_size - 1))
    token = torch.arange(batch.num_tokens, device=slots.device)
    remaining = batch.cu_seqlens_q[request + 1] - token  # a query and those after it
    position = torch.arange(slots.shape[1], device=slots.device)
    visible = position <= (view.seq_lens[request] - remaining)[:, None]
    chosen = torch.where(visible, slots[request], -1).int()
    width = max(_FEWEST, 1 << (max(1, view.max_seq_len) - 1).bit_length())
    return torch.nn.functional.pad(chosen, (0, width - chosen.shape[1]), value=-1)


def gather_pages(
    layer: AttentionLayer,
    cache: LayerCache,
    batch: ForwardBatch,
    topk_indices: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the pages of a pass in `dtype`, [n, page size, 1, D], and the selected slots in them.

    For kernels that read no FP8. Of a page that several requests share there are copies; any of
    them serves all. What lies in pages behind a request's keys may be anything. On a GPU with
    Triton FP8 latents are two launches. Never syncs.
    """
    view, size = batch.views[layer.view], cache.page_size
    gather = _gatherer(topk_indices.device.type) if cache.latent_dim else None
    if gather is not None:
        view_args = (view.page_table, view.seq_lens, view.max_seq_len)
        return gather(cache, *view_args, topk_indices, dtype)
    pages = view.page_table[:, : -(-view.max_seq_len // size)].flatten()
    latents, _ = read_pages(cache, pages, dtype)
    place = torch.empty(cache.num_pages, dtype=torch.int32, device=pages.device)
    place[pages.long()] = torch.arange(len(pages), dtype=torch.int32, device=pages.device)
    page = topk_indices.clamp(min=0) // size
    slots = place[page.long()] * size + topk_indices % size
    return latents, torch.where(topk_indices < 0, -1, slots)


@cached
def _gatherer(device_type: str) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return what gathers FP8 latents on a type of device, None for torch's own operators."""
    if not has_triton(device_type):
        return None
    from attn_core.ops.triton.gather import gather_pages

    return gather_pages


def check_topk(topk_indices: Tensor | None, layer: AttentionLayer, batch: ForwardBatch) -> None:
    """Raise BatchError for a selection that does not fit the pass, or for a missing one.

    Without one a layer attends to all keys, which the model was not trained for beyond
    layer.index_topk.
    """
    if topk_indices is None:
        view = batch.views.get(layer.view)
        longest = 0 if view is None else view.max_seq_len
        if layer.index_topk is not None and longest > layer.index_topk:
            raise BatchError(
                f"layer {layer.layer_id} attends to {layer.index_topk} keys per query, this pass "
                f"has up to {longest} and no topk_indices; take them from index_topk, or from the "
                "layer whose selection it shares"
            )
        return
    shape, rows = topk_indices.shape, batch.num_tokens
    if topk_indices.dtype != torch.int32 or len(shape) != 2 or shape[0] != rows or not shape[1]:
        raise BatchError(
            f"layer {layer.layer_id}: topk_indices {topk_indices.dtype} {list(shape)} (expected "
            f"int32 [{rows}, keys], 1 key or more: token slots of the layer's view, then -1)"
        )
    if topk_indices.stride(-1) != 1:
        raise BatchError(
            f"layer {layer.layer_id}: topk_indices with stride {topk_indices.stride(-1)} in their "
            "last dimension (expected 1)"
        )


def check_indexer(
    config: BackendConfig,
    q_index: Tensor,
    k_index: Tensor | None,
    weights: Tensor,
    layer: AttentionLayer,
    batch: ForwardBatch,
) -> None:
    """Raise for what index_topk cannot take: UnsupportedError by row or layer, else BatchError."""
    if config.row.kind != "dsa" or layer.index_topk is None:
        raise UnsupportedError(
            f"index_topk: layer {layer.layer_id} has index_topk {layer.index_topk}, the chosen row "
            f"of {config.name} is of kind {config.row.kind!r} (expected a number and 'dsa')"
        )
    tokens, shape = batch.num_tokens, q_index.shape
    if len(shape) != 3 or shape[0] != tokens or q_index.stride(-1) != 1:
        raise BatchError(
            f"layer {layer.layer_id}: q_index {list(q_index.shape)} (expected [{tokens}, index "
            "heads, index dim], its last dimension dense)"
        )
    _, heads, dim = shape
    if weights.shape != (tokens, heads) or weights.dtype != torch.float32:
        raise BatchError(
            f"layer {layer.layer_id}: weights {weights.dtype} {list(weights.shape)} (expected "
            f"float32 {[tokens, heads]})"
        )
    if k_index is not None and k_index.shape != (tokens, dim):
        raise BatchError(
            f"layer {layer.layer_id}: k_index {list(k_index.shape)} (expected {[tokens, dim]})"
        )
