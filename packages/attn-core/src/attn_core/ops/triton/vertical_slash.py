"""Kernels of vertical-slash sparse prefill: lists of keys, and attention to them."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton compiles the kernels: a parameter is a pointer or a number, which no annotation says.

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from attn_core.ops import vertical_slash
from attn_core.ops.vertical_slash import Kernels, KeyLists, Part, VerticalSlash, empty_lists

ROWS = tl.constexpr(vertical_slash.ROWS)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NONE = tl.constexpr(1 << 30)  # beyond all keys


@triton.jit(
    do_not_specialize=[
        "start",
        "lo",
        "hi",
        "blocks",
        "slashes",
        "verticals",
        "most_blocks",
        "most_columns",
    ]
)
def list_keys(
    slash, vertical, block_count, block_offset, column_count, column_index,
    start, lo, hi, blocks, slashes, verticals, most_blocks, most_columns, LANES: tl.constexpr,
):  # fmt: skip
    """Merge windows and verticals of LANES blocks of queries, both in the order of their keys.

    Each step takes one line of each lane: a window that is covered, a vertical that is, a vertical
    before the next window, or the window, which becomes a block.
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    valid = row < blocks
    end = start + (row + 1) * ROWS
    last = tl.minimum(end, hi)
    list_row = (head * blocks + row).to(tl.int64)
    slash += head * slashes
    vertical += head * verticals
    covered = tl.zeros([LANES], tl.int32) + lo
    s = tl.zeros([LANES], tl.int32)
    v = tl.zeros([LANES], tl.int32)
    num_blocks = tl.zeros([LANES], tl.int32)
    num_columns = tl.zeros([LANES], tl.int32)
    for _ in range(slashes + verticals):
        more_slashes = s < slashes
        window = end - tl.load(slash + s, mask=valid & more_slashes, other=0)
        key = tl.load(vertical + v, mask=valid & (v < verticals), other=NONE)
        block_start = tl.maximum(window - ROWS, covered)
        dead = more_slashes & ((window <= covered) | (block_start >= hi))
        block_start = tl.where(more_slashes, block_start, NONE)
        skip = ~dead & (key < covered)
        column = ~dead & ~skip & (key < block_start)
        block = ~dead & ~skip & ~column & more_slashes
        tl.store(
            block_offset + list_row * most_blocks + num_blocks, block_start, mask=valid & block
        )
        new_column = column & (key < last)
        tl.store(column_index + list_row * most_columns + num_columns, key, mask=valid & new_column)
        num_columns += new_column.to(tl.int32)
        num_blocks += block.to(tl.int32)
        covered = tl.where(block, block_start + ROWS, covered)
        s += (dead | block).to(tl.int32)
        v += (skip | column).to(tl.int32)
    tl.store(block_count + list_row, num_blocks, mask=valid)
    tl.store(column_count + list_row, num_columns, mask=valid)


