"""Launch Hopper's latent decode over selections: each query is a request over pages of one token."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
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
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.merge import merge_states
from attn_core.runtime.layer import AttentionLayer

TILE = 64  # query heads, and keys of a block


def takes(q: Tensor, layer: AttentionLayer, cache: LayerCache, arch: str | None) -> bool:
    """Say whether it serves a layer and a cache: 512 + 64 columns of 16 bits on sm90."""
    dims = (q.shape[2], layer.v_head_dim) == (576, 512)
    stores = q.dtype.itemsize == 2 and cache.k.dtype is q.dtype and cache.k.shape[2] == 1
    return arch == "sm90" and dims and stores and rows_fit(cache.k, "NHD")


def attend(
    q: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    topk_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    processors: int,
) -> None:
    """Do what launch.attend does, for what `takes` says."""
    if not q.is_contiguous() or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    tokens, heads, dim = q.shape
    device, row_blocks = q.device, triton.cdiv(heads, TILE)
    blocks = triton.cdiv(topk_indices.shape[1], TILE)
    # as many units as there are programs to take them; in deterministic mode always as many
    wanted = max(1, processors // (tokens * row_blocks)) if processors else 8
    per_unit = triton.next_power_of_2(triton.cdiv(blocks, min(blocks, wanted)))
    units = triton.cdiv(blocks, per_unit)
    counts = topk_indices.ge(0).sum(1, dtype=torch.int32)
    ends = torch.arange(tokens + 1, dtype=torch.int32, device=device)
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
    rows = TensorDescriptor(
        q, [tokens * heads, dim], [dim, 1], [TILE, PANEL], SWIZZLED
    )
    parts = min(tokens * units, max(1, (processors or tokens * units) // row_blocks))
    decode_mla_hopper[(parts * row_blocks,)](
        rows, Outputs(out, lse, *out.stride()[:2]), Partials(partial_out, partial_lse),
        Requests(ends, counts, topk_indices), ends * units, tokens, topk_indices.stride(0),
        Store(cache.k, *cache.k.stride()[:3]), Scales(layer.scale, 1.0, 1.0), config,
        num_warps=4,
    )  # fmt: skip
    if units > 1:
        states = partial_lse.mul_(math.log(2.0))  # they are in base 2
        order = (x.transpose(0, 1)[:, :, :heads] for x in (partial_out, states))
        merge_states(*order, into=(out, lse))
