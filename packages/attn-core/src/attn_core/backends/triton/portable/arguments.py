"""What kernels are given: tuples of pointers and numbers, and tuples of constants.

Triton flattens a NamedTuple into one parameter per field; kernels also build them. Strides count
elements. A field is a tensor or a number on the host, and a pointer or a scalar in a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

# of groups: one may hold groups that share more
LEVELS = tl.constexpr(2)

# the fields of a span, see plan_shared
REQUEST = tl.constexpr(0)
LEVEL = tl.constexpr(1)
TOKEN = tl.constexpr(2)
QUERIES = tl.constexpr(3)
BEGIN = tl.constexpr(4)
END = tl.constexpr(5)
OUTER = tl.constexpr(6)
INNER = tl.constexpr(7)
SPAN = tl.constexpr(8)  # how many there are: 32 bytes, a sector of memory

# What follows the fields before OUTER in the span that a part begins in, see plan_shared. A kernel
# loads ALL_UNITS, QUOTA and NUMBER first. They lie in two sectors, which hold what it loads next.
ALL_UNITS = tl.constexpr(6)
QUOTA = tl.constexpr(7)
NUMBER = tl.constexpr(8)
FIRST_UNIT = tl.constexpr(9)
END_UNIT = tl.constexpr(10)
FIRST_BLOCK = tl.constexpr(11)
PAGES = tl.constexpr(12)  # as many as a block of keys has, MOST_PAGES at most
MOST_PAGES = tl.constexpr(16)
FIRST_SPAN = tl.constexpr(32)  # how many there may be: 128 bytes, a line of the cache


class Queries(NamedTuple):
    """Queries [T, Hq, D], of dual chunk attention [T, 3 · Hq, D]."""

    ptr: Any
    token_stride: Any
    head_stride: Any


class Store(NamedTuple):
    """Keys, values or their FP4 scales: pages [pages, page size, Hkv, D], or [T, Hkv, D] as one."""

    ptr: Any
    page_stride: Any
    token_stride: Any
    head_stride: Any


class KVCache(NamedTuple):
    """Stores of one layer. Without FP4 the scales are k and v; the values of MLA are its keys."""

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any


class Outputs(NamedTuple):
    """Outputs [T, Hq, Dv] and lse float32 [T, Hq]."""

    ptr: Any
    lse: Any
    token_stride: Any
    head_stride: Any


class Partials(NamedTuple):
    """Outputs float32 [S, BM, BDV] and lse float32 [S, BM], in base 2, of tiles that were split."""

    out: Any
    lse: Any


class KeyParts(NamedTuple):
    """How the keys of long tiles are cut: counts, slots int32 [batch], see order_requests.

    counts: the parts of each tile of a request. Where it is not 1, item i of the request leaves its
    state in slot slots + i of out, lse: Partials of TILE_ROWS rows.
    """

    counts: Any
    slots: Any
    out: Any
    lse: Any


class Requests(NamedTuple):
    """cu_seqlens_q int32 [batch + 1], seq_lens int32 [batch], page_table int32 [batch, columns]."""

    cu_seqlens_q: Any
    seq_lens: Any
    page_table: Any


class Tree(NamedTuple):
    """The mask uint8 [batch, n, n] of n drafts each, and the positions int64 [T] of all tokens."""

    mask: Any
    positions: Any


class Scales(NamedTuple):
    """Floats: qk is the scale of the scores times that of the keys, v the scale of the values."""

    qk: Any
    cap: Any
    v: Any


class Constants(NamedTuple):
    """What a kernel is compiled for, of a layer and its cache.

    HEADS: KV heads. GROUP: query heads of each. PAGE: tokens of a page, 0 for plain K and V.
    D, DV: columns of keys and values. D1, D2: the tiles of D. BDV: DV as a power of two.
    LATENT: values are the first D1 columns of the keys, and D1 is BDV. FP4: two values a byte.
    FP4_ALIGNED: the FP4 scales of each key begin at multiples of so many bytes and its codes at
    multiples of eight times as many, 0 where they begin anywhere. KEY_PARTS, VALUE_PARTS: the tiles
    that columns are taken in, each second or fourth one by one tile: 4 of FP4, see load_fp4, and 2
    of values in FP8, see load_split_columns. SAME_STRIDES: of K and V.
    INT64_OFFSETS: offsets into the stores need 64 bits. MASK: see masks.py. CHUNK: tokens of a
    chunk of dual chunk attention, 0 without it. SCALE_QUERIES: see scaled_queries.
    """

    HEADS: int
    GROUP: int
    PAGE: int
    D: int
    D1: int
    D2: int
    DV: int
    BDV: int
    LATENT: bool
    FP4: bool
    FP4_ALIGNED: int
    KEY_PARTS: int
    VALUE_PARTS: int
    PTX: bool
    SAME_STRIDES: bool
    INT64_OFFSETS: bool
    USE_SOFTCAP: bool
    USE_SINKS: bool
    MASK: int
    WINDOW: bool
    CHUNK: int
    SCALE_QUERIES: bool


class MergeConstants(NamedTuple):
    """What merge_splits is compiled for, as in Constants."""

    HEADS: int
    GROUP: int
    DV: int
    BDV: int
    USE_SINKS: bool


class Split(NamedTuple):
    """Constants of a split-KV schedule, see plan_splits and decode_splits.

    SHARED: the work is that of spans, see plan_shared. Then ROW_BLOCKS and BLOCKS_PER_UNIT are 1,
    and nothing is BATCH_INVARIANT. TILE_UNITS come before the keys of each tile in the queue of
    work, and nobody attends to them: they stand for what a tile takes beside its keys. MIN_UNITS
    are more.
    PLANNED_QUOTA: plan_splits chose the quota of a program and its tile units, for one KV head.
    HEADS_AT_ONCE: KV heads whose programs take the same part of the keys, a divisor of HEADS.
    """

    ROW_BLOCKS: int
    BLOCKS_PER_UNIT: int
    BATCH_INVARIANT: bool
    MIN_UNITS: int
    SHARED: bool
    TILE_UNITS: int = 0
    PLANNED_QUOTA: bool = False
    HEADS_AT_ONCE: int = 1


class Tile(NamedTuple):
    """One tile in a kernel: BM rows, (query, head of the group) pairs of one KV head of a request.

    q1 [BM, D1], q2 [BM, D2]: the columns of the queries, tuples of KEY_PARTS tiles where these are
    several. qi [BM]: the queries, counted from 0. live [BM]: rows that the request has. token,
    q_head int64 [BM]: where a row lies in q and out.
    unit float32 [BM]: by which the scores of a row are multiplied, read if SCALE_QUERIES.
    """

    q1: Any
    q2: Any
    qi: Any
    live: Any
    token: Any
    q_head: Any
    unit: Any


class Keys(NamedTuple):
    """What one KV head of a request reads.

    cache: KVCache, at that head. table: its row of the page table. first, length: keys before
    `first` and from `length` on are never read. prefix: keys before the first query. tree: Tree, at
    this request. window: tokens that a query sees. drafts: n of the tree's mask [n, n]. Of dual
    chunk attention: chunk, whose queries see these keys, and seen_by_all, the key before which all
    rows see them.
    """

    cache: Any
    table: Any
    first: Any
    length: Any
    prefix: Any
    tree: Any
    window: Any
    drafts: Any
    chunk: Any
    seen_by_all: Any


class State(NamedTuple):
    """An online softmax: m, total float32 [BM], acc a tuple of float32 tiles, see init_state."""

    m: Any
    total: Any
    acc: Any