@triton.jit
def attend_list(
    tile, state, entries, count, first, last, k, v, k_stride, v_stride, row, hi, factor,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Attend to keys first … last of a list of `count` runs of WIDTH keys each."""
    m, total, acc = state
    n = tl.arange(0, BN)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    for start in tl.range(first, last, BN, num_stages=STAGES):
        place = (start + n) // WIDTH
        if MASKED:
            place = tl.minimum(place, count - 1)
        j = tl.load(entries + place) + (start + n) % WIDTH
        key_rows = j
        if MASKED:
            key_rows = tl.minimum(j, hi - 1)
        k_ptrs = k + key_rows.to(tl.int64)[:, None] * k_stride + d[None, :]
        if D == BD:
            keys = tl.load(k_ptrs)
        else:
            keys = tl.load(k_ptrs, mask=(d < D)[None, :] & (key_rows >= 0)[:, None], other=0.0)
        s = tl.dot(tile, tl.trans(keys), input_precision="ieee")
        if MASKED:
            in_list = ((start + n) < count * WIDTH) & (j < hi)
            visible = in_list[None, :] & (j[None, :] <= row[:, None])
            s = tl.where(visible, s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1) * factor)
        base = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp2(s * factor - base[:, None])
        shrink = tl.exp2(m - base)
        total = total * shrink + tl.sum(p, 1)
        m = new
        v_ptrs = v + key_rows.to(tl.int64)[:, None] * v_stride + dv[None, :]
        if DV == BDV:
            values = tl.load(v_ptrs)
        else:
            values = tl.load(v_ptrs, mask=(dv < DV)[None, :] & (key_rows >= 0)[:, None], other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return m, total, acc


@triton.jit(do_not_specialize=["start", "end", "hi", "blocks", "most_blocks", "most_columns"])
def attend_rows(
    q, q_token, q_head, k, v, k_stride, v_stride,
    block_count, block_offset, column_count, column_index,
    out, lse, out_token, out_head, lse_token, lse_head,
    start, end, hi, blocks, most_blocks, most_columns, scale,
    BN: tl.constexpr, STAGES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Attend with one block of ROWS queries of one head; the last block, of most keys, is first."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    list_row = (head * blocks + block).to(tl.int64)
    row = start + block * ROWS + tl.arange(0, ROWS)
    token = (row - start).to(tl.int64)
    row_mask = row < end
    d = tl.arange(0, BD)
    tile = tl.load(
        q + token[:, None] * q_token + head * q_head + d[None, :],
        mask=row_mask[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    factor = scale * LOG2E
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BDV], tl.float32)
    state = (m, total, acc)
    count = tl.load(block_count + list_row)
    entries = block_offset + list_row * most_blocks
    # only the last two blocks can hold keys after the first row, or keys from hi on
    masked = tl.maximum(count - 2, 0) * ROWS // BN * BN
    state = attend_list(
        tile, state, entries, count, 0, masked, k, v, k_stride, v_stride, row, hi, factor,
        ROWS, False, BN, STAGES, D, DV, BD, BDV,
    )  # fmt: skip
    state = attend_list(
        tile, state, entries, count, masked, count * ROWS, k, v, k_stride, v_stride, row, hi,
        factor, ROWS, True, BN, STAGES, D, DV, BD, BDV,
    )  # fmt: skip
    count = tl.load(column_count + list_row)
    m, total, acc = attend_list(
        tile, state, column_index + list_row * most_columns, count, 0, count,
        k, v, k_stride, v_stride, row, hi, factor, 1, True, BN, STAGES, D, DV, BD, BDV,
    )  # fmt: skip
    empty = total == 0.0
    result = acc / tl.where(empty, 1.0, total)[:, None]
    dv = tl.arange(0, BDV)
    tl.store(
        out + token[:, None] * out_token + head * out_head + dv[None, :],
        result.to(out.dtype.element_ty), mask=row_mask[:, None] & (dv < DV)[None, :],
    )  # fmt: skip
    sums = tl.where(empty, -float("inf"), (m + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    tl.store(lse + token * lse_token + head * lse_head, sums, mask=row_mask)


def to_lists(indexes: VerticalSlash, part: Part) -> KeyLists:
    """Do what attn_core.ops.vertical_slash.to_lists does, in one launch."""
    lists = empty_lists(indexes, part)
    heads, blocks = lists.block_count.shape
    slash, vertical = indexes.slash.contiguous(), indexes.vertical.contiguous()
    lanes = 32
    list_keys[(triton.cdiv(blocks, lanes), heads)](
        slash, vertical, *lists, part.start, part.lo, part.hi, blocks,
        slash.shape[1], vertical.shape[1],
        lists.block_offset.shape[2], lists.column_index.shape[2], LANES=lanes, num_warps=1,
    )  # fmt: skip
    return lists


@functools.cache
def _stages(device_type: str, query_bytes: int, stage_bytes: int) -> int:
    """Return how many stages fit the shared memory of the GPU that Triton compiles for."""
    if device_type == "cpu":  # the interpreter
        return 1
    target = driver.active.get_current_target()
    arch = 0 if target.backend == "hip" else int(target.arch)
    kib = {90: 227, 100: 227, 103: 227, 80: 163}.get(arch, 99 if arch >= 80 else 64)
    return max(1, min(3, (kib * 1024 - query_bytes) // stage_bytes))


def attend_lists(
    q: Tensor, k: Tensor, v: Tensor, lists: KeyLists, part: Part, scale: float,
    *, block_n: int = 64, stages: int = 0, warps: int = 4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Do what attn_core.ops.vertical_slash.attend_lists does, in one launch.

    stages: of keys and values in shared memory; 0: up to three, as many as fit.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    n, heads, dim = q.shape
    v_dim = v.shape[1]
    out, lse = q.new_empty(n, heads, v_dim), q.new_empty(n, heads, dtype=torch.float32)
    size = q.element_size()
    stages = stages or _stages(
        q.device.type, vertical_slash.ROWS * dim * size, block_n * (dim + v_dim) * size
    )
    _, blocks, most_blocks = lists.block_offset.shape
    attend_rows[(blocks, heads)](
        q, q.stride(0), q.stride(1), k, v, k.stride(0), v.stride(0), *lists, out, lse,
        *out.stride()[:2], *lse.stride(), part.start, part.end, part.hi, blocks,
        most_blocks, lists.column_index.shape[2], scale,
        BN=block_n, STAGES=stages, D=dim, DV=v_dim,
        BD=max(16, triton.next_power_of_2(dim)), BDV=max(16, triton.next_power_of_2(v_dim)),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


KERNELS = Kernels(to_lists, attend_lists)
