"""Vertical-slash sparse prefill: the keys that a prompt's queries attend to, and attention to them.

A line of keys is vertical (one key, for every query) or a slash (one distance, for every query). A
prompt's last queries choose the lines of each head (MInference, arXiv:2407.02490, section 3.2).
Blocks of ROWS queries then share lists of keys: each slash is a window of ROWS keys that covers its
diagonal for all rows of the block, and a vertical outside all windows is a single key, a column.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attn_core.ops.merge import merge_states
from attn_core.ops.softmax import softmax_lse

ROWS = 64  # queries of a block, and keys of a window
FIRST_KEYS = 30  # always verticals
NEAREST = 100  # always slashes
NO_INDEX = 2**31 - 1  # fills the lines of a head that has fewer


class VerticalSlash(NamedTuple):
    """The lines of H heads; a head that has fewer is filled up with NO_INDEX.

    vertical: int32 [H, NV], keys counted from 0, ascending. slash: int32 [H, NS], how far a key
    lies before its query, descending.
    """

    vertical: Tensor
    slash: Tensor


class KeyLists(NamedTuple):
    """What R blocks of ROWS queries attend to, for H heads.

    block_count: int32 [H, R]. block_offset: int32 [H, R, NB], the first of each ROWS keys; blocks
    ascend and do not overlap. column_count: int32 [H, R]. column_index: int32 [H, R, NC], single
    keys outside the blocks, ascending. The entries from a count on may be anything.
    """

    block_count: Tensor
    block_offset: Tensor
    column_count: Tensor
    column_index: Tensor


class Part(NamedTuple):
    """Queries start … end of a prompt and the keys lo … hi that one of their rotations meets."""

    start: int
    end: int
    lo: int
    hi: int


class Kernels(NamedTuple):
    """What lists keys, and what attends to them: to_lists and attend_lists, or others like them."""

    to_lists: Callable[[VerticalSlash, Part], KeyLists]
    attend_lists: Callable[[Tensor, Tensor, Tensor, KeyLists, Part, float], tuple[Tensor, Tensor]]


def choose_vertical_slash(
    q: Tensor, k: Tensor, sizes: Sequence[tuple[int, int]], scale: float, chunk_len: int
) -> VerticalSlash:
    """Choose the lines of the query heads of one KV head.

    q [n, 3, H, D]: the last n queries, for the keys of their chunk, of the one before and of all
    earlier ones. k [s, D]: the keys up to the last query. sizes: verticals and slashes of each
    head. The softmax of these queries over their keys is float32; a line's score is its sum over
    the queries. The first FIRST_KEYS keys and the NEAREST distances come before all scores, the
    lowest first: a head may have fewer lines than these.
    """
    n, _, heads, _ = q.shape
    s = k.shape[0]
    chunk_start = (s - 1) // chunk_len * chunk_len
    prev_start = max(chunk_start - chunk_len, 0)
    scores = torch.empty(heads, n, s, dtype=torch.float32, device=q.device)
    for rotation, (lo, hi) in enumerate(
        ((chunk_start, s), (prev_start, chunk_start), (0, prev_start))
    ):
        if lo < hi:
            # not matmul's `out`: beside intel-extension-for-pytorch a slice of it is not written
            rows = q[:, rotation].transpose(0, 1).float() * scale
            scores[..., lo:hi] = rows @ k[lo:hi].float().T
    future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1)
    scores[..., s - n :].masked_fill_(future, -torch.inf)
    weights = scores.softmax(-1)
    vertical = weights.sum(1)
    _always_choose(vertical, FIRST_KEYS, n)
    # row r of n sees the key of distance d at s - n + r - d: rows shifted to end at one column
    padded = torch.nn.functional.pad(weights, (n - 1, 0))
    width = s + n - 1
    slash = padded.as_strided((heads, n, s), (n * width, width + 1, 1)).sum(1).flip(-1)
    _always_choose(slash, NEAREST, n)
    verticals, slashes = zip(*sizes, strict=True)
    return VerticalSlash(
        _top_indexes(vertical, verticals).sort(-1).values,
        _top_indexes(slash, slashes).sort(-1, descending=True).values,
    )


def _always_choose(scores: Tensor, count: int, max_score: int) -> None:
    """Rank the first `count` lines of scores [H, s] above all scores up to `max_score`, in order.

    The order of equal scores, such as infinity, is topk's, and differs between devices.
    """
    first = scores[:, :count]
    first[:] = max_score + torch.arange(first.shape[-1], 0, -1, device=scores.device)


def _top_indexes(scores: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the lines with the best scores [H, s], as many as `sizes` says, int32 [H, N]."""
    width = min(max(sizes), scores.shape[-1])
    indexes = scores.topk(width, -1).indices.int()
    counts = torch.tensor(sizes, device=indexes.device)
    return indexes.masked_fill(
        torch.arange(width, device=indexes.device) >= counts[:, None], NO_INDEX
    )


