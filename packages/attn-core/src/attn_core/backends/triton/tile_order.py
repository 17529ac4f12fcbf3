"""Longest-first scheduling of the tiles of prompts."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from attn_core.backends.triton.tuning import Launch

TILE_ROWS = 128  # of a tile: (query, head of the group) pairs


@dataclass(frozen=True, kw_only=True)
class Order:
    """Requests by their keys, the longest first, equal for all layers of a group.

    request_order: int32 [batch], the requests.
    tile_offsets: int32 [batch + 1], the tiles that come before each of them, and all tiles.
    longest: an upper bound of the keys of a request, as far as the host knows.
    launch: of the kernel that runs; only extend_hopper, in tiles of TILE_ROWS, reads the order.
    tiles: an upper bound of the tiles of all requests and KV heads.
    """

    tile_offsets: Tensor
    request_order: Tensor
    longest: int
    launch: Launch
    tiles: int

    @property
    def is_read(self) -> bool:
        """Whether the launch takes requests in this order."""
        return self.launch.block_m == TILE_ROWS


def fill_order(
    order: Order, cu_seqlens_q: Tensor, lengths: Tensor, group: int, *, paged: bool
) -> None:
    """Fill `order` for a batch: one small launch, which a CUDA graph can record.

    lengths: keys of each request, int32 [batch]; not paged: their cu_seqlens, int32 [batch + 1].
    """
    batch = order.request_order.shape[0]
    order_requests[(triton.cdiv(batch, 64),)](
        cu_seqlens_q,
        lengths,
        order.tile_offsets,
        order.request_order,
        batch,
        GROUP=group,
        ROWS=TILE_ROWS,
        PAGED=paged,
        BLOCK=64,
        num_warps=4,
    )


@triton.jit
def _counts(cu, lengths, b, batch, GROUP: tl.constexpr, ROWS: tl.constexpr, PAGED: tl.constexpr):
    """Return the keys and the tiles of requests; those beyond the batch have neither."""
    valid = b < batch
    queries = tl.load(cu + b + 1, mask=valid, other=0) - tl.load(cu + b, mask=valid, other=0)
    keys = tl.load(lengths + b, mask=valid, other=0)
    if not PAGED:
        keys = tl.load(lengths + b + 1, mask=valid, other=0) - keys
    return keys, (queries * GROUP + ROWS - 1) // ROWS


@triton.jit(do_not_specialize=["batch"])
def order_requests(
    cu,
    lengths,
    tile_offsets,
    request_order,
    batch,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rank BLOCK requests by counting: as many come before one as have more keys."""
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys, tiles = _counts(cu, lengths, own, batch, GROUP, ROWS, PAGED)
    rank = tl.zeros([BLOCK], tl.int32)
    offset = tl.zeros([BLOCK], tl.int32)
    for start in range(0, batch, BLOCK):
        b = start + tl.arange(0, BLOCK)
        b_keys, b_tiles = _counts(cu, lengths, b, batch, GROUP, ROWS, PAGED)
        equal = b_keys[None, :] == keys[:, None]
        before = (b_keys[None, :] > keys[:, None]) | (equal & (b[None, :] < own[:, None]))
        before = before & (b < batch)[None, :]
        rank += tl.sum(before.to(tl.int32), 1)
        offset += tl.sum(tl.where(before, b_tiles[None, :], 0), 1)
    valid = own < batch
    tl.store(request_order + rank, own, mask=valid)
    tl.store(tile_offsets + rank, offset, mask=valid)
    tl.store(tile_offsets + rank + 1, offset + tiles, mask=valid & (rank == batch - 1))
