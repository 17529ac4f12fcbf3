"""Launch the Hopper kernels where a shape, a store and its strides allow it."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_core.backends.triton.hopper.common import (
    AttentionConfig,
    Outputs,
    Partials,
    Queries,
    Requests,
    Scales,
    Store,
)
from attn_core.backends.triton.hopper.decode import decode_hopper
from attn_core.backends.triton.hopper.mla_decode import decode_mla_hopper
from attn_core.backends.triton.hopper.prefill import extend_hopper
from attn_core.backends.triton.hopper.tile_queue import TileOrder
from attn_core.backends.triton.portable.launch import SEE_TREE, wide
from attn_core.backends.triton.split_kv import Splits
from attn_core.backends.triton.tile_order import Order
from attn_core.backends.triton.tuning import heads_at_once, hopper_block
from attn_core.cache.layer_cache import LayerCache
from attn_core.runtime.batch import SpecInfo
from attn_core.runtime.layer import AttentionLayer

_DTYPES = (torch.bfloat16, torch.float16)
_PANEL = 64  # columns of 16 bits that one copy brings: a row of 128 swizzled bytes
_SWIZZLED = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
SWIZZLE_ROWS = 8  # rows that the swizzle goes over; smaller pages are gathered


def extend_fits(q: Tensor, layer: AttentionLayer, cache: LayerCache, *, paged: bool) -> bool:
    """Say whether extend_hopper can run a layer: 16 bits, one head dim, pages that divide well."""
    if cache.v is None or q.dtype not in _DTYPES or not q.dtype == cache.k.dtype == cache.v.dtype:
        return False
    block = hopper_block(layer.head_dim, layer.v_head_dim)
    if block is None:
        return False
    size = cache.page_size
    whole = size % block == 0 or block % size == 0
    return (whole or not paged) and all(_rows_fit(t, cache.layout) for t in (cache.k, cache.v))


def extend_on_hopper(
    q: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    cu_seqlens_q: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    order: Order,
    programs: int,
    counter: Tensor,
    out: Tensor,
    lse: Tensor,
    mask_mode: int,
) -> None:
    """Do what launch.extend does, for what extend_fits; counter int32 [2], zeros."""
    heads = layer.num_kv_heads
    page = 0 if page_table is None else cache.page_size
    block = order.launch.block_n
    assert cache.v is not None  # extend_fits
    q = _aligned(q)
    k, v = _store(cache.k, cache.layout), _store(cache.v, cache.layout)
    tma_rows = min(max(page, SWIZZLE_ROWS), block) if page else block
    extend_hopper[(programs,)](
        _queries(q),
        _rows(cache.k, cache.layout, tma_rows),
        _rows(cache.v, cache.layout, tma_rows),
        k,
        v,
        _outputs(out, lse),
        Requests(cu_seqlens_q, lengths, lengths if page_table is None else page_table),
        TileOrder(order.begins, order.who, counter),
        q if layer.sinks is None else layer.sinks,
        _scales(layer, cache),
        cu_seqlens_q.shape[0] - 1,
        heads_at_once(heads, order.longest, 2 * layer.head_dim * q.element_size()),
        layer.sliding_window or 0,
        0 if page_table is None else page_table.stride(0),
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
            MASK=mask_mode,
            WINDOW=layer.sliding_window is not None,
            STAGES=order.launch.stages,
            INT64_OFFSETS=wide(cache, heads, (*k[1:], *v[1:])),
        ),
        num_warps=4,
    )


def decode_fits(
    q: Tensor, layer: AttentionLayer, cache: LayerCache, splits: Splits, mask_mode: int
) -> bool:
    """Say whether decode_hopper can run a layer: as extend_fits, in tiles of 64 by 64."""
    tiles = (splits.launch.block_m, splits.launch.block_n) == (64, 64)
    dims = layer.head_dim == layer.v_head_dim and layer.head_dim in (64, 128, 256)
    masks = mask_mode != SEE_TREE or layer.sliding_window is None  # positions are not loaded
    return tiles and dims and masks and extend_fits(q, layer, cache, paged=True)


def decode_on_hopper(
    q: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    spec: SpecInfo | None,
    splits: Splits,
    out: Tensor,
    lse: Tensor,
    mask_mode: int,
) -> None:
    """Do the first launch of launch.decode, for what decode_fits."""
    launch, page, heads = splits.launch, cache.page_size, layer.num_kv_heads
    assert cache.v is not None  # decode_fits
    q = q if _near(q) else q.contiguous()
    k, v = _store(cache.k, cache.layout), _store(cache.v, cache.layout)
    tma_rows = min(max(page, SWIZZLE_ROWS), launch.block_n)
    tree = None if spec is None else spec.tree_mask
    decode_hopper[(splits.programs,)](
        _queries(q),
        _rows(cache.k, cache.layout, tma_rows),
        _rows(cache.v, cache.layout, tma_rows),
        k,
        v,
        _outputs(out, lse),
        Partials(splits.parts, splits.lse_parts),
        Requests(cu_seqlens_q, seq_lens, page_table),
        splits.lines,
        q if tree is None else tree.contiguous().view(torch.uint8),
        q if layer.sinks is None else layer.sinks,
        _scales(layer, cache),
        seq_lens.shape[0],
        layer.sliding_window or 0,
        0 if spec is None else spec.num_draft_tokens,
        page_table.stride(0),
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
            MASK=mask_mode,
            WINDOW=layer.sliding_window is not None,
            STAGES=launch.stages,
            INT64_OFFSETS=wide(cache, heads, (*k[1:], *v[1:])),
            ROW_BLOCKS=splits.row_blocks,
            BLOCKS_PER_UNIT=splits.unit,
            BATCH_INVARIANT=splits.fixed,
            MIN_UNITS=splits.least,
        ),
        num_warps=4,
        maxnreg=128 if launch.programs > 1 else 232,  # two programs share a multiprocessor
    )


def mla_fits(
    q: Tensor, layer: AttentionLayer, cache: LayerCache, splits: Splits, mask_mode: int
) -> bool:
    """Say whether decode_mla_hopper can run a layer: 512 + 64 in 16 bits, tiles of 64 by 64."""
    if cache.v is not None or q.dtype not in _DTYPES or q.dtype != cache.k.dtype:
        return False
    tiles = (splits.launch.block_m, splits.launch.block_n) == (64, 64) and mask_mode != SEE_TREE
    dims = (layer.num_kv_heads, layer.head_dim, layer.v_head_dim) == (1, 576, 512)
    plain = layer.sinks is None and layer.sliding_window is None
    size = cache.page_size
    pages = size % 64 == 0 or (64 % size == 0 and size >= SWIZZLE_ROWS)
    return tiles and dims and plain and pages and _rows_fit(cache.k, cache.layout)


def decode_mla_on_hopper(
    q: Tensor,
    layer: AttentionLayer,
    cache: LayerCache,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    splits: Splits,
    out: Tensor,
    lse: Tensor,
    mask_mode: int,
) -> None:
    """Do the first launch of launch.decode, for what mla_fits."""
    q_rows = q.contiguous().view(-1, layer.head_dim)
    decode_mla_hopper[(splits.programs,)](
        TensorDescriptor(q_rows, list(q_rows.shape), [layer.head_dim, 1], [64, _PANEL], _SWIZZLED),
        _rows(cache.k, cache.layout, min(64, cache.page_size)),
        _outputs(out, lse),
        Partials(splits.parts, splits.lse_parts),
        Requests(cu_seqlens_q, seq_lens, page_table),
        splits.lines,
        Scales(layer.scale * cache.k_scale, layer.logit_cap or 1.0, cache.k_scale),
        seq_lens.shape[0],
        page_table.stride(0),
        AttentionConfig(
            HEADS=1,
            GROUP=layer.num_q_heads,
            PAGE=cache.page_size,
            HND=False,
            GATHERS=False,
            BN=64,
            D=layer.head_dim,
            USE_SOFTCAP=layer.logit_cap is not None,
            USE_SINKS=False,
            MASK=mask_mode,
            WINDOW=False,
            STAGES=2,
            INT64_OFFSETS=False,
            ROW_BLOCKS=splits.row_blocks,
            BLOCKS_PER_UNIT=splits.unit,
            BATCH_INVARIANT=splits.fixed,
            MIN_UNITS=splits.least,
        ),
        num_warps=4,
    )


def _queries(q: Tensor) -> Queries:
    return Queries(q, q.stride(0), q.stride(1))


def _outputs(out: Tensor, lse: Tensor) -> Outputs:
    return Outputs(out, lse, out.stride(0), out.stride(1))


def _scales(layer: AttentionLayer, cache: LayerCache) -> Scales:
    return Scales(layer.scale * cache.k_scale, layer.logit_cap or 1.0, cache.v_scale)


def _store(store: Tensor, layout: str) -> Store:
    page, token, head, _ = store.stride() if layout == "NHD" else _swapped(store.stride())
    return Store(store, page, token, head)


def _aligned(q: Tensor) -> Tensor:
    """Return q as 16-byte copies can read it: every head of every token begins at 16 bytes."""
    even = q.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in q.stride()[:2])
    return q if even and _near(q) else q.clone(memory_format=torch.contiguous_format)


def _near(q: Tensor) -> bool:
    """Say whether the heads of a token lie so near that 32 bits count from one to the other."""
    return q.shape[1] * q.stride(1) < 1 << 31


def _rows_fit(store: Tensor, layout: str) -> bool:
    """Say whether a store is rows of adjacent columns, evenly spaced and 16-byte aligned.

    Rows that lie one in the other, as those of an expanded tensor, are none of TMA's, nor is an
    empty store.
    """
    _, size, heads, dim = store.shape if layout == "NHD" else _swapped(store.shape)
    page, token, head, last = store.stride() if layout == "NHD" else _swapped(store.stride())
    token = page if layout == "NHD" and size == 1 else token
    even = last == 1 and store.data_ptr() % 16 == 0 and token * store.element_size() % 16 == 0
    even = even and token >= (heads * dim if layout == "NHD" else dim) and store.numel() > 0
    if layout == "NHD":
        return even and (heads == 1 or head == dim) and (size == 1 or page == size * token)
    return even and head == size * token and page == heads * head


def _swapped(x: tuple[int, ...]) -> tuple[int, int, int, int]:
    return x[0], x[2], x[1], x[3]


def _rows(store: Tensor, layout: str, rows: int) -> TensorDescriptor:
    """View a store as rows of tokens (NHD: the heads are columns; HND: rows too)."""
    pages, size, heads, dim = store.shape if layout == "NHD" else _swapped(store.shape)
    token = store.stride(1 if layout == "NHD" else 2)
    if layout == "NHD":
        token = store.stride(0) if size == 1 else token
        shape = [pages * size, heads * dim]
    else:
        shape = [pages * heads * size, dim]
    return TensorDescriptor(store, shape, [token, 1], [rows, _PANEL], _SWIZZLED)
