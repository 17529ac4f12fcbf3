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

ROWS = 64  # queries of a block, and keys of a window
FIRST_KEYS = 30  # always verticals
NEAREST = 100  # always slashes
NO_LINE = 2**31 - 1  # fills the lines of a head that has fewer


class Lines(NamedTuple):
    """The lines of H heads; a head that has fewer is filled up with NO_LINE.

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
    """Queries begin … end of a prompt and the keys lo … hi that one of their rotations meets."""

    begin: int
    end: int
    lo: int
    hi: int


class Kernels(NamedTuple):
    """What lists keys, and what attends to them: to_lists and attend_lists, or others like them."""

    to_lists: Callable[[Lines, Part], KeyLists]
    attend_lists: Callable[[Tensor, Tensor, Tensor, KeyLists, Part, float], tuple[Tensor, Tensor]]


def choose_lines(
    q: Tensor, k: Tensor, sizes: Sequence[tuple[int, int]], scale: float, chunk_len: int
) -> Lines:
    """Choose the lines of the query heads of one KV head.

    q [n, 3, H, D]: the last n queries, for the keys of their chunk, of the one before and of all
    earlier ones. k [s, D]: the keys up to the last query. sizes: verticals and slashes of each
    head. The softmax of these queries over their keys is float32; a line's score is its sum over
    the queries. The first FIRST_KEYS keys and the NEAREST distances come before all scores, the
    lowest first: a head may have fewer lines than these.
    """
    n, _, heads, _ = q.shape
    s = k.shape[0]
    own = (s - 1) // chunk_len * chunk_len
    before = max(own - chunk_len, 0)
    scores = torch.empty(heads, n, s, dtype=torch.float32, device=q.device)
    for rotation, (lo, hi) in enumerate(((own, s), (before, own), (0, before))):
        if lo < hi:
            torch.matmul(
                q[:, rotation].transpose(0, 1).float() * scale,
                k[lo:hi].float().T,
                out=scores[..., lo:hi],
            )
    later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1)
    scores[..., s - n :].masked_fill_(later, -torch.inf)
    weights = scores.softmax(-1)
    vertical = weights.sum(1)
    _put_first(vertical, FIRST_KEYS, n)
    # row r of n sees the key of distance d at s - n + r - d: rows shifted to end at one column
    padded = torch.nn.functional.pad(weights, (n - 1, 0))
    width = s + n - 1
    slash = padded.as_strided((heads, n, s), (n * width, width + 1, 1)).sum(1).flip(-1)
    _put_first(slash, NEAREST, n)
    verticals, slashes = zip(*sizes, strict=True)
    return Lines(
        _best(vertical, verticals).sort(-1).values,
        _best(slash, slashes).sort(-1, descending=True).values,
    )


def _put_first(scores: Tensor, count: int, most: int) -> None:
    """Put the first `count` lines of scores [H, s] before those of scores up to `most`, in order.

    The order of equal scores, such as infinity, is topk's, and differs between devices.
    """
    first = scores[:, :count]
    first[:] = most + torch.arange(first.shape[-1], 0, -1, device=scores.device)


def _best(scores: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the lines with the best scores [H, s], as many as `sizes` says, int32 [H, N]."""
    most = min(max(sizes), scores.shape[-1])
    lines = scores.topk(most, -1).indices.int()
    counts = torch.tensor(sizes, device=lines.device)
    return lines.masked_fill(torch.arange(most, device=lines.device) >= counts[:, None], NO_LINE)


def to_lists(lines: Lines, part: Part) -> KeyLists:
    """Return what blocks of the part's queries attend to; the first begins at part.begin.

    The window of distance d ends before the key that lies d before the block's end. From the first
    window on, a window that is not covered yet adds one block of ROWS keys, which begins where the
    window does, or at the end of the last block if that is later. Blocks begin within the part.
    """
    lists = empty_lists(lines, part)
    device = lines.slash.device
    block_count, block_offset, column_count, column_index = lists
    heads, blocks = block_count.shape
    ends = part.begin + ROWS * torch.arange(1, blocks + 1, device=device)
    last = ends.clamp(max=part.hi).expand(heads, -1)  # verticals lie before it
    covered = torch.full((heads, blocks), part.lo, dtype=torch.int64, device=device)
    for distance in lines.slash.long().unbind(-1):
        window = ends - distance[:, None]  # where it ends
        start = torch.maximum(window - ROWS, covered)
        new = (window > covered) & (start < part.hi)
        h, r = new.nonzero(as_tuple=True)
        block_offset[h, r, block_count[h, r].long()] = start[h, r].int()
        block_count += new
        covered = torch.where(new, start + ROWS, covered)
    places = torch.arange(block_offset.shape[-1], device=device)
    used = places < block_count[..., None]
    for key in lines.vertical.long().unbind(-1):
        ahead = key[:, None, None] - block_offset
        inside = (used & (ahead >= 0) & (ahead < ROWS)).any(-1)
        new = ~inside & (key >= part.lo)[:, None] & (key[:, None] < last)
        h, r = new.nonzero(as_tuple=True)
        column_index[h, r, column_count[h, r].long()] = key[h].int()
        column_count += new
    return lists


