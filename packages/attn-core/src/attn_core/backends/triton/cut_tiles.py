"""Passes whose longest tiles would run alone at the end: their keys are cut."""

from __future__ import annotations

from attn_core.backends.triton.kernel import Shape
from attn_core.backends.triton.portable.plan_tiles import LEAST_UNITS, LONG_TILE, UNIT
from attn_core.backends.triton.schedule import TILE_ROWS
from attn_core.runtime.batch import ForwardBatch

MOST_TILES = 16  # of each program: of more, the longest is a small part of its work


def may_cut(shape: Shape, batch: ForwardBatch, longest: int, min_queries: int) -> bool:
    """Say whether the plan of a pass may find tiles to cut; `order_requests` decides.

    A part writes what a merge reads. So prompts without a prefix, whose tiles are many, are not
    cut, nor is a window. longest: an upper bound of the keys of a request. min_queries: see Tiles.
    """
    group, programs = shape.group, shape.processors
    if group.window is not None or longest <= LEAST_UNITS * UNIT:
        return False
    if shape.tiles > MOST_TILES * programs:
        return False
    queries, keys = batch.query_lens_host, batch.views[group.view].seq_lens_host
    if queries is None or keys is None:
        return True
    if queries == keys:
        return False
    work = longest_units = 0
    for n, m in zip(queries, keys, strict=True):
        if n >= max(min_queries, 1):
            units = -(-m // UNIT)
            work += -(-n * group.num_queries_per_kv // TILE_ROWS) * units
            longest_units = max(longest_units, units)
    return longest_units * programs > work * group.num_kv_heads * LONG_TILE
