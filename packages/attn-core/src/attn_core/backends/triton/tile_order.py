"""The order in which requests of many queries are taken: the longest first."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles this: a parameter is a pointer, a tile or a constant, which no annotation says.

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from attn_core.backends.triton.tuning import Launch

TILE = 128  # lines of a tile: (query, head of the group) pairs


@dataclass(frozen=True, kw_only=True)
class Order:
    """Requests by their keys, the most first, equal for all layers of a class.

    who: int32 [batch], the requests. begins: int32 [batch + 1], how many tiles come before each of
    them, and at its end how many there are. longest: keys of the longest request at most, as far
    as the host knows. launch: what runs; only extend_hopper, in tiles of TILE lines, reads the
    order. tiles: of all requests and KV heads at most.
    """

    begins: Tensor
    who: Tensor
    longest: int
    launch: Launch
    tiles: int

    @property
    def is_read(self) -> bool:
        """Whether the launch takes requests in this order."""
        return self.launch.block_m == TILE


def fill_order(
    order: Order, cu_seqlens_q: Tensor, lengths: Tensor, group: int, *, paged: bool
) -> None:
    """Fill `order` for a batch: one small launch, which a CUDA graph can record.

    lengths: keys of each request, int32 [batch]; not paged: their cu_seqlens, int32 [batch + 1].
    """
    batch = order.who.shape[0]
    order_requests[(triton.cdiv(batch, 64),)](
        cu_seqlens_q,
        lengths,
        order.begins,
        order.who,
        batch,
        GROUP=group,
        LINES=TILE,
        PAGED=paged,
        BLOCK=64,
        num_warps=4,
    )


@triton.jit
def _size(cu, lengths, b, batch, GROUP: tl.constexpr, LINES: tl.constexpr, PAGED: tl.constexpr):
    """Return the keys and the tiles of requests; those beyond the batch have none."""
    real = b < batch
    queries = tl.load(cu + b + 1, mask=real, other=0) - tl.load(cu + b, mask=real, other=0)
    keys = tl.load(lengths + b, mask=real, other=0)
    if not PAGED:
        keys = tl.load(lengths + b + 1, mask=real, other=0) - keys
    return keys, (queries * GROUP + LINES - 1) // LINES


@triton.jit(do_not_specialize=["batch"])
def order_requests(
    cu,
    lengths,
    begins,
    who,
    batch,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put BLOCK requests in their places: as many come before one as have more keys."""
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys, tiles = _size(cu, lengths, mine, batch, GROUP, LINES, PAGED)
    place = tl.zeros([BLOCK], tl.int32)
    begin = tl.zeros([BLOCK], tl.int32)
    for start in range(0, batch, BLOCK):
        b = start + tl.arange(0, BLOCK)
        b_keys, b_tiles = _size(cu, lengths, b, batch, GROUP, LINES, PAGED)
        equal = b_keys[None, :] == keys[:, None]
        before = (b_keys[None, :] > keys[:, None]) | (equal & (b[None, :] < mine[:, None]))
        before = before & (b < batch)[None, :]
        place += tl.sum(before.to(tl.int32), 1)
        begin += tl.sum(tl.where(before, b_tiles[None, :], 0), 1)
    real = mine < batch
    tl.store(who + place, mine, mask=real)
    tl.store(begins + place, begin, mask=real)
    tl.store(begins + place + 1, begin + tiles, mask=real & (place == batch - 1))
