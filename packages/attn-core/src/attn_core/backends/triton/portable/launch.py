"""Launch the portable kernels: grids, strides and constants out of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_core.backends.triton.kernel import (
    Call,
    Kernel,
    Launchers,
    Pass,
    PassLaunch,
    Shape,
)
from attn_core.backends.triton.masks import MASK_TREE
from attn_core.backends.triton.portable.arguments import (
    Constants,
    KVCache,
    Scales,
    Store,
    Tree,
)
from attn_core.backends.triton.portable.decode import decode_splits
from attn_core.backends.triton.portable.prefill import extend_tiles
from attn_core.backends.triton.schedule import SplitKV, Tiles
from attn_core.backends.triton.split import SplitKernel, constants_of
from attn_core.backends.triton.tuning import (
    LONG,
    Launch,
    extend_launch,
    head_parts,
    power_of_two,
)
from attn_core.cache.layer_cache import TORCH_DTYPES, LayerCache, Scale
from attn_core.errors import UsageError
from attn_core.ops.triton.launcher import Arguments, Launcher
from attn_core.runtime.layer import AttentionLayer


class PortableDecode(SplitKernel):
    """decode_splits."""

    def choose(self, shape: Shape, launch: Launch | None) -> Launch | None:
        """Return the launch parameters of the part: it takes every shape."""
        return launch

    def bind(self, layer: AttentionLayer, cache: LayerCache, dtype: torch.dtype) -> LayerArguments:
        """Return the stores and constants of a layer. Raises UsageError for spread columns."""
        return LayerArguments.of(layer, cache, dtype)

    def arguments(self, inputs: Pass, part: SplitKV) -> Arguments:
        """Return what all its launches in a pass share."""
        return Arguments(
            *(part.partials, inputs.requests, part.work_indptr, part.spans, _tree(inputs)),
            *(inputs.size, inputs.drafts, inputs.table_stride),
        )

    def make_attend(
        self, call: Call, bound: LayerArguments, launch: Launch, part: SplitKV
    ) -> Launcher:
        """Return its own launcher for calls with this key."""
        return Launcher(
            decode_splits,
            *(bound.stores, bound.sinks, bound.scales, call.layer.sliding_window or 0),
            *(
                launch.block_m,
                launch.block_n,
                launch.stages,
                part.cuts.overlap,
                constants_of(part.cuts),
            ),
            bound.constants(launch, call.inputs.mask, paged=True),
            num_warps=launch.warps,
            num_stages=launch.stages,
            **({"maxnreg": launch.max_registers} if launch.max_registers else {}),
        )


class PortablePrefill(Kernel[Tiles]):
    """extend_tiles: many queries a request, over pages or plain K and V."""

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
        return LayerArguments.of(layer, cache, dtype)

    def pass_launch(self, call: Call, launch: Launch, part: Tiles) -> PassLaunch:
        """Return how the layers of this call's group launch it in this pass."""
        layer, inputs = call.layer, call.inputs
        rows = call.q.shape[0] * (layer.num_q_heads // layer.num_kv_heads)
        return PassLaunch(
            (rows // launch.block_m + inputs.size, layer.num_kv_heads, 1),
            Arguments(
                *(inputs.requests, _tree(inputs)),
                *(inputs.size, inputs.drafts, inputs.table_stride),
            ),
        )

    def make_launchers(
        self, call: Call, bound: LayerArguments, launch: Launch, part: Tiles
    ) -> Launchers:
        """Return launchers for calls with this key."""
        attend = Launcher(
            extend_tiles,
            *(bound.stores, bound.sinks, bound.scales, call.layer.sliding_window or 0),
            *(launch.block_m, launch.block_n, launch.stages, part.min_queries),
            bound.constants(launch, call.inputs.mask, paged=call.inputs.paged),
            num_warps=launch.warps,
            num_stages=launch.stages,
        )
        return Launchers(attend)


def _tree(inputs: Pass) -> Tree:
    """Return the mask of a tree and the positions; without a tree no kernel reads its mask."""
    mask = inputs.requests.cu_seqlens_q if inputs.tree is None else inputs.tree
    return Tree(mask, inputs.positions)


@dataclass(frozen=True, eq=False)
class LayerArguments:
    """What the portable kernels are given of a layer and its cache, in every pass.

    sinks: any tensor for a layer without. common: the constants of all its launches, without those
    that `constants` adds.
    column_parts: of launches of few rows, see VALUE_PARTS.
    """

    stores: KVCache
    sinks: Tensor
    scales: Scales
    common: Constants
    column_parts: int

    @classmethod
    def of(cls, layer: AttentionLayer, cache: LayerCache, dtype: torch.dtype) -> LayerArguments:
        """Return those of a layer. Raises UsageError where columns of a store are not adjacent.

        dtype: of the queries.
        """
        stores = _stores(cache)
        k, v, k_scales, v_scales = (tuple(store[1:]) for store in stores)
        first, second = head_parts(layer.head_dim)
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
            D2=second,
            DV=layer.v_head_dim,
            BDV=width,
            LATENT=cache.v is None and first == width,
            FP4=fp4,
            FP4_ALIGNED=_fp4_aligned(layer, cache) if fp4 else 0,
            KEY_PARTS=1,
            VALUE_PARTS=1,
            PTX=False,
            SAME_STRIDES=k == v and k_scales == v_scales,
            INT64_OFFSETS=needs_int64_offsets(cache, heads, (*k, *v, *k_scales, *v_scales)),
            USE_SOFTCAP=layer.logit_cap is not None,
            USE_SINKS=layer.sinks is not None,
            MASK=0,
            WINDOW=layer.sliding_window is not None,
            CHUNK=0 if layer.dual_chunk is None else layer.dual_chunk.chunk_len,
            SCALE_QUERIES=dtype == torch.bfloat16 and cache.k.dtype.itemsize == 1,
        )
        parts = 1
        if fp8 and width == layer.v_head_dim:
            parts = 1 if any(x % 2 for x in (stores.v.ptr.data_ptr(), *v)) else 2
        elif fp4 and min(layer.head_dim, width) >= 64:  # products take 16 columns at least
            parts = 4 if common.FP4_ALIGNED else 1
        unit = 2.0**14 if fp4 else 1.0  # load_fp4 returns numbers over it
        scales = Scales(
            layer.scale * cache.k_scale * unit, layer.logit_cap or 1.0, _v_scale(cache) * unit
        )
        sinks = cache.k if layer.sinks is None else layer.sinks
        return cls(stores, sinks, scales, common, parts)

    def constants(self, launch: Launch, mask: int, *, paged: bool) -> Constants:
        """Return the constants of one launch."""
        common, parts = self.common, self.column_parts
        # compiled for wgmma, which takes 64 rows, Triton 3.6 gives wrong products of these
        split = launch.block_m < 64
        quarters = split and parts == 4
        # of a tile that is not wider than high, Triton gives each warp all values
        unsplit = quarters and launch.warps > 1 and launch.block_m >= common.BDV // 4
        return common._replace(
            PAGE=common.PAGE if paged else 0,
            D2=max(64, common.D2) if common.D2 and quarters else common.D2,
            KEY_PARTS=4 if quarters else 1,
            VALUE_PARTS=1 if unsplit or not split else parts,
            PTX=launch.ptx,
            MASK=mask,
        )


def needs_int64_offsets(cache: LayerCache, heads: int, strides: Sequence[int]) -> bool:
    """Say whether offsets into a cache need 64 bits; strides: (page, token, head) of each store.

    The strides decide, not the sizes: a store that is a part of a larger tensor has gaps.
    """
    pages, tokens = cache.num_pages, cache.page_size
    per_tensor = zip(strides[::3], strides[1::3], strides[2::3], strict=True)
    return any(
        pages * page + tokens * token + heads * head >= 1 << 31 for page, token, head in per_tensor
    )


def _fp4_aligned(layer: AttentionLayer, cache: LayerCache) -> int:
    """Return FP4_ALIGNED of Constants, a power of two of at most 16."""
    assert cache.block_scales is not None  # it is FP4
    codes, scales = (
        math.gcd(*(n for x in stores if x is not None for n in (x.data_ptr(), *x.stride()[:-1])))
        for stores in ((cache.k, cache.v), cache.block_scales)
    )
    pairs = layer.head_dim % 32 == layer.v_head_dim % 32 == 0
    if codes % 16 or scales % 2 or not pairs:
        return 0
    return math.gcd(codes // 8, scales, 16)


def _v_scale(cache: LayerCache) -> Scale:
    """Return the scale of the values, which are the keys of a latent cache."""
    return cache.k_scale if cache.v is None else cache.v_scale


def _stores(cache: LayerCache) -> KVCache:
    """Return the stores of a layer. Raises UsageError where their columns are not adjacent."""
    k, (k_blocks, v_blocks) = cache.k, cache.block_scales or (None, None)
    v = k if cache.v is None else cache.v
    v_blocks = k_blocks if cache.v is None else v_blocks
    stores = (k, v, k if k_blocks is None else k_blocks, v if v_blocks is None else v_blocks)
    return KVCache(*(_store(tensor, cache.layout) for tensor in stores))


def _store(tensor: Tensor, layout: str) -> Store:
    page, first, second, column = tensor.stride()
    if column != 1:
        raise UsageError(f"a cache with stride {column} in its last dimension (supports 1)")
    token, head = (second, first) if layout == "HND" else (first, second)
    return Store(tensor, page, token, head)
