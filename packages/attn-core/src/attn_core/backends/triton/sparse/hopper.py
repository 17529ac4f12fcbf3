"""Launch Hopper's kernels of sparse MLA: scores of prompts, and latent decode over selections.

In the latter each query is a request, and each slot a page.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_core.backends.triton.hopper.common import AttentionConfig
from attn_core.backends.triton.hopper.mla_decode import decode_mla_hopper
from attn_core.backends.triton.hopper.stores import PANEL, SWIZZLED, rows_fit
from attn_core.backends.triton.portable.arguments import (
    Outputs,
    Partials,
    Requests,
    Scales,
    Store,
)
from attn_core.backends.triton.sparse.gather import counted, decoded
from attn_core.backends.triton.sparse.index_hopper import score_prompts_hopper
from attn_core.backends.triton.sparse.scoring import Scoring
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.merge import merge_states
from attn_core.runtime.batch import CacheView
from attn_core.runtime.layer import AttentionLayer

__all__ = ["attend", "decoded", "score", "takes"]
TILE = 64  # query heads, and keys of a block
SCORED_KEYS = 256  # of a program
ROWS, MANY_ROWS = 64, 256  # queries that pass by them, where there are few programs and many
MANY_PROGRAMS = 1024
BYTES = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
PLAIN = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def takes(q: Tensor, layer: AttentionLayer, cache: LayerCache) -> bool:
    """Say whether it serves a layer: latents of 512 + 64 columns in q's 16 bits, or in FP8."""
    dims = (q.shape[2], layer.v_head_dim) == (576, 512)
    if not dims or q.dtype.itemsize != 2:
        return False
    return bool(cache.latent_dim) or (cache.k.dtype is q.dtype and rows_fit(cache.k, "NHD"))


def attend(
    q: Tensor,
    layer: AttentionLayer,
    latents: Tensor,
    topk_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    processors: int,
) -> None:
    """Do what launch.attend does, for what `takes` says.

    latents: [pages, page size, 1, 576] in the dtype of q.
    """
    if not q.is_contiguous() or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    tokens, heads, dim = q.shape
    size = latents.shape[1]
    token = latents.stride(0) if size == 1 else latents.stride(1)
    strides = (size * token, token, dim)
    device, row_blocks = q.device, triton.cdiv(heads, TILE)
    blocks = triton.cdiv(topk_indices.shape[1], TILE)
    # as many units as there are programs to take them; in deterministic mode always as many
    wanted = max(1, processors // (tokens * row_blocks)) if processors else 8
    per_unit = triton.next_power_of_2(triton.cdiv(blocks, min(blocks, wanted)))
    units = triton.cdiv(blocks, per_unit)
    counts, ends, indptr = counted(topk_indices, units)
    partial_out, partial_lse = lse, lse
    if units > 1:
        shape = (tokens, units, row_blocks * TILE)
        partial_out = torch.empty(*shape, layer.v_head_dim, dtype=torch.float32, device=device)
        partial_lse = torch.empty(shape, dtype=torch.float32, device=device)
    config = AttentionConfig(
        HEADS=1, GROUP=heads, PAGE=1, HND=False, GATHERS=True, BN=TILE, D=dim, USE_SOFTCAP=False,
        USE_SINKS=False, MASK=0, WINDOW=False, STAGES=2, INT64_OFFSETS=True,
        ROW_BLOCKS=row_blocks, BLOCKS_PER_UNIT=per_unit, BATCH_INVARIANT=True,
    )  # fmt: skip
    rows = TensorDescriptor(q, [tokens * heads, dim], [dim, 1], [TILE, PANEL], SWIZZLED)
    parts = min(tokens * units, max(1, (processors or tokens * units) // row_blocks))
    decode_mla_hopper[(parts * row_blocks,)](
        rows, Outputs(out, lse, *out.stride()[:2]), Partials(partial_out, partial_lse),
        Requests(ends, counts, topk_indices), indptr, indptr, tokens, topk_indices.stride(0),
        Store(latents, *strides), Scales(layer.scale, 1.0, 1.0), config,
        num_warps=4,
    )  # fmt: skip
    if units > 1:
        states = partial_lse.mul_(math.log(2.0))  # they are in base 2
        order = (x.transpose(0, 1)[:, :, :heads] for x in (partial_out, states))
        merge_states(*order, into=(out, lse))


def score(
    x: Scoring,
    view: CacheView,
    cu_seqlens_q: Tensor,
    requests: Tensor,
    scores: Tensor,
    first: int,
    count: int,
    topk: int,
) -> None:
    """Do what launch.score does, where `on_hopper` says so."""
    tokens, heads, dim = x.q_index.shape
    rows = TensorDescriptor(
        x.q_index.view(tokens * heads, dim), [tokens * heads, dim], [dim, 1], [heads, dim], BYTES
    )
    w_rows = TensorDescriptor(x.weights, [tokens, heads], [heads, 1], [1, heads], PLAIN)
    columns = triton.cdiv(view.max_seq_len, SCORED_KEYS)
    many = triton.cdiv(count, MANY_ROWS) * columns >= MANY_PROGRAMS
    at_once = MANY_ROWS if many else ROWS
    table = view.page_table
    score_prompts_hopper[(triton.cdiv(count, at_once), columns)](
        rows, w_rows, x.keys, x.scales, *x.strides, table, table.stride(0),
        view.seq_lens, cu_seqlens_q, requests, first, count, scores, scores.stride(0), at_once,
        heads, x.constants.PAGE, topk, num_warps=4,
    )  # fmt: skip
