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
from attn_core.backends.triton.kernel import (
    Call,
    Kernel,
    Launchers,
    Pass,
    PassLaunch,
    Shape,
)
from attn_core.backends.triton.masks import MASK_TREE
from attn_core.backends.triton.portable.arguments import KeyParts
from attn_core.backends.triton.schedule import TILE_ROWS, SplitKV, Tiles
from attn_core.backends.triton.split import (
    SplitKernel,
    constants_of,
    merge_of_tiles,
    tiles_merger,
)
from attn_core.backends.triton.tuning import Launch, heads_at_once, hopper_block, hopper_launch
from attn_core.cache.layer_cache import LayerCache
from attn_core.ops.triton.launcher import Arguments, Launcher, MapOf
from attn_core.runtime.layer import AttentionLayer

_DTYPES = ("bf16", "fp16")


class HopperPrefill(Kernel[Tiles]):
    """extend_hopper: 16 bits, one head dim, pages that divide a block or that it divides.

    It does what extend_tiles does; its counter int32 [2] holds zeros before and after.
    """

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

    def pass_launch(self, call: Call, launch: Launch, part: Tiles) -> PassLaunch:
        """Return how the layers of this call's group launch it in this pass."""
        inputs, layer, parts = call.inputs, call.layer, part.parts
        key_bytes = 2 * layer.head_dim * call.q.element_size()
        return PassLaunch(
            (part.processors if parts else min(part.tiles, part.processors), 1, 1),
            Arguments(
                inputs.requests,
                TileOrder(part.tile_offsets, part.request_order, part.counter),
                parts or KeyParts(*(part.request_order,) * 4),  # not read
                inputs.size,
                heads_at_once(layer.num_kv_heads, part.longest, key_bytes),
                inputs.table_stride,
            ),
            merge_of_tiles(inputs, part),
        )

    def make_launchers(
        self, call: Call, bound: LayerArguments, launch: Launch, part: Tiles
    ) -> Launchers:
        """Return launchers for calls with this key."""
        block, page = launch.block_n, call.cache.page_size if call.inputs.paged else 0
        rows = min(max(page, SWIZZLE_ROWS), block) if page else block
        attend = Launcher(
            extend_hopper,
            *(*bound.rows(rows), bound.k, bound.v, bound.sinks, bound.scales),
            call.layer.sliding_window or 0,
            config_of(
                call, bound, launch, PAGE=page, GATHERS=0 < page < SWIZZLE_ROWS,
                CUT_TILES=part.parts is not None, SELDOM=not 0 < page < SWIZZLE_ROWS,
            ),
            num_warps=4,
        )  # fmt: skip
        merge = (
            None if part.parts is None else tiles_merger(call.layer, bound, TILE_ROWS, overlap=True)
        )
        return self.launchers(call, attend)._replace(merge=merge)

    def launchers(self, call: Call, attend: Launcher) -> Launchers:
        """Return a launcher with the copy of queries that 16-byte copies cannot read."""
        return Launchers(attend, change=None if _aligned(call.q) else type(call).dense)


# Keys that TMA copies at a time: of a request's last block only those few that the request has.
# Drafts that share keys were faster with whole blocks.
_COPY_ROWS = 16


class HopperDecode(SplitKernel):
    """decode_hopper: as HopperPrefill, in tiles of 64 or 128 rows, as decode_splits does."""

    takes_first_spans: ClassVar[bool] = True

    def choose(self, shape: Shape, launch: Launch | None) -> Launch | None:
        """Return the launch parameters of the part where its tiles have 64 or 128 rows."""
        group = shape.group
        # the positions of a tree's drafts, which a window counts, are not loaded
        masks = shape.mask != MASK_TREE.value or group.window is None
        dims = group.head_dim == group.v_head_dim and group.head_dim in (64, 128, 256)
        # halves of 128 rows read what TMA reads, and shared memory has place for one head dim
        rows = (64, 128) if group.head_dim == 128 and shape.page_size >= SWIZZLE_ROWS else (64,)
        tiles = launch is not None and launch.block_m in rows and launch.block_n in (64, 128)
        return launch if tiles and masks and dims and _fits(shape) else None

    def bind(
        self, layer: AttentionLayer, cache: LayerCache, dtype: torch.dtype
    ) -> LayerArguments | None:
        """Return the stores of a layer; None where TMA cannot read them."""
        return layer_arguments(layer, cache, dtype)

    def arguments(self, inputs: Pass, part: SplitKV) -> Arguments:
        """Return what all its launches in a pass share."""
        # without a tree its mask is not read
        mask = inputs.requests.cu_seqlens_q if inputs.tree is None else inputs.tree
        return Arguments(
            *(part.partials, inputs.requests, part.work_indptr, part.spans, part.first_spans, mask),
            *(inputs.size, inputs.drafts, inputs.table_stride),
        )

    def make_attend(
        self, call: Call, bound: LayerArguments, launch: Launch, part: SplitKV
    ) -> Launcher:
        """Return its own launcher for calls with this key."""
        page = call.cache.page_size
        split = constants_of(part.cuts)
        max_copy_rows = launch.block_n if split.TILE_UNITS else _COPY_ROWS
        rows = min(max(page, SWIZZLE_ROWS), launch.block_n, max_copy_rows)
        sizes = {"PAGE": page, "GATHERS": page < SWIZZLE_ROWS, "COPY_ROWS": rows}
        sizes["TILE_ROWS"] = launch.block_m
        # two programs may share a processor; halves of 128 rows divide the registers themselves
        limit = None if launch.block_m > 64 else 128 if launch.ctas_per_sm > 1 else 232
        return Launcher(
            decode_hopper,
            *bound.rows(rows),
            *(bound.k, bound.v, bound.sinks, bound.scales, call.layer.sliding_window or 0),
            config_of(call, bound, launch, **sizes, **split._asdict()),
            num_warps=4,
            maxnreg=limit,
        )

    def make_launchers(
        self, call: Call, bound: LayerArguments, launch: Launch, part: SplitKV
    ) -> Launchers:
        """Return launchers for calls with this key."""
        launchers = super().make_launchers(call, bound, launch, part)
        return launchers if _aligned(call.q) else launchers._replace(change=Call.dense)


