"""Cut a ragged batch into pieces of equal shape, each with its keys in tiles and its masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from attn_core.backends.torch_native.limits import Limits
from attn_core.runtime.batch import SpecInfo
from attn_core.runtime.layer import LayerGroup

Where = Tensor | slice  # rows or blocks: a slice where they follow each other, so nothing is copied
BlocksOf = Callable[[Sequence[int], int, int], Where]  # requests, first block, end → block ids


@dataclass(frozen=True, kw_only=True, eq=False)
class Tile:
    """Some keys of every request of a piece: `length` from offset `start` of its blocks.

    mask: additive [1 or R, 1, rows, length], None where all is visible; dead: bool
    [1 or R, 1, rows], queries that see none of these keys, None where there is none. causal:
    query i sees keys 0..i. splits: how many parts are attended side by side and then merged.
    whole: all tokens of the blocks are meant.
    """

    blocks: Where
    start: int
    length: int
    causal: bool = False
    mask: Tensor | None = None
    dead: Tensor | None = None
    splits: int = 1
    whole: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """R requests with as many queries and as many keys each; no tiles = nothing is visible.

    rows: their query tokens, request after request. few: so few queries that calls cost more than
    numbers. fold: the q heads of a kv head are rows of one product. parts: splits of all tiles.
    """

    rows: Where
    requests: int
    queries: int
    few: bool
    fold: bool
    parts: int
    tiles: tuple[Tile, ...]


_LEAST_SPLIT = 64  # keys worth a core
QUERY_BLOCK = 512  # a mask has at most this many queries, so it grows with the keys only


class Planner:
    """Plans the layer classes of one pass; masks of one shape are built once."""

    def __init__(
        self,
        query_lens: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        spec: SpecInfo | None = None,
    ) -> None:
        self._query_lens = query_lens
        self._starts = [0]
        for n in query_lens:
            self._starts.append(self._starts[-1] + n)
        self._dtype, self._device = dtype, device
        self._masks: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        self._tree = None if spec is None else spec.tree_mask
        self._depth = None if spec is None else spec.depth  # a draft's position behind the prefix

    def plan(
        self, layer: LayerGroup, key_lens: Sequence[int], blocks_of: BlocksOf, limits: Limits
    ) -> tuple[Piece, ...]:
        """Cut the batch for one class of layers; key_lens: keys per request, new ones included."""
        buckets: dict[tuple[int, int], list[int]] = {}
        for b, (n, s) in enumerate(zip(self._query_lens, key_lens, strict=True)):
            if n:
                buckets.setdefault((n, s), []).append(b)
        pieces = []
        for (n, s), members in buckets.items():
            for first, end in self._query_blocks(layer, n, s, limits):
                span = _span(layer, n, s, first, end)
                size = self._requests_together(span, limits, len(members))
                for offset in range(0, len(members), size):
                    group = members[offset : offset + size]
                    cut = (n, s, first, end, *span)
                    pieces.append(self._piece(layer, group, cut, blocks_of, limits))
        return tuple(pieces)

    def _query_blocks(
        self, layer: LayerGroup, n: int, s: int, limits: Limits
    ) -> Iterator[tuple[int, int]]:
        banded = layer.window is not None and layer.window < n
        masked = limits.tile is None and layer.causal and n != s
        size = QUERY_BLOCK if (banded or masked) and self._tree is None else n
        for first in range(0, n, size):
            yield first, min(n, first + size)

    @staticmethod
    def _requests_together(span: tuple[int, int], limits: Limits, available: int) -> int:
        keys = max(1, span[1] - span[0])
        return max(1, min(available, limits.gather // keys))

    def _piece(
        self,
        layer: LayerGroup,
        members: Sequence[int],
        cut: tuple[int, int, int, int, int, int],
        blocks_of: BlocksOf,
        limits: Limits,
    ) -> Piece:
        n, s, first, end, low, high = cut
        queries = end - first
        group = layer.num_q_heads // layer.num_kv_heads
        few = queries <= limits.few
        fold = group > 1 and few
        # the first key that not every query sees
        new = max(low, s - n + first) if layer.causal and queries > 1 else high
        tiles = []
        for c0, c1 in _cuts(low, new, high, queries, members, limits):
            block0, block1 = c0 // limits.block, -(-c1 // limits.block)
            causal, mask, dead = False, None, None
            if layer.causal and not self._all_visible(layer, n, s - n, first, c0, c1, queries):
                square = c0 == s - n + first and c1 - c0 == queries
                narrow = layer.window is not None and layer.window < queries
                if square and not narrow and not fold and self._tree is None:
                    causal = True
                elif self._tree is None:
                    key = (queries, c0 - (s - n + first), c1 - c0, layer.window or 0)
                    mask, dead = self._band(key, group if fold else 1)
                else:
                    mask, dead = self._tree_mask(
                        members, c0 - (s - n), c1 - c0, layer.window, group if fold else 1
                    )
            tiles.append(
                Tile(
                    blocks=blocks_of(members, block0, block1),
                    start=c0 - block0 * limits.block,
                    whole=c0 == block0 * limits.block and c1 == block1 * limits.block,
                    length=c1 - c0,
                    causal=causal,
                    mask=mask,
                    dead=dead,
                    splits=self._splits(
                        c1 - c0, few and mask is None and not causal, members, limits
                    ),
                )
            )
        return Piece(
            rows=self._rows(members, n, first, end),
            requests=len(members),
            queries=queries,
            few=few,
            fold=fold,
            parts=sum(tile.splits for tile in tiles),
            tiles=tuple(tiles),
        )

    def _all_visible(
        self, layer: LayerGroup, n: int, prefix: int, first: int, c0: int, c1: int, queries: int
    ) -> bool:
        """Every query of the block sees every key of the tile."""
        earliest = prefix if self._tree is not None else prefix + first + 1
        latest = prefix + (n if self._tree is not None else first + queries) - 1
        return c1 <= earliest and (layer.window is None or c0 > latest - layer.window)

    @staticmethod
    def _splits(keys: int, may_split: bool, members: Sequence[int], limits: Limits) -> int:
        """One request with few queries leaves cores idle, or far from the keys they gathered."""
        even = keys % limits.splits == 0 and keys >= limits.splits * _LEAST_SPLIT
        return limits.splits if may_split and even and len(members) == 1 else 1

    def _rows(self, members: Sequence[int], n: int, first: int, end: int) -> Where:
        covers_all = first == 0 and end == n
        adjacent = members[-1] - members[0] == len(members) - 1
        start = self._starts[members[0]]
        if len(members) == 1 or (covers_all and adjacent):
            return slice(start + first, start + n * (len(members) - 1) + end)
        starts = torch.tensor([self._starts[b] for b in members], device="cpu")
        return (
            (starts[:, None] + torch.arange(first, end, device="cpu")).reshape(-1).to(self._device)
        )

    def _band(self, key: tuple[int, int, int, int], group: int) -> tuple[Tensor, Tensor | None]:
        """The mask of a causal band: queries 0.., keys offset.., window (0 = none)."""
        if (*key, group) not in self._masks:
            queries, offset, keys, window = key
            i = torch.arange(queries, device=self._device)[:, None]
            j = torch.arange(offset, offset + keys, device=self._device)
            visible = j <= i
            if window:
                visible &= j > i - window
            self._masks[*key, group] = self._additive(visible[None], group)
        return self._masks[*key, group]

    def _tree_mask(
        self, members: Sequence[int], offset: int, keys: int, window: int | None, group: int
    ) -> tuple[Tensor, Tensor | None]:
        """The mask of draft trees; offset: the first key, counted from the first draft."""
        assert self._tree is not None
        assert self._depth is not None
        requests = torch.tensor(members, device=self._device)
        tree, depth = self._tree[requests], self._depth[requests]
        j = torch.arange(offset, offset + keys, device=self._device)
        draft = j.clamp(min=0)
        visible = (j < 0) | tree[:, :, draft]
        if window is not None:
            position = torch.where(j < 0, j, depth[:, draft])
            visible &= position[:, None, :] > depth[:, :, None] - window
        return self._additive(visible, group)

    def _additive(self, visible: Tensor, group: int) -> tuple[Tensor, Tensor | None]:
        visible = visible.repeat_interleave(group, 1).unsqueeze(1)
        dead = ~visible.any(-1)
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        may_check = self._device.type != "cpu" or bool(dead.any())  # elsewhere asking would sync
        return mask.masked_fill_(~visible, -torch.inf), dead if may_check else None


def _span(layer: LayerGroup, n: int, s: int, first: int, end: int) -> tuple[int, int]:
    """The keys that any query of the block [first, end) sees; n queries end at s keys."""
    if not layer.causal:
        return 0, s
    low = 0 if layer.window is None else max(0, s - n + first - layer.window + 1)
    return low, max(low, s - n + end)


def _cuts(
    low: int, new: int, high: int, queries: int, members: Sequence[int], limits: Limits
) -> Iterator[tuple[int, int]]:
    """Tiles of the keys [low, high): one where they fit, else the old keys evenly, then the new."""
    if low >= high:
        return
    tile = high if limits.tile is None else max(queries, limits.tile // len(members))
    if high - low <= tile:
        yield low, high
        return
    count = -(-(new - low) // tile)
    edges = [low + (new - low) * i // count // limits.splits * limits.splits for i in range(count)]
    yield from pairwise([*edges, new])
    if new < high:
        yield new, high
