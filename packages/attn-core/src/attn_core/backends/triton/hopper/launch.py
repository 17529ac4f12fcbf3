"""Launch the Hopper kernels where a shape, a store and its strides allow it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_core.backends.triton.hopper.common import (
    AttentionConfig,
)
from attn_core.backends.triton.hopper.decode import decode_hopper
from attn_core.backends.triton.hopper.mla_decode import decode_mla_hopper
from attn_core.backends.triton.hopper.prefill import extend_hopper
from attn_core.backends.triton.hopper.stores import (
    PANEL,
    SWIZZLE_ROWS,
    SWIZZLED,
    LayerArguments,
    layer_arguments,
    rows_fit,
)
from attn_core.backends.triton.hopper.tile_queue import TileOrder
from attn_core.backends.triton.kernel import Call, Shape
from attn_core.backends.triton.masks import MASK_TREE
from attn_core.backends.triton.portable.arguments import Queries
from attn_core.backends.triton.portable.launch import merge
from attn_core.backends.triton.schedule import TILE_ROWS, SplitKV, Tiles
from attn_core.backends.triton.tuning import Launch, heads_at_once, hopper_block, hopper_launch
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.launcher import Launcher
from attn_core.runtime.layer import AttentionLayer

_DTYPES = ("bf16", "fp16")


class HopperPrefill:
    """extend_hopper: 16 bits, one head dim, pages that divide a block or that it divides."""

    takes_order: ClassVar[bool] = True

    def choose(self, shape: Shape, launch: Launch | None) -> Launch | None:
        """Return its launch parameters; None where short prompts run better in smaller tiles."""
        if shape.mask == MASK_TREE.value or not _fits(shape):
            return None
        launch = hopper_launch(shape.group.head_dim, shape.longest, shape.tiles, shape.processors)
        return launch if launch.block_m == TILE_ROWS else None

    def bind(
        self, layer: AttentionLayer, cache: LayerCache, dtype: torch.dtype
    ) -> LayerArguments | None:
        """Return the stores of a layer; None where TMA cannot read them."""
        return layer_arguments(layer, cache, dtype)

    def launch(self, call: Call, kept: LayerArguments, launch: Launch, part: Tiles) -> None:
        """Do what extend_tiles does; counter int32 [2] holds zeros before and after."""
        inputs, layer, block = call.inputs, call.layer, launch.block_n
        page = call.cache.page_size if inputs.paged else 0
        key = (call.key, part.key)
        launcher = kept.launchers.get(key)
        if launcher is None:
            config = _config(call, kept, launch, PAGE=page, GATHERS=0 < page < SWIZZLE_ROWS)
            launcher = kept.launchers[key] = Launcher(extend_hopper, config, num_warps=4)
        q = _aligned(call.q)
        queries = call.queries if q is call.q else Queries(q, q.stride(0), q.stride(1))
        k_rows, v_rows = kept.rows(min(max(page, SWIZZLE_ROWS), block) if page else block)
        launcher(
            (min(part.tiles, part.processors), 1, 1),
            queries,
            k_rows,
            v_rows,
            kept.k,
            kept.v,
            call.outputs,
            inputs.requests,
            TileOrder(part.tile_offsets, part.request_order, part.counter),
            q if layer.sinks is None else layer.sinks,
            kept.scales,
            inputs.size,
            heads_at_once(layer.num_kv_heads, part.longest, 2 * layer.head_dim * q.element_size()),
            layer.sliding_window or 0,
            inputs.table_stride,
        )


class HopperDecode:
    """decode_hopper: as HopperPrefill, in tiles of 64 by 64."""

    takes_order: ClassVar[bool] = False

    def choose(self, shape: Shape, launch: Launch | None) -> Launch | None:
        """Return the launch parameters of the part where its tiles are of 64 by 64."""
        group = shape.group
        # the positions of a tree's drafts, which a window counts, are not loaded
        masks = shape.mask != MASK_TREE.value or group.window is None
        dims = group.head_dim == group.v_head_dim and group.head_dim in (64, 128, 256)
        return launch if _is_64(launch) and masks and dims and _fits(shape) else None

    def bind(
        self, layer: AttentionLayer, cache: LayerCache, dtype: torch.dtype
    ) -> LayerArguments | None:
        """Return the stores of a layer; None where TMA cannot read them."""
        return layer_arguments(layer, cache, dtype)

    def launch(self, call: Call, kept: LayerArguments, launch: Launch, part: SplitKV) -> None:
        """Do what decode_splits does."""
        inputs, layer, page = call.inputs, call.layer, call.cache.page_size
        key = (call.key, part.key)
        launcher = kept.launchers.get(key)
        if launcher is None:
            pages = {"PAGE": page, "GATHERS": page < SWIZZLE_ROWS}
            config = _config(call, kept, launch, **pages, **_split(part))
            registers = 128 if launch.ctas_per_sm > 1 else 232  # two programs share a processor
            launcher = Launcher(decode_hopper, config, num_warps=4, maxnreg=registers)
            kept.launchers[key] = launcher
        q = call.q if _near(call.q) else call.q.contiguous()
        queries = call.queries if q is call.q else Queries(q, q.stride(0), q.stride(1))
        k_rows, v_rows = kept.rows(min(max(page, SWIZZLE_ROWS), launch.block_n))
        launcher(
            (part.programs, 1, 1),
            queries,
            k_rows,
            v_rows,
            kept.k,
            kept.v,
            call.outputs,
            part.partials,
            inputs.requests,
            part.work_indptr,
            q if inputs.tree is None else inputs.tree,
            q if layer.sinks is None else layer.sinks,
            kept.scales,
            inputs.size,
            layer.sliding_window or 0,
            inputs.drafts,
            inputs.table_stride,
        )
        merge(call, kept, part)


class HopperMlaDecode:
    """decode_mla_hopper: 512 + 64 columns of 16 bits, in tiles of 64 by 64."""

    takes_order: ClassVar[bool] = False

    def choose(self, shape: Shape, launch: Launch | None) -> Launch | None:
        """Return the launch parameters of the part where its tiles are of 64 by 64."""
        group, page = shape.group, shape.page_size
        dims = (group.num_kv_heads, group.head_dim, group.v_head_dim) == (1, 576, 512)
        stores = shape.dtype in _DTYPES and shape.dtype == shape.kv_cache_dtype
        masks = shape.mask != MASK_TREE.value and group.window is None
        pages = page % 64 == 0 or (64 % page == 0 and page >= SWIZZLE_ROWS)
        return launch if _is_64(launch) and dims and stores and masks and pages else None

    def bind(
        self, layer: AttentionLayer, cache: LayerCache, dtype: torch.dtype
    ) -> LayerArguments | None:
        """Return the store of a layer; None where TMA cannot read it, and with sinks."""
        fits = cache.v is None and cache.k.dtype is dtype and layer.sinks is None
        fits = fits and rows_fit(cache.k, cache.layout)
        return LayerArguments(layer, cache) if fits else None

    def launch(self, call: Call, kept: LayerArguments, launch: Launch, part: SplitKV) -> None:
        """Do what decode_splits does."""
        inputs, layer, page = call.inputs, call.layer, call.cache.page_size
        key = (call.key, part.key)
        launcher = kept.launchers.get(key)
        if launcher is None:
            config = _config(call, kept, launch, PAGE=page, GATHERS=False, **_split(part))
            config = config._replace(HND=False, STAGES=2, INT64_OFFSETS=False)
            launcher = kept.launchers[key] = Launcher(decode_mla_hopper, config, num_warps=4)
        q_rows = call.q.contiguous().view(-1, layer.head_dim)
        launcher(
            (part.programs, 1, 1),
            TensorDescriptor(
                q_rows, list(q_rows.shape), [layer.head_dim, 1], [64, PANEL], SWIZZLED
            ),
            kept.rows(min(64, page))[0],
            call.outputs,
            part.partials,
            inputs.requests,
            part.work_indptr,
            kept.scales,
            inputs.size,
            inputs.table_stride,
        )
        merge(call, kept, part)


DECODE = (HopperMlaDecode(), HopperDecode())
PREFILL = (HopperPrefill(),)


def _fits(shape: Shape) -> bool:
    """Say whether keys and values are of the queries' 16 bits, in pages that divide well."""
    block, page = hopper_block(shape.group.head_dim, shape.group.v_head_dim), shape.page_size
    if block is None or shape.dtype not in _DTYPES or shape.dtype != shape.kv_cache_dtype:
        return False
    return page == 0 or page % block == 0 or block % page == 0