def empty_lists(lines: Lines, part: Part) -> KeyLists:
    """Return lists of no keys with room for those of `lines`."""
    heads, slashes = lines.slash.shape
    blocks = -(-(part.end - part.begin) // ROWS)
    widths = (min(slashes, -(-(part.hi - part.lo) // ROWS)), lines.vertical.shape[1])
    counts = (lines.slash.new_zeros(heads, blocks) for _ in widths)
    entries = (lines.slash.new_zeros(heads, blocks, max(1, width)) for width in widths)
    (block_count, column_count), (block_offset, column_index) = counts, entries
    return KeyLists(block_count, block_offset, column_count, column_index)


def seen_keys(lists: KeyLists, block: int, keys: int) -> Tensor:
    """Return bool [H, keys]: what a block of queries attends to, without causal order."""
    device = lists.block_count.device
    heads = lists.block_count.shape[0]
    seen = torch.zeros(heads, keys + ROWS, dtype=torch.bool, device=device)
    for entries, count, width in (
        (lists.block_offset, lists.block_count, ROWS),
        (lists.column_index, lists.column_count, 1),
    ):
        at = entries[:, block].long()[..., None] + torch.arange(width, device=device)
        used = torch.arange(at.shape[1], device=device) < count[:, block, None]
        h, place = used.nonzero(as_tuple=True)
        seen[h[:, None], at[h, place]] = True
    return seen[:, :keys]


def attend_lists(
    q: Tensor, k: Tensor, v: Tensor, lists: KeyLists, part: Part, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to lists of keys in causal order.

    q [n, H, D]: of the part's queries. k [s, D], v [s, Dv]: of one KV head, s >= part.hi. Returns
    out [n, H, Dv] in the dtype of q and the natural lse float32 [n, H].
    """
    k, v = k[: part.hi].float(), v[: part.hi].float()
    outs, lses = [], []
    for block, start in enumerate(range(part.begin, part.end, ROWS)):
        rows = q[start - part.begin : start - part.begin + ROWS].float().transpose(0, 1)
        i = torch.arange(start, start + rows.shape[1], device=q.device)[:, None]
        j = torch.arange(part.hi, device=q.device)
        seen = seen_keys(lists, block, part.hi)[:, None] & (j <= i)
        scores = (rows @ k.T * scale).masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
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


def parts_of(begin: int, end: int, chunk_len: int) -> tuple[Part, ...]:
    """Return what queries begin … end of one chunk meet with their intra, succ and inter query."""
    own = begin // chunk_len * chunk_len
    before = max(own - chunk_len, 0)
    keys = ((own, end), (before, own), (0, before))
    return tuple(Part(begin, end, lo, hi) for lo, hi in keys if lo < hi)


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
    for begin in range(0, n, chunk_len):
        end = min(begin + chunk_len, n)
        last = max(begin, end - last_queries)
        for kv_head in range(kv_heads):
            own = slice(kv_head * group, (kv_head + 1) * group)
            keys, values = k[:, kv_head], v[:, kv_head]
            choosing = q[last:end, [0, 3, 4], own]
            lines = choose_lines(choosing, keys[:end], sizes[own], scale, chunk_len)
            states = [
                kernels.attend_lists(
                    q[begin:end, i, own], keys, values, kernels.to_lists(lines, part), part, scale
                )
                for i, part in enumerate(parts_of(begin, end, chunk_len))
            ]
            merged = states[0]
            if len(states) > 1:
                merged = merge_states(*(torch.stack(x) for x in zip(*states, strict=True)))
            out[begin:end, own], lse[begin:end, own] = merged
    return out, lse
