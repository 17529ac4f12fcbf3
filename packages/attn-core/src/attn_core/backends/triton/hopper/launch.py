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
from attn_core.backends.triton.portable.arguments import Outputs, Partials, Queries, Requests
from attn_core.backends.triton.schedule import TILE_ROWS, SplitKV, Tiles
from attn_core.backends.triton.tuning import Launch, heads_at_once, hopper_block, hopper_launch
from attn_core.cache.layer_cache import LayerCache
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
        layer, cache, table, heads = (
            call.layer,
            call.cache,
            call.page_table,
            call.layer.num_kv_heads,
        )
        page, block = 0 if table is None else cache.page_size, launch.block_n
        q = _aligned(call.q)
        k_rows, v_rows = kept.rows(min(max(page, SWIZZLE_ROWS), block) if page else block)
        extend_hopper[(min(part.tiles, part.processors),)](
            _queries(q),
            k_rows,
            v_rows,
            kept.k,
            kept.v,
            _outputs(call.out, call.lse),
            Requests(call.cu_seqlens_q, call.seq_lens, call.seq_lens if table is None else table),
            TileOrder(part.tile_offsets, part.request_order, part.counter),
            q if layer.sinks is None else layer.sinks,
            kept.scales,
            call.cu_seqlens_q.shape[0] - 1,
            heads_at_once(heads, part.longest, 2 * layer.head_dim * q.element_size()),
            layer.sliding_window or 0,
            0 if table is None else table.stride(0),
            AttentionConfig(
                HEADS=heads,
                GROUP=layer.num_q_heads // heads,
                PAGE=page,
                HND=cache.layout == "HND",
                GATHERS=0 < page < SWIZZLE_ROWS,
                BN=block,
                D=layer.head_dim,
                USE_SOFTCAP=layer.logit_cap is not None,
                USE_SINKS=layer.sinks is not None,
                MASK=call.mask,
                WINDOW=layer.sliding_window is not None,
                STAGES=launch.stages,
                INT64_OFFSETS=kept.int64_offsets,
            ),
            num_warps=4,
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
        layer, cache, table, spec = call.layer, call.cache, call.page_table, call.spec
        assert table is not None  # only passes over pages are split
        page, heads = cache.page_size, layer.num_kv_heads
        q = call.q if _near(call.q) else call.q.contiguous()
        k_rows, v_rows = kept.rows(min(max(page, SWIZZLE_ROWS), launch.block_n))
        tree = None if spec is None else spec.tree_mask
        decode_hopper[(part.programs,)](
            _queries(q),
            k_rows,
            v_rows,
            kept.k,
            kept.v,
            _outputs(call.out, call.lse),
            Partials(part.partial_out, part.partial_lse),
            Requests(call.cu_seqlens_q, call.seq_lens, table),
            part.work_indptr,
            q if tree is None else tree.contiguous().view(torch.uint8),
            q if layer.sinks is None else layer.sinks,
            kept.scales,
            call.seq_lens.shape[0],
            layer.sliding_window or 0,
            0 if spec is None else spec.num_draft_tokens,
            table.stride(0),
            AttentionConfig(
                HEADS=heads,
                GROUP=layer.num_q_heads // heads,
                PAGE=page,
                HND=cache.layout == "HND",
                GATHERS=page < SWIZZLE_ROWS,
                BN=launch.block_n,
                D=layer.head_dim,
                USE_SOFTCAP=layer.logit_cap is not None,
                USE_SINKS=layer.sinks is not None,
                MASK=call.mask,
                WINDOW=layer.sliding_window is not None,
                STAGES=launch.stages,
                INT64_OFFSETS=kept.int64_offsets,
                ROW_BLOCKS=part.row_blocks,
                BLOCKS_PER_UNIT=part.blocks_per_unit,
                BATCH_INVARIANT=part.batch_invariant,
                MIN_UNITS=part.min_units,
            ),
            num_warps=4,
            maxnreg=128 if launch.ctas_per_sm > 1 else 232,  # two programs share a multiprocessor
        )


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
        layer, table, page = call.layer, call.page_table, call.cache.page_size
        assert table is not None  # only passes over pages are split
        q_rows = call.q.contiguous().view(-1, layer.head_dim)
        decode_mla_hopper[(part.programs,)](
            TensorDescriptor(
                q_rows, list(q_rows.shape), [layer.head_dim, 1], [64, PANEL], SWIZZLED
            ),
            kept.rows(min(64, page))[0],
            _outputs(call.out, call.lse),
            Partials(part.partial_out, part.partial_lse),
            Requests(call.cu_seqlens_q, call.seq_lens, table),
            part.work_indptr,
            kept.scales,
            call.seq_lens.shape[0],
            table.stride(0),
            AttentionConfig(
                HEADS=1,
                GROUP=layer.num_q_heads,
                PAGE=page,
                HND=False,
                GATHERS=False,
                BN=64,
                D=layer.head_dim,
                USE_SOFTCAP=layer.logit_cap is not None,
                USE_SINKS=False,
                MASK=call.mask,
                WINDOW=False,
                STAGES=2,
                INT64_OFFSETS=False,
                ROW_BLOCKS=part.row_blocks,
                BLOCKS_PER_UNIT=part.blocks_per_unit,
                BATCH_INVARIANT=part.batch_invariant,
                MIN_UNITS=part.min_units,
            ),
            num_warps=4,
        )


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


def _queries(q: Tensor) -> Queries:
    return Queries(q, q.stride(0), q.stride(1))


def _outputs(out: Tensor, lse: Tensor) -> Outputs:
    return Outputs(out, lse, out.stride(0), out.stride(1))


def _aligned(q: Tensor) -> Tensor:
    """Return q as 16-byte copies can read it: every head of every token begins at 16 bytes."""
    even = q.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in q.stride()[:2])
    return q if even and _near(q) else q.clone(memory_format=torch.contiguous_format)


def _near(q: Tensor) -> bool:
    """Say whether the heads of a token lie so near that 32 bits count from one to the other."""
    return q.shape[1] * q.stride(1) < 1 << 31