def to_lists(indexes: VerticalSlash, part: Part) -> KeyLists:
    """Return what blocks of the part's queries attend to; the first begins at part.start.

    The window of distance d ends before the key that lies d before the block's end. From the first
    window on, a window that is not covered yet adds one block of ROWS keys, which begins where the
    window does, or at the end of the last block if that is later. Blocks begin within the part.
    """
    lists = empty_lists(indexes, part)
    device = indexes.slash.device
    block_count, block_offset, column_count, column_index = lists
    heads, blocks = block_count.shape
    ends = part.start + ROWS * torch.arange(1, blocks + 1, device=device)
    last = ends.clamp(max=part.hi).expand(heads, -1)  # verticals lie before it
    covered = torch.full((heads, blocks), part.lo, dtype=torch.int64, device=device)
    for distance in indexes.slash.long().unbind(-1):
        window = ends - distance[:, None]  # where it ends
        start = torch.maximum(window - ROWS, covered)
        new = (window > covered) & (start < part.hi)
        h, r = new.nonzero(as_tuple=True)
        block_offset[h, r, block_count[h, r].long()] = start[h, r].int()
        block_count += new
        covered = torch.where(new, start + ROWS, covered)
    places = torch.arange(block_offset.shape[-1], device=device)
    valid = places < block_count[..., None]
    for key in indexes.vertical.long().unbind(-1):
        offset = key[:, None, None] - block_offset
        covered_key = (valid & (offset >= 0) & (offset < ROWS)).any(-1)
        new = ~covered_key & (key >= part.lo)[:, None] & (key[:, None] < last)
        h, r = new.nonzero(as_tuple=True)
        column_index[h, r, column_count[h, r].long()] = key[h].int()
        column_count += new
    return lists


