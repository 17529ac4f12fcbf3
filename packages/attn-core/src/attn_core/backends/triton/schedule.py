"""What each program takes in a pass: parts of keys of short queries, tiles of prompts."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from attn_core.backends.triton.kernel import Choice, Part, Pass
from attn_core.backends.triton.portable.arguments import KeyParts, Partials, Requests
from attn_core.backends.triton.portable.plan_splits import plan_splits
from attn_core.backends.triton.portable.plan_tiles import order_requests
from attn_core.backends.triton.shared import (
    NO_PARTS,
    Parts,
    Sharing,
    fill_spans,
    first_spans_of,
    spans_of,
)
from attn_core.backends.triton.tuning import Launch, power_of_two
from attn_core.ops.triton.launcher import Launcher, alike, numbered
from attn_core.runtime.layer import LayerGroup

PLANNED_REQUESTS = 1024  # which one program plans at a time
TILE_ROWS = 128  # of a tile of a prompt on Hopper: (query, head of the group) pairs


@dataclass(frozen=True, kw_only=True, eq=False)
class Cuts:
    """What of a split is the same for all batches of a size.

    max_queries: requests with more have no work here; 0 for no such limit.
    sharing: None where each request reads all of its keys.
    """

    choices: tuple[Choice[SplitKV], ...]
    launch: Launch
    max_queries: int
    tiles: int  # of all requests
    kv_heads: int
    row_blocks: int
    heads_at_once: int  # a divisor of the KV heads, see Split
    tile_rows: int  # those of a tile's block_m rows that some request fills
    programs: int
    batch_invariant: bool
    blocks_per_unit: int  # blocks of keys that no two programs share
    overlap: bool  # the merge is launched before the partials are complete
    merge_tile: tuple[int, int, int, int]  # see tuning.merge_tile
    planned_quota: bool = False  # plan_splits chooses what a program takes, see choose_quota
    sharing: Sharing | None = None
    planners: dict[Hashable, Launcher] = field(default_factory=dict, init=False)  # of plan_splits

    @cached_property
    def key(self) -> int:
        """Equal for cuts whose launches have equal constants."""
        return numbered(
            (
                *(self.launch, self.row_blocks, self.heads_at_once, self.tile_rows, self.programs),
                *(self.batch_invariant, self.blocks_per_unit, self.min_units, self.merge_tile),
                *(self.overlap, self.merges_cuts, self.sharing, self.planned_quota),
                self.group_partials,
                *(choice.kernel for choice in self.choices),
            )
        )

    @cached_property
    def parts(self) -> Parts:
        """How plan_shared cuts the work, as the programs do."""
        if not any(choice.kernel.takes_first_spans for choice in self.choices):
            return NO_PARTS
        turns, parts = self.kv_heads // self.heads_at_once, self.programs // self.heads_at_once
        return Parts(self.min_units, turns, parts)

    @cached_property
    def group_partials(self) -> int:
        """Partials that merge_splits loads at first of a request in a group; 0 of several rows.

        They are two of what the request reads alone, and those of its group if that has all
        requests and two thirds of the programs. More than 16 take too many registers.
        """
        if self.sharing is None or self.merge_tile[1] > 1:
            return 0
        tiles = -(-self.tiles * self.tile_rows // self.launch.block_m)
        return min(16, power_of_two(2 + self.programs * 2 // (3 * tiles), 8))

    @property
    def merges_cuts(self) -> bool:
        """Whether the merge looks at each end of a part, which are fewer than tiles."""
        return not self.batch_invariant and self.sharing is None and self.programs < self.tiles

    @property
    def min_units(self) -> int:
        """The fewest units of work that a program takes."""
        units = max(1, self.launch.min_blocks // self.blocks_per_unit)
        return units if self.sharing is None else units + self.sharing.tile_units


@dataclass(kw_only=True, eq=False)
class SplitKV(Part):
    """How the keys of requests with few queries are split among programs (stream-K).

    work_indptr: int32 [batch + 1], see plan_splits; with cuts.sharing that of plan_shared, and with
    cuts.planned_quota the quota and tile units behind it.
    buffer: int32 [rows, columns], of plan_shared, None without. counter: int32 [1], zero.
    partial_out, partial_lse: float32 [S, block_m, Dv] and [S, block_m], of tiles that were split.
    All layers share them: one runs after the other.
    """

    cuts: Cuts
    unsplit: bool  # every tile is one unit: there is nothing to merge
    work_indptr: Tensor
    partial_out: Tensor
    partial_lse: Tensor
    buffer: Tensor | None
    counter: Tensor

    @property
    def key(self) -> int:
        tensors = (self.work_indptr, self.partial_out, self.partial_lse)
        return numbered((self.cuts.key, self.unsplit, *map(alike, tensors)))

    @property
    def partials(self) -> Partials:
        """The scratch as kernels take it."""
        return Partials(self.partial_out, self.partial_lse)

    @property
    def spans(self) -> Tensor:
        """The spans of plan_shared int32 [columns, SPAN]; without sharing no kernel reads them."""
        return self.work_indptr if self.buffer is None else spans_of(self.buffer)

    @property
    def first_spans(self) -> Tensor:
        """The spans that parts begin in, see plan_shared; without sharing no kernel reads them."""
        return self.work_indptr if self.buffer is None else first_spans_of(self.buffer)


@dataclass(kw_only=True, eq=False)
class Tiles(Part):
    """How the rows of prompts are cut into tiles, and the order in which programs take them.

    min_queries: requests with fewer have no tiles; 0 for no such limit.
    request_order: int32 [batch], the requests by their keys, the longest first.
    tile_offsets: int32 [batch + 1], the tiles that come before each of them, and all tiles.
    Only kernels that take this order read these two. counter: int32 [2], zeros, for such kernels.
    longest: an upper bound of the keys of a request. tiles: of the tiles of all requests and heads.
    parts: where the keys of tiles may be cut; tile_offsets then counts a tile once for each part.
    """

    min_queries: int
    request_order: Tensor
    tile_offsets: Tensor
    counter: Tensor
    longest: int
    tiles: int
    processors: int
    parts: KeyParts | None = None

    @property
    def key(self) -> int:
        tensors = (self.tile_offsets, self.request_order, self.counter)
        kernels = ((x.kernel, x.launch) for x in self.choices)
        parts = None if self.parts is None else tuple(map(alike, self.parts))
        return numbered((self.min_queries, parts, *kernels, *map(alike, tensors)))

    @property
    def ordered(self) -> bool:
        """Whether a kernel takes requests in this order."""
        return self.choices[0].kernel.takes_order


@dataclass(kw_only=True, eq=False)
class Schedule:
    """The work of a pass, equal for all layers of a group.

    inputs: what every layer of the group reads. longest: an upper bound of the keys of a request,
    of all replays in a graph. unread_lse: float32 [T, Hq], filled where nobody asks for the LSE.
    A batch with long prompts and requests of one query has both parts, over disjoint requests. They
    are two launches: in one, the tile of a prompt would set the registers and the shared memory of
    programs that wait for memory most of their time, and fewer of these would run at once.
    new: the same tiles over a pass's own K and V, where these are all keys, and what they read.
    chunk: the queries of the requests that prompts over latents became; 0 where none did.
    """

    inputs: Pass
    longest: int
    unread_lse: Tensor
    split: SplitKV | None = None
    tiles: Tiles | None = None
    new: tuple[Pass, Tiles] | None = None
    chunk: int = 0


def fill_split(split: SplitKV, requests: Requests, window: int | None, *, causal: bool) -> None:
    """Fill the plan of a split for a batch: one small launch, which a CUDA graph can record."""
    work_indptr, cuts = split.work_indptr, split.cuts
    if cuts.sharing is not None and split.buffer is not None:
        plan = (split.buffer, split.counter, cuts.launch, cuts.sharing, cuts.parts)
        fill_spans(cuts.planners, requests, *plan)
        return
    cu_seqlens_q, seq_lens, _ = requests
    batch = seq_lens.shape[0]
    addresses = (cu_seqlens_q.data_ptr(), seq_lens.data_ptr(), work_indptr.data_ptr())
    at_cu, at_lens, at_indptr = addresses
    key = (
        alike(cu_seqlens_q, at_cu), alike(seq_lens, at_lens), alike(work_indptr, at_indptr),
        window is None, causal,
    )  # fmt: skip
    launcher = cuts.planners.get(key)
    if launcher is None:
        launcher = cuts.planners[key] = Launcher(
            plan_splits,
            *(cuts.launch.block_n, cuts.blocks_per_unit, cuts.max_queries),
            *(window is not None, causal, min(PLANNED_REQUESTS, power_of_two(batch))),
            *(cuts.programs // cuts.row_blocks if cuts.planned_quota else 0, cuts.min_units),
            num_warps=4,
        )
    numbers = (batch, window or 0)
    launcher.launch((1, 1, 1), addresses + numbers, (cu_seqlens_q, seq_lens, work_indptr), numbers)


def fill_order(
    tiles: Tiles, cu_seqlens_q: Tensor, lengths: Tensor, group: LayerGroup, *, paged: bool
) -> None:
    """Fill the order of `tiles` for a batch: one small launch, which a CUDA graph can record.

    lengths: keys of each request, int32 [batch]; not paged: their cu_seqlens, int32 [batch + 1].
    """
    batch, block, order = tiles.request_order.shape[0], 64, tiles.request_order
    counts, slots = (order, order) if tiles.parts is None else tiles.parts[:2]
    tensors = (cu_seqlens_q, lengths, tiles.tile_offsets, order, counts, slots)
    programs, rows = 0 if tiles.parts is None else tiles.processors, TILE_ROWS
    constants = (
        *(group.num_queries_per_kv, rows, tiles.min_queries, paged, block),
        *(group.num_kv_heads, programs),
    )
    key = (constants, cu_seqlens_q.device, *map(alike, tensors))
    launcher = _ORDERS.get(key)
    if launcher is None:
        launcher = _ORDERS[key] = Launcher(order_requests, *constants, num_warps=4)
    launcher.launch((-(-batch // block), 1, 1), (*tensors, batch))


_ORDERS: dict[Hashable, Launcher] = {}
