"""Launch the attention kernels: grids, strides and constants out of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

from attn_core.backends.triton.masks import mask_mode
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
    tiles = seq_lens.shape[0] * heads * splits.row_blocks
    if not tiles:
        return
    pools, strides = _stores(cache)
    sinks = q if layer.sinks is None else layer.sinks
    latent, launch = cache.v is None, splits.launch
    v_scale = cache.k_scale if latent else cache.v_scale
    shape, mask = _shape(layer, pools, strides, cache, launch.block_m), mask_mode(layer, spec)
    where = (cu_seqlens_q, seq_lens, page_table)
    if hopper and hopper.mla_fits(q, layer, cache, splits, mask):
        hopper.decode_mla_on_hopper(q, layer, cache, *where, splits, out, lse, mask)
    elif hopper and hopper.decode_fits(q, layer, cache, splits, mask):
        hopper.decode_on_hopper(q, layer, cache, *where, spec, splits, out, lse, mask)
    else:
        decode_splits[(splits.programs,)](
            q,
            *pools,
            out,
            lse,
            splits.partial_out,
            splits.partial_lse,
            cu_seqlens_q,
            seq_lens,
            page_table,
            splits.work_indptr,
            *_tree(spec, q, positions),
            sinks,
            seq_lens.shape[0],
            layer.scale * cache.k_scale,
            layer.logit_cap or 1.0,
            v_scale,
            layer.sliding_window or 0,
            spec.num_draft_tokens if spec is not None else 0,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            page_table.stride(0),
            *strides,
            HEADS=heads,
            GROUP=group,
            ROW_BLOCKS=splits.row_blocks,
            PAGE=cache.page_size,
            BM=launch.block_m,
            BN=launch.block_n,
            BLOCKS_PER_UNIT=splits.blocks_per_unit,
            BATCH_INVARIANT=splits.batch_invariant,
            MIN_UNITS=splits.min_units,
            **shape,
            PTX=launch.ptx,
            SAME_STRIDES=strides[0:3] == strides[3:6] and strides[6:9] == strides[9:12],
            INT64_OFFSETS=needs_int64_offsets(cache, heads, strides),
            USE_SOFTCAP=layer.logit_cap is not None,
            USE_SINKS=layer.sinks is not None,
            MASK=mask,
            WINDOW=layer.sliding_window is not None,
            STAGES=launch.stages,
            OVERLAP=splits.overlap,
            num_warps=launch.warps,
            num_stages=launch.stages,
            **({"maxnreg": launch.max_registers} if launch.max_registers else {}),
        )
    if splits.unsplit:
        return
    columns, rows, partials, warps = merge_tile(
        tiles, splits.tile_rows, splits.programs, shape["BDV"]
    )
    merge_splits[(tiles, -(-splits.tile_rows // rows), shape["BDV"] // columns)](
        splits.partial_out,
        splits.partial_lse,
        out,
        lse,
        cu_seqlens_q,
        splits.work_indptr,
        sinks,
        seq_lens.shape[0],
        v_scale,
        splits.programs,
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        GROUP=group,
        ROW_BLOCKS=splits.row_blocks,
        BM=launch.block_m,
        DV=layer.v_head_dim,
        BDV=shape["BDV"],
        USE_SINKS=layer.sinks is not None,
        BATCH_INVARIANT=splits.batch_invariant,
        MIN_UNITS=splits.min_units,
        COLUMNS=columns,
        ROWS=rows,
        PARTIALS=partials,
        OVERLAP=splits.overlap,
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
    pools, strides = _stores(cache)
    latent = cache.v is None
    extend_tiles[(tiles, heads)](
        q,
        *pools,
        out,
        lse,
        cu_seqlens_q,
        lengths,
        lengths if page_table is None else page_table,
        *_tree(spec, q, positions),
        q if layer.sinks is None else layer.sinks,
        batch,
        layer.scale * cache.k_scale,
        layer.logit_cap or 1.0,
        cache.k_scale if latent else cache.v_scale,
        layer.sliding_window or 0,
        spec.num_draft_tokens if spec is not None else 0,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        0 if page_table is None else page_table.stride(0),
        *strides,
        HEADS=heads,
        GROUP=group,
        PAGE=0 if page_table is None else cache.page_size,
        BM=launch.block_m,
        BN=launch.block_n,
        **_shape(layer, pools, strides, cache, launch.block_m),
        PTX=launch.ptx,
        SAME_STRIDES=strides[0:3] == strides[3:6] and strides[6:9] == strides[9:12],
        INT64_OFFSETS=needs_int64_offsets(cache, heads, strides),
        USE_SOFTCAP=layer.logit_cap is not None,
        USE_SINKS=layer.sinks is not None,
        MASK=mask,
        WINDOW=layer.sliding_window is not None,
        STAGES=launch.stages,
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


def _shape(
    layer: AttentionLayer,
    pools: Sequence[Tensor],
    strides: Sequence[int],
    cache: LayerCache,
    rows: int,
) -> Mapping[str, int | bool]:
    first, rest = head_parts(layer.head_dim)
    width, fp4 = power_of_two(layer.v_head_dim), cache.block_scales is not None
    fp8 = cache.v is not None and cache.v.dtype.itemsize == 1 and not fp4
    pairs = not any(x % 2 for x in (pools[1].data_ptr(), *strides[3:6])) if fp8 else False
    return {
        "D": layer.head_dim,
        "D1": first,
        "D2": rest,
        "DV": layer.v_head_dim,
        "BDV": width,
        "LATENT": cache.v is None,
        "FP4": fp4,
        # two bytes are read as one number, which begins at an even address; and compiled for
        # wgmma, which takes 64 rows, Triton 3.6 gives wrong products of split columns
        "SPLIT_FP8_COLUMNS": pairs and width == layer.v_head_dim and rows < 64,
    }


def _tree(spec: SpecInfo | None, q: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    if spec is None or spec.tree_mask is None:
        return q, positions
    return spec.tree_mask.view(torch.uint8), positions


def _stores(cache: LayerCache) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return the pools (k, v, k blocks, v blocks) and the (page, token, head) strides of each."""
    blocks = cache.block_scales or (None, None)
    k = cache.k
    v = k if cache.v is None else cache.v
    pools = (k, v, k if blocks[0] is None else blocks[0], v if blocks[1] is None else blocks[1])
    strides: list[int] = []
    for pool in pools:
        page, first, second, column = pool.stride()
        if column != 1:
            raise UsageError(f"a cache with stride {column} in its last dimension (supports 1)")
        strides += (page, second, first) if cache.layout == "HND" else (page, first, second)
    return pools, tuple(strides)