def empty_lists(indexes: VerticalSlash, part: Part) -> KeyLists:
    """Return lists of no keys with room for those of `indexes`."""
    heads, slashes = indexes.slash.shape
    blocks = -(-(part.end - part.start) // ROWS)
    widths = (min(slashes, -(-(part.hi - part.lo) // ROWS)), indexes.vertical.shape[1])
    counts = (indexes.slash.new_zeros(heads, blocks) for _ in widths)
    entries = (indexes.slash.new_zeros(heads, blocks, max(1, width)) for width in widths)
    (block_count, column_count), (block_offset, column_index) = counts, entries
    return KeyLists(block_count, block_offset, column_count, column_index)


def seen_keys(lists: KeyLists, block: int, keys: int) -> Tensor:
    """Return bool [H, keys]: what a block of queries attends to, without causal order."""
    device = lists.block_count.device
    heads = lists.block_count.shape[0]
    visible = torch.zeros(heads, keys + ROWS, dtype=torch.bool, device=device)
    for entries, count, width in (
        (lists.block_offset, lists.block_count, ROWS),
        (lists.column_index, lists.column_count, 1),
    ):
        key_index = entries[:, block].long()[..., None] + torch.arange(width, device=device)
        valid = torch.arange(key_index.shape[1], device=device) < count[:, block, None]
        h, place = valid.nonzero(as_tuple=True)
        visible[h[:, None], key_index[h, place]] = True
    return visible[:, :keys]


def attend_lists(
    q: Tensor, k: Tensor, v: Tensor, lists: KeyLists, part: Part, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to lists of keys in causal order.

    q [n, H, D]: of the part's queries. k [s, D], v [s, Dv]: of one KV head, s >= part.hi. Returns
    out [n, H, Dv] in the dtype of q and the natural lse float32 [n, H].
    """
    k, v = k[: part.hi].float(), v[: part.hi].float()
    outs, lses = [], []
    for block, start in enumerate(range(part.start, part.end, ROWS)):
        rows = q[start - part.start : start - part.start + ROWS].float().transpose(0, 1)
        i = torch.arange(start, start + rows.shape[1], device=q.device)[:, None]
        j = torch.arange(part.hi, device=q.device)
        visible = seen_keys(lists, block, part.hi)[:, None] & (j <= i)
        scores = (rows @ k.T * scale).masked_fill(~visible, -torch.inf)
        weights, lse = softmax_lse(scores)
        outs.append((weights @ v).transpose(0, 1).to(q.dtype))
        lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses)


TORCH = Kernels(to_lists, attend_lists)


def kernels_on(device: torch.device) -> Kernels:
    """Return Triton's kernels on a GPU, those of torch on any other device."""
    if device.type != "cuda":
        return TORCH
    kernels: Kernels = importlib.import_module("attn_core.ops.triton.vertical_slash").KERNELS
    return kernels


def parts_of(start: int, end: int, chunk_len: int) -> tuple[Part, ...]:
    """Return the keys of the intra, succ and inter queries start … end of one chunk."""
    chunk_start = start // chunk_len * chunk_len
    prev_start = max(chunk_start - chunk_len, 0)
    keys = ((chunk_start, end), (prev_start, chunk_start), (0, prev_start))
    return tuple(Part(start, end, lo, hi) for lo, hi in keys if lo < hi)


def attend_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Sequence[tuple[int, int]],
    *,
    scale: float,
    chunk_len: int,
    last_queries: int,
    kernels: Kernels,
) -> tuple[Tensor, Tensor]:
    """Attend with a whole prompt, sparse: its lines are chosen anew in each chunk.

    q [n, 5, Hq, D]: a token's intra, succ and inter queries, and the succ and inter queries that
    choose lines. k [n, Hkv, D], v [n, Hkv, Dv]. sizes: verticals and slashes of each query head.
    last_queries: of each chunk, they choose. Returns out [n, Hq, Dv] and lse float32 [n, Hq].
    """
    n, _, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out, lse = q.new_empty(n, heads, v.shape[2]), q.new_empty(n, heads, dtype=torch.float32)
    for start in range(0, n, chunk_len):
        end = min(start + chunk_len, n)
        last = max(start, end - last_queries)
        for kv_head in range(kv_heads):
            group_heads = slice(kv_head * group, (kv_head + 1) * group)
            keys, values = k[:, kv_head], v[:, kv_head]
            choosing = q[last:end, [0, 3, 4], group_heads]
            indexes = choose_vertical_slash(
                choosing, keys[:end], sizes[group_heads], scale, chunk_len
            )
            states = [
                kernels.attend_lists(
                    q[start:end, i, group_heads],
                    keys,
                    values,
                    kernels.to_lists(indexes, part),
                    part,
                    scale,
                )
                for i, part in enumerate(parts_of(start, end, chunk_len))
            ]
            merged = states[0]
            if len(states) > 1:
                merged = merge_states(*(torch.stack(x) for x in zip(*states, strict=True)))
            out[start:end, group_heads], lse[start:end, group_heads] = merged
    return out, lse
