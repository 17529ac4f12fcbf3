"""Launch the portable kernels: grids, strides and constants out of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from attn_core.backends.triton.kernel import Call, Shape
from attn_core.backends.triton.masks import MASK_TREE
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
from attn_core.backends.triton.portable.decode import decode_splits, merge_splits
from attn_core.backends.triton.portable.prefill import extend_tiles
from attn_core.backends.triton.schedule import SplitKV, Tiles
from attn_core.backends.triton.tuning import (
    LONG,
    Launch,
    extend_launch,
    head_parts,
    merge_tile,
    power_of_two,
)
from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache, Scale
from attn_core.errors import UsageError
from attn_core.runtime.layer import AttentionLayer


class PortableDecode:
    """decode_splits."""

    takes_order: ClassVar[bool] = False

    def choose(self, shape: Shape, launch: Launch | None) -> Launch | None:
        """Return the launch parameters of the part: it takes every shape."""
        return launch

    def bind(self, layer: AttentionLayer, cache: LayerCache, dtype: torch.dtype) -> LayerArguments:
        """Return the stores and constants of a layer. Raises UsageError for spread columns."""
        return LayerArguments.of(layer, cache)

    def launch(self, call: Call, kept: LayerArguments, launch: Launch, part: SplitKV) -> None:
        """Attend with few queries a request; what was split is left to `merge`."""
        q, layer, spec, table = call.q, call.layer, call.spec, call.page_table
        assert table is not None  # only passes over pages are split
        decode_splits[(part.programs,)](
            Queries(q, q.stride(0), q.stride(1)),
            kept.stores,
            Outputs(call.out, call.lse, call.out.stride(0), call.out.stride(1)),
            Partials(part.partial_out, part.partial_lse),
            Requests(call.cu_seqlens_q, call.seq_lens, table),
            part.work_indptr,
            _tree(call),
            q if layer.sinks is None else layer.sinks,
            kept.scales,
            call.seq_lens.shape[0],
            layer.sliding_window or 0,
            0 if spec is None else spec.num_draft_tokens,
            table.stride(0),
            BM=launch.block_m,
            BN=launch.block_n,
            STAGES=launch.stages,
            OVERLAP=part.overlap,
            SPLIT=_split(part),
            C=kept.constants(launch, call.mask, paged=True),
            num_warps=launch.warps,
            num_stages=launch.stages,
            **({"maxnreg": launch.max_registers} if launch.max_registers else {}),
        )


class PortablePrefill:
    """extend_tiles."""

    takes_order: ClassVar[bool] = False

    def choose(self, shape: Shape, launch: Launch | None) -> Launch:
        """Return the launch parameters of a shape: it takes every one."""
        group = shape.group
        tree = shape.mask == MASK_TREE.value
        return extend_launch(
            shape.arch,
            group.head_dim,
            group.v_head_dim,
            TORCH_DTYPES[shape.kv_cache_dtype].itemsize,
            longest=LONG if tree else shape.longest,
            tiles=shape.tiles,
            processors=shape.processors,
        )

    def bind(self, layer: AttentionLayer, cache: LayerCache, dtype: torch.dtype) -> LayerArguments:
        """Return the stores and constants of a layer. Raises UsageError for spread columns."""
        return LayerArguments.of(layer, cache)

    def launch(self, call: Call, kept: LayerArguments, launch: Launch, part: Tiles) -> None:
        """Attend with many queries a request, over pages or plain K and V."""
        q, layer, spec, table = call.q, call.layer, call.spec, call.page_table
        batch, group = call.cu_seqlens_q.shape[0] - 1, layer.num_q_heads // layer.num_kv_heads
        tiles = q.shape[0] * group // launch.block_m + batch
        extend_tiles[(tiles, layer.num_kv_heads)](
            Queries(q, q.stride(0), q.stride(1)),
            kept.stores,
            Outputs(call.out, call.lse, call.out.stride(0), call.out.stride(1)),
            Requests(call.cu_seqlens_q, call.seq_lens, call.seq_lens if table is None else table),
            _tree(call),
            q if layer.sinks is None else layer.sinks,
            kept.scales,
            batch,
            layer.sliding_window or 0,
            0 if spec is None else spec.num_draft_tokens,
            0 if table is None else table.stride(0),
            BM=launch.block_m,
            BN=launch.block_n,
            STAGES=launch.stages,
            MIN_QUERIES=part.min_queries,
            C=kept.constants(launch, call.mask, paged=table is not None),
            num_warps=launch.warps,
            num_stages=launch.stages,
        )


def merge(call: Call, part: SplitKV) -> None:
    """Merge the partials of tiles that were split, whichever kernel wrote them."""
    layer, out, launch = call.layer, call.out, part.launch
    heads, group = layer.num_kv_heads, layer.num_q_heads // layer.num_kv_heads
    batch, width = call.seq_lens.shape[0], power_of_two(layer.v_head_dim)
    tiles = batch * heads * part.row_blocks
    columns, rows, partials, warps = merge_tile(tiles, part.tile_rows, part.programs, width)
    merge_splits[(tiles, -(-part.tile_rows // rows), width // columns)](
        Partials(part.partial_out, part.partial_lse),
        Outputs(out, call.lse, out.stride(0), out.stride(1)),
        call.cu_seqlens_q,
        part.work_indptr,
        call.q if layer.sinks is None else layer.sinks,
        batch,
        _v_scale(call.cache),
        part.programs,
        BM=launch.block_m,
        ROWS=rows,
        COLUMNS=columns,
        PARTIALS=partials,
        OVERLAP=part.overlap,
        SPLIT=_split(part),
        C=MergeConstants(heads, group, layer.v_head_dim, width, layer.sinks is not None),
        num_warps=warps,
        **({"launch_pdl": True} if part.overlap else {}),
    )


@dataclass(frozen=True, eq=False)
class LayerArguments:
    """What the portable kernels are given of a layer and its cache, in every pass.

    common: the constants of all its launches, without those that `constants` adds.
    even_fp8: whether two neighbouring FP8 values can be read as one number.
    """

    stores: KVCache
    scales: Scales
    common: Constants
    even_fp8: bool
    _of_launch: dict[tuple[int, bool, int, bool], Constants] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: AttentionLayer, cache: LayerCache) -> LayerArguments:
        """Return those of a layer. Raises UsageError where columns of a store are not adjacent."""
        stores = _stores(cache)
        k, v, k_scales, v_scales = (tuple(store[1:]) for store in stores)
        first, rest = head_parts(layer.head_dim)
        fp4 = cache.block_scales is not None
        fp8 = cache.v is not None and cache.v.dtype.itemsize == 1 and not fp4
        width = power_of_two(layer.v_head_dim)
        heads = layer.num_kv_heads
        common = Constants(
            HEADS=heads,
            GROUP=layer.num_q_heads // heads,
            PAGE=cache.page_size,
            D=layer.head_dim,
            D1=first,
            D2=rest,
            DV=layer.v_head_dim,
            BDV=width,
            LATENT=cache.v is None,
            FP4=fp4,
            SPLIT_FP8_COLUMNS=False,
            PTX=False,
            SAME_STRIDES=k == v and k_scales == v_scales,
            INT64_OFFSETS=needs_int64_offsets(cache, heads, (*k, *v, *k_scales, *v_scales)),
            USE_SOFTCAP=layer.logit_cap is not None,
            USE_SINKS=layer.sinks is not None,
            MASK=0,
            WINDOW=layer.sliding_window is not None,
        )
        even = fp8 and not any(x % 2 for x in (stores.v.ptr.data_ptr(), *v))
        scales = Scales(layer.scale * cache.k_scale, layer.logit_cap or 1.0, _v_scale(cache))
        return cls(stores, scales, common, even and width == layer.v_head_dim)

    def constants(self, launch: Launch, mask: int, *, paged: bool) -> Constants:
        """Return the constants of one launch."""
        key = (launch.block_m, launch.ptx, mask, paged)
        constants = self._of_launch.get(key)
        if constants is None:
            constants = self.common._replace(
                PAGE=self.common.PAGE if paged else 0,
                # compiled for wgmma, which takes 64 rows, Triton 3.6 gives wrong products of these
                SPLIT_FP8_COLUMNS=self.even_fp8 and launch.block_m < 64,
                PTX=launch.ptx,
                MASK=mask,
            )
            self._of_launch[key] = constants
        return constants


def needs_int64_offsets(cache: LayerCache, heads: int, strides: Sequence[int]) -> bool:
    """Say whether offsets into a cache need 64 bits; strides: (page, token, head) of each store.

    The strides decide, not the sizes: a store that is a part of a larger tensor has gaps.
    """
    pages, tokens = cache.num_pages, cache.page_size
    each = zip(strides[::3], strides[1::3], strides[2::3], strict=True)
    return any(
        pages * page + tokens * token + heads * head >= 1 << 31 for page, token, head in each
    )


def _split(part: SplitKV) -> Split:
    return Split(part.row_blocks, part.blocks_per_unit, part.batch_invariant, part.min_units)


def _v_scale(cache: LayerCache) -> Scale:
    """Return the scale of the values, which are the keys of a latent cache."""
    return cache.k_scale if cache.v is None else cache.v_scale


def _tree(call: Call) -> Tree:
    tree = None if call.spec is None else call.spec.tree_mask
    return Tree(call.q if tree is None else tree.view(torch.uint8), call.positions)


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
