"""Launch the portable kernels: grids, strides and constants out of tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from attn_core.backends.triton.kernel import Call, Shape
from attn_core.backends.triton.masks import MASK_TREE
from attn_core.backends.triton.portable.arguments import (
    Constants,
    KVCache,
    MergeConstants,
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
    power_of_two,
)
from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache, Scale
from attn_core.errors import UsageError
from attn_core.ops.triton.launcher import Launcher
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
        """Attend with few queries a request."""
        q, layer, inputs = call.q, call.layer, call.inputs
        key = (call.key, part.key)
        launcher = kept.launchers.get(key)
        if launcher is None:
            launcher = kept.launchers[key] = Launcher(
                decode_splits,
                *(launch.block_m, launch.block_n, launch.stages, part.overlap, _split(part)),
                kept.constants(launch, inputs.mask, paged=True),
                num_warps=launch.warps,
                num_stages=launch.stages,
                **({"maxnreg": launch.max_registers} if launch.max_registers else {}),
            )
        launcher(
            (part.programs, 1, 1),
            call.queries,
            kept.stores,
            call.outputs,
            part.partials,
            inputs.requests,
            part.work_indptr,
            Tree(q if inputs.tree is None else inputs.tree, inputs.positions),
            q if layer.sinks is None else layer.sinks,
            kept.scales,
            inputs.size,
            layer.sliding_window or 0,
            inputs.drafts,
            inputs.table_stride,
        )
        merge(call, kept, part)


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
        q, layer, inputs = call.q, call.layer, call.inputs
        key = (call.key, part.key)
        launcher = kept.launchers.get(key)
        if launcher is None:
            launcher = kept.launchers[key] = Launcher(
                extend_tiles,
                *(launch.block_m, launch.block_n, launch.stages, part.min_queries),
                kept.constants(launch, inputs.mask, paged=inputs.paged),
                num_warps=launch.warps,
                num_stages=launch.stages,
            )
        group = layer.num_q_heads // layer.num_kv_heads
        launcher(
            (q.shape[0] * group // launch.block_m + inputs.size, layer.num_kv_heads, 1),
            call.queries,
            kept.stores,
            call.outputs,
            inputs.requests,
            Tree(q if inputs.tree is None else inputs.tree, inputs.positions),
            q if layer.sinks is None else layer.sinks,
            kept.scales,
            inputs.size,
            layer.sliding_window or 0,
            inputs.drafts,
            inputs.table_stride,
        )


class Launches(Protocol):
    """What kernels keep of a layer and its cache: their launchers by the keys of calls."""

    @property
    def launchers(self) -> dict[Hashable, Launcher]: ...
    @property
    def scales(self) -> Scales: ...


def merge(call: Call, kept: Launches, part: SplitKV) -> None:
    """Merge the partials of tiles that were split, if any was, whichever kernel wrote them."""
    if part.unsplit:
        return
    layer, inputs = call.layer, call.inputs
    heads, width = layer.num_kv_heads, power_of_two(layer.v_head_dim)
    tiles = inputs.size * heads * part.row_blocks
    columns, rows, partials, warps = part.merge_tile
    key = (call.key, part.key, "merge")
    launcher = kept.launchers.get(key)
    if launcher is None:
        group, sinks = layer.num_q_heads // heads, layer.sinks is not None
        launcher = kept.launchers[key] = Launcher(
            merge_splits,
            *(part.launch.block_m, rows, columns, partials, part.overlap, _split(part)),
            MergeConstants(heads, group, layer.v_head_dim, width, sinks),
            num_warps=warps,
            **({"launch_pdl": True} if part.overlap else {}),
        )
    launcher(
        (tiles, -(-part.tile_rows // rows), width // columns),
        part.partials,
        call.outputs,
        inputs.requests.cu_seqlens_q,
        part.work_indptr,
        call.q if layer.sinks is None else layer.sinks,
        inputs.size,
        kept.scales.v,
        part.programs,
    )


@dataclass(frozen=True, eq=False)
class LayerArguments:
    """What the portable kernels are given of a layer and its cache, in every pass.

    common: the constants of all its launches, without those that `constants` adds. launchers: of
    a layer.
    even_fp8: whether two neighbouring FP8 values can be read as one number.
    """

    stores: KVCache
    scales: Scales
    common: Constants
    even_fp8: bool
    launchers: dict[Hashable, Launcher] = field(default_factory=dict)

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
        return self.common._replace(
            PAGE=self.common.PAGE if paged else 0,
            # compiled for wgmma, which takes 64 rows, Triton 3.6 gives wrong products of these
            SPLIT_FP8_COLUMNS=self.even_fp8 and launch.block_m < 64,
            PTX=launch.ptx,
            MASK=mask,
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


def _split(part: SplitKV) -> Split:
    return Split(part.row_blocks, part.blocks_per_unit, part.batch_invariant, part.min_units)


def _v_scale(cache: LayerCache) -> Scale:
    """Return the scale of the values, which are the keys of a latent cache."""
    return cache.k_scale if cache.v is None else cache.v_scale


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
