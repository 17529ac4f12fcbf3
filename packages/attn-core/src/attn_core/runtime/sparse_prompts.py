"""Sparse prompts of dual chunk attention: which requests of a pass are, and how they attend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_core.cache.layer_cache import LayerCache
from attn_core.cache.page_table import slot_table
from attn_core.errors import UnsupportedError
from attn_core.ops.kv import read_kv
from attn_core.ops.vertical_slash import Kernels, attend_prompt
from attn_core.runtime.backend import AttentionBackend, Metadata, Output
from attn_core.runtime.batch import ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer, LayerGroup
from attn_core.spec.dual_chunk import DualChunk

PROMPT_MODES = frozenset({ForwardMode.EXTEND, ForwardMode.MIXED})


class Prompt(NamedTuple):
    """A sparse prompt: its request, and its tokens among those of the pass."""

    request: int
    first: int
    tokens: int


class Cut(NamedTuple):
    """A pass cut into its sparse prompts and the rest, in which these have no queries.

    rows: int64, the tokens of the rest. metadata: the plan of the rest, None where it has no token.
    """

    prompts: tuple[Prompt, ...]
    rest: ForwardBatch
    rows: Tensor
    metadata: Metadata


@dataclass(frozen=True, eq=False)
class SparsePrompts:
    """The plan of a pass with sparse prompts.

    whole: of all requests, for layers without sparse prompts. cuts: for groups of layers with them.
    """

    whole: Metadata
    cuts: Mapping[LayerGroup, Cut]


def plan_sparse(
    layers: Iterable[AttentionLayer],
    batch: ForwardBatch,
    plan: Callable[[ForwardBatch], Metadata],
) -> Metadata:
    """Return the backend's own plan of a pass, in a SparsePrompts where prompts of it are sparse.

    A pass that may have one and has no lengths on the host asks the device. Raises UnsupportedError
    for a part of a sparse prompt: its lines depend on how it is cut.
    """
    cuts: dict[LayerGroup, Cut] = {}
    for group in {layer.group for layer in layers}:
        chunks = group.dual_chunk
        if chunks is None or chunks.sparse_threshold is None or group.view not in batch.views:
            continue
        prompts = _sparse_prompts(batch, group.view, chunks, chunks.sparse_threshold)
        if prompts:
            cuts[group] = _cut(batch, prompts, plan)
    dense_plan = plan(batch)
    return SparsePrompts(dense_plan, cuts) if cuts else dense_plan


def _sparse_prompts(
    batch: ForwardBatch, view: str, chunks: DualChunk, threshold: int
) -> tuple[Prompt, ...]:
    of_view = batch.views[view]
    if batch.forward_mode not in PROMPT_MODES or of_view.max_seq_len <= threshold:
        return ()
    query_lens, seq_lens = batch.query_lens_host, of_view.seq_lens_host
    if query_lens is None:
        query_lens = tuple(batch.cu_seqlens_q.diff().tolist())
    if seq_lens is None:
        seq_lens = tuple(of_view.seq_lens.tolist())
    prompts, first = [], 0
    for request, (n, s) in enumerate(zip(query_lens, seq_lens, strict=True)):
        decodes = n == 1 and s > 1 and batch.forward_mode is ForwardMode.MIXED
        if n and s > threshold and not decodes:
            if n < s:
                raise UnsupportedError(
                    f"request {request} hands over {n} of {s} tokens: dual chunk attention "
                    f"{chunks} chooses lines from the last queries of a prompt, so its result "
                    "depends on how a prompt is cut; hand it over whole (no chunked prefill, no "
                    "prefix cache), or set dual_chunk_attention_config.sparse_attention_enabled "
                    "to false, and every prompt attends to all tokens"
                )
            prompts.append(Prompt(request, first, n))
        first += n
    return tuple(prompts)


def _cut(
    batch: ForwardBatch, prompts: tuple[Prompt, ...], plan: Callable[[ForwardBatch], Metadata]
) -> Cut:
    device = batch.positions.device
    queries = batch.cu_seqlens_q.diff()
    dense_tokens = torch.ones(batch.num_tokens, dtype=torch.bool, device=device)
    for prompt in prompts:
        queries[prompt.request] = 0
        dense_tokens[prompt.first : prompt.first + prompt.tokens] = False
    rows = dense_tokens.nonzero().squeeze(1)
    sparse = {prompt.request for prompt in prompts}
    lens = batch.query_lens_host
    dense = replace(
        batch,
        cu_seqlens_q=torch.nn.functional.pad(queries.cumsum(0, dtype=torch.int32), (1, 0)),
        positions=batch.positions[rows],
        query_lens_host=lens and tuple(0 if b in sparse else n for b, n in enumerate(lens)),
        views={name: replace(x, out_cache_loc=None) for name, x in batch.views.items()},
        checkpoint_slots=None,  # of linear layers, which attend to the whole batch
    )
    return Cut(prompts, dense, rows, plan(dense) if len(rows) else None)


def attend_sparse(
    backend: AttentionBackend,
    plan: SparsePrompts,
    q: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    batch: ForwardBatch,
    kernels: Kernels,
    *,
    out: Tensor | None,
    return_lse: bool,
) -> Output:
    """Run a layer of a pass with sparse prompts: these one by one, the rest by the backend.

    Keys and values of a prompt are gathered first, in the dtype of q.
    """
    cut = plan.cuts.get(layer.group)
    options: dict[str, Any] = {"return_lse": return_lse}
    if cut is None:
        return backend.forward(q, None, None, layer, cache, batch, plan.whole, out=out, **options)
    chunks, sizes = layer.dual_chunk, layer.vertical_slash
    assert chunks is not None  # a cut of its group
    assert sizes is not None  # AttentionLayer checks it
    if out is None:
        out = q.new_empty(q.shape[0], layer.num_q_heads, layer.v_head_dim)
    lse = torch.empty(q.shape[0], layer.num_q_heads, dtype=torch.float32, device=q.device)
    if len(cut.rows):
        output = backend.forward(
            q[cut.rows], None, None, layer, cache, cut.rest, cut.metadata, **options
        )
        dense, dense_lse = output if isinstance(output, tuple) else (output, None)
        out[cut.rows] = dense
        if dense_lse is not None:
            lse[cut.rows] = dense_lse
    table = batch.views[layer.view].page_table
    for request, first, n in cut.prompts:
        slots = slot_table(table[request : request + 1], cache.page_size, n)[0]
        k, v = read_kv(cache, slots, q.dtype)
        assert v is not None  # only a latent has none
        rows = slice(first, first + n)
        out[rows], lse[rows] = attend_prompt(
            q[rows],
            k,
            v,
            sizes,
            scale=layer.scale,
            chunk_len=chunks.chunk_len,
            last_queries=chunks.sparse_last_queries,
            kernels=kernels,
        )
    return (out, lse) if return_lse else out