class HopperMlaDecode(SplitKernel):
    """decode_mla_hopper: 512 + 64 columns of 16 bits, tiles of 64 by 64, as decode_splits does."""

    takes_chunks: ClassVar[bool] = True
    takes_first_spans: ClassVar[bool] = True

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

    def arguments(self, inputs: Pass, part: SplitKV) -> Arguments:
        """Return what all its launches in a pass share."""
        shared = (part.partials, inputs.requests, part.work_indptr, part.spans, part.first_spans)
        return Arguments(*shared, inputs.size, inputs.table_stride)

    def make_attend(
        self, call: Call, bound: LayerArguments, launch: Launch, part: SplitKV
    ) -> Launcher:
        """Return its own launcher for calls with this key."""
        page = call.cache.page_size
        config = config_of(
            call, bound, launch, PAGE=page, GATHERS=False, **constants_of(part.cuts)._asdict()
        )
        config = config._replace(HND=False, STAGES=2, INT64_OFFSETS=False)
        k_rows, _ = bound.rows(min(64, page))
        return Launcher(decode_mla_hopper, k_rows, bound.scales, config, num_warps=4)

    def make_launchers(
        self, call: Call, bound: LayerArguments, launch: Launch, part: SplitKV
    ) -> Launchers:
        """Return launchers for calls with this key."""
        return super().make_launchers(call, bound, launch, part)._replace(change=_RowsCall)


class _RowsCall(Call):
    """A call whose contiguous queries are given as rows for TMA, 64 by PANEL at a time."""

    __slots__ = ()

    def __init__(self, call: Call) -> None:
        q = call.q
        if not q.is_contiguous() or q.data_ptr() % 16:
            q = q.clone(memory_format=torch.contiguous_format)
        self.q, self.layer, self.out, self.lse = q, call.layer, call.out, call.lse
        tokens, heads, dim = q.shape
        self.queries = MapOf(q.data_ptr(), (tokens * heads, dim), (dim, 1))
        self.outputs = call.outputs

    def query_tensors(self) -> TensorDescriptor:
        """Return `queries` as the descriptor that Triton takes."""
        _, shape, strides = self.queries
        rows = self.q.view(shape)
        return TensorDescriptor(rows, [*shape], [*strides], [64, PANEL], SWIZZLED)


DECODE = (HopperMlaDecode(), HopperDecode())
PREFILL = (HopperPrefill(),)


def _fits(shape: Shape) -> bool:
    """Say whether keys and values are of the queries' 16 bits, in pages that divide well.

    These kernels do not know the chunks of dual chunk attention.
    """
    if shape.group.dual_chunk is not None:
        return False
    block, page = hopper_block(shape.group.head_dim, shape.group.v_head_dim), shape.page_size
    if block is None or shape.dtype not in _DTYPES or shape.dtype != shape.kv_cache_dtype:
        return False
    return page == 0 or page % block == 0 or block % page == 0


def _is_64(launch: Launch | None) -> bool:
    return launch is not None and (launch.block_m, launch.block_n) == (64, 64)


def config_of(
    call: Call, bound: LayerArguments, launch: Launch, **extra: int | bool
) -> AttentionConfig:
    """Return the constants of a launch; extra: those of its pages and of what is split."""
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
        INT64_OFFSETS=bound.int64_offsets,
        **extra,  # type: ignore[arg-type]  # named as the fields
    )


def _aligned(q: Tensor) -> bool:
    """Say whether 16-byte copies can read q: every head of every token begins at 16 bytes."""
    even = q.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in q.stride()[:2])
    return even and _near(q)


def _near(q: Tensor) -> bool:
    """Say whether the heads of a token lie so near that 32 bits count from one to the other."""
    return q.shape[1] * q.stride(1) < 1 << 31