def _is_64(launch: Launch | None) -> bool:
    return launch is not None and (launch.block_m, launch.block_n) == (64, 64)


def _config(
    call: Call, kept: LayerArguments, launch: Launch, **more: int | bool
) -> AttentionConfig:
    """Return the constants of a launch; more: those of its pages and of what is split."""
    layer = call.layer
    return AttentionConfig(
        HEADS=layer.num_kv_heads,
        GROUP=layer.num_q_heads // layer.num_kv_heads,
        HND=call.cache.layout == "HND",
        BN=launch.block_n,
        D=layer.head_dim,
        USE_SOFTCAP=layer.logit_cap is not None,
        USE_SINKS=layer.sinks is not None,
        MASK=call.inputs.mask,
        WINDOW=layer.sliding_window is not None,
        STAGES=launch.stages,
        INT64_OFFSETS=kept.int64_offsets,
        **more,  # type: ignore[arg-type]  # named as the fields
    )


def _split(part: SplitKV) -> dict[str, int | bool]:
    return {
        "ROW_BLOCKS": part.row_blocks,
        "BLOCKS_PER_UNIT": part.blocks_per_unit,
        "BATCH_INVARIANT": part.batch_invariant,
        "MIN_UNITS": part.min_units,
    }


def _aligned(q: Tensor) -> Tensor:
    """Return q as 16-byte copies can read it: every head of every token begins at 16 bytes."""
    even = q.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in q.stride()[:2])
    return q if even and _near(q) else q.clone(memory_format=torch.contiguous_format)


def _near(q: Tensor) -> bool:
    """Say whether the heads of a token lie so near that 32 bits count from one to the other."""
    return q.shape[1] * q.stride(1) < 1 << 31
