"""Launch the attention kernels: grids, strides and constants out of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from attn_core.backends.triton.masks import mask_mode
from attn_core.backends.triton.portable.arguments import (
    Constants,
    KVCache,
    MergeConstants,
    Outputs,
    Partials,
    Queries,
    Requests,
    Scales,
    Split,
    Store,
    Tree,
)
from attn_core.backends.triton.portable.decode import decode_splits, merge_splits, plan_splits
from attn_core.backends.triton.portable.prefill import extend_tiles
from attn_core.backends.triton.split_kv import Splits
from attn_core.backends.triton.tuning import Launch, head_parts, merge_tile, power_of_two
from attn_core.cache.layer_cache import LayerCache
from attn_core.errors import UsageError
from attn_core.runtime.batch import SpecInfo
from attn_core.runtime.layer import AttentionLayer


def plan(
    splits: Splits,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    window: int | None,
    *,
    causal: bool,
) -> None:
    """Fill splits.work_indptr for a batch: one small launch, which a CUDA graph can record."""
    batch = seq_lens.shape[0]
    plan_splits[(1,)](
        cu_seqlens_q,
        seq_lens,
        splits.work_indptr,
        batch,
        window or 0,
        BN=splits.launch.block_n,
        BLOCKS_PER_UNIT=splits.blocks_per_unit,
        WINDOW=window is not None,
        CAUSAL=causal,
        BLOCK=min(1024, power_of_two(batch)),
        num_warps=4,
    )


def decode(
    q: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    positions: Tensor,
    spec: SpecInfo | None,
    splits: Splits,
    out: Tensor,
    lse: Tensor,
    hopper: ModuleType | None = None,
) -> None:
    """Attend with few queries a request; fill out [T, Hq, Dv] and lse float32 [T, Hq].

    hopper: the module hopper.launch, on a Hopper.
    """
    heads, group = layer.num_kv_heads, layer.num_q_heads // layer.num_kv_heads
    batch, launch = seq_lens.shape[0], splits.launch
    tiles = batch * heads * splits.row_blocks
    if not tiles:
        return
    mask, requests = mask_mode(layer, spec), Requests(cu_seqlens_q, seq_lens, page_table)
    outputs = Outputs(out, lse, out.stride(0), out.stride(1))
    partial = Partials(splits.partial_out, splits.partial_lse)
    split = Split(
        splits.row_blocks, splits.blocks_per_unit, splits.batch_invariant, splits.min_units
    )
    sinks = q if layer.sinks is None else layer.sinks
    v_scale = cache.k_scale if cache.v is None else cache.v_scale
    if hopper and hopper.mla_fits(q, layer, cache, splits, mask):
        hopper.decode_mla_on_hopper(q, layer, cache, *requests, splits, out, lse, mask)
    elif hopper and hopper.decode_fits(q, layer, cache, splits, mask):
        hopper.decode_on_hopper(q, layer, cache, *requests, spec, splits, out, lse, mask)
    else:
        stores = _stores(cache)
        decode_splits[(splits.programs,)](
            Queries(q, q.stride(0), q.stride(1)),
            stores,
            outputs,
            partial,
            requests,
            splits.work_indptr,
            _tree(spec, q, positions),
            sinks,
            Scales(layer.scale * cache.k_scale, layer.logit_cap or 1.0, v_scale),
            batch,
            layer.sliding_window or 0,
            spec.num_draft_tokens if spec is not None else 0,
            page_table.stride(0),
            BM=launch.block_m,
            BN=launch.block_n,
            STAGES=launch.stages,
            OVERLAP=splits.overlap,
            SPLIT=split,
            C=_constants(layer, cache, stores, launch, mask, cache.page_size),
            num_warps=launch.warps,
            num_stages=launch.stages,
            **({"maxnreg": launch.max_registers} if launch.max_registers else {}),
        )
    if splits.unsplit:
        return
    width = power_of_two(layer.v_head_dim)
    columns, rows, partials, warps = merge_tile(tiles, splits.tile_rows, splits.programs, width)
    merge_splits[(tiles, -(-splits.tile_rows // rows), width // columns)](
        partial,
        outputs,
        cu_seqlens_q,
        splits.work_indptr,
        sinks,
        batch,
        v_scale,
        splits.programs,
        BM=launch.block_m,
        ROWS=rows,
        COLUMNS=columns,
        PARTIALS=partials,
        OVERLAP=splits.overlap,
        SPLIT=split,
        C=MergeConstants(heads, group, layer.v_head_dim, width, layer.sinks is not None),
        num_warps=warps,
        **({"launch_pdl": True} if splits.overlap else {}),
    )


def extend(
    q: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    cu_seqlens_q: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    positions: Tensor,
    spec: SpecInfo | None,
    launch: Launch,
    out: Tensor,
    lse: Tensor,
    mask: int,
) -> None:
    """Attend with many queries under the mask MASK_…; fill out [T, Hq, Dv] and lse float32 [T, Hq].

    Without a page_table `cache` holds plain K and V as one page, and `lengths` is their cu_seqlens.
    """
    heads, group = layer.num_kv_heads, layer.num_q_heads // layer.num_kv_heads
    batch = cu_seqlens_q.shape[0] - 1
    tiles = q.shape[0] * group // launch.block_m + batch
    if not batch:
        return
    stores = _stores(cache)
    v_scale = cache.k_scale if cache.v is None else cache.v_scale
    extend_tiles[(tiles, heads)](
        Queries(q, q.stride(0), q.stride(1)),
        stores,
        Outputs(out, lse, out.stride(0), out.stride(1)),
        Requests(cu_seqlens_q, lengths, lengths if page_table is None else page_table),
        _tree(spec, q, positions),
        q if layer.sinks is None else layer.sinks,
        Scales(layer.scale * cache.k_scale, layer.logit_cap or 1.0, v_scale),
        batch,
        layer.sliding_window or 0,
        spec.num_draft_tokens if spec is not None else 0,
        0 if page_table is None else page_table.stride(0),
        BM=launch.block_m,
        BN=launch.block_n,
        STAGES=launch.stages,
        C=_constants(
            layer, cache, stores, launch, mask, 0 if page_table is None else cache.page_size
        ),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def needs_int64_offsets(cache: LayerCache, heads: int, strides: Sequence[int]) -> bool:
    """Say whether offsets into a cache need 64 bits; strides: (page, token, head) of each store.

    The strides decide, not the sizes: a store that is a part of a larger tensor has gaps.
    """
    pages, tokens = cache.num_pages, cache.page_size
    each = zip(strides[::3], strides[1::3], strides[2::3], strict=True)
    return any(
        pages * page + tokens * token + heads * head >= 1 << 31 for page, token, head in each
    )


def _constants(
    layer: AttentionLayer,
    cache: LayerCache,
    stores: KVCache,
    launch: Launch,
    mask: int,
    page_size: int,
) -> Constants:
    """Return what an attention kernel is compiled for. page_size: 0 for plain K and V."""
    first, rest = head_parts(layer.head_dim)
    width, fp4 = power_of_two(layer.v_head_dim), cache.block_scales is not None
    k, v, k_scales, v_scales = (tuple(store[1:]) for store in stores)
    fp8 = cache.v is not None and cache.v.dtype.itemsize == 1 and not fp4
    even = fp8 and not any(x % 2 for x in (stores.v.ptr.data_ptr(), *v))
    return Constants(
        HEADS=layer.num_kv_heads,
        GROUP=layer.num_q_heads // layer.num_kv_heads,
        PAGE=page_size,
        D=layer.head_dim,
        D1=first,
        D2=rest,
        DV=layer.v_head_dim,
        BDV=width,
        LATENT=cache.v is None,
        FP4=fp4,
        # two bytes are read as one number, which begins at an even address; and compiled for
        # wgmma, which takes 64 rows, Triton 3.6 gives wrong products of split columns
        SPLIT_FP8_COLUMNS=even and width == layer.v_head_dim and launch.block_m < 64,
        PTX=launch.ptx,
        SAME_STRIDES=k == v and k_scales == v_scales,
        INT64_OFFSETS=needs_int64_offsets(
            cache, layer.num_kv_heads, (*k, *v, *k_scales, *v_scales)
        ),
        USE_SOFTCAP=layer.logit_cap is not None,
        USE_SINKS=layer.sinks is not None,
        MASK=mask,
        WINDOW=layer.sliding_window is not None,
    )


def _tree(spec: SpecInfo | None, q: Tensor, positions: Tensor) -> Tree:
    if spec is None or spec.tree_mask is None:
        return Tree(q, positions)
    return Tree(spec.tree_mask.view(torch.uint8), positions)


def _stores(cache: LayerCache) -> KVCache:
    """Return the stores of a layer. Raises UsageError where their columns are not adjacent."""
    k, blocks = cache.k, cache.block_scales or (None, None)
    v = k if cache.v is None else cache.v
    stores = (k, v, k if blocks[0] is None else blocks[0], v if blocks[1] is None else blocks[1])
    return KVCache(*(_store(tensor, cache.layout) for tensor in stores))


def _store(tensor: Tensor, layout: str) -> Store:
    page, first, second, column = tensor.stride()
    if column != 1:
        raise UsageError(f"a cache with stride {column} in its last dimension (supports 1)")
    token, head = (second, first) if layout == "HND" else (first, second)
    return Store(tensor, page, token, head)
