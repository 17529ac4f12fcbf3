"""Softmax attention in float32, request by request: the numbers behind the emulated kernels."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def attend(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    query_lens: Sequence[int],
    scale: float,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    sinks_in_lse: bool = True,
    masks: Sequence[Tensor] | None = None,
    weights_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with the ragged queries of each request to its own keys.

    q [T, Hq, D]; per request keys [n, Hkv, D] and values [m, Hkv, Dv], m >= n: the rows past n are
    read with weight 0, as a kernel does that loads whole tiles, so a NaN there leaks. The last
    query is aligned with the last key: at position p a query sees the keys p - left … p + right,
    None is no limit, causal is right = 0. masks: bool [query_len, n] per request, True = seen.
    weights_dtype: what exp(score - the row's largest) is rounded to, as FP8 kernels do.
    Returns out [T, Hq, Dv] and the natural log-sum-exp [T, Hq], both float32. A query without keys
    gives zeros and -inf, or the sink. Rows past the last request's queries stay NaN: unwritten.
    """
    heads, v_dim = q.shape[1], values[0].shape[-1] if values else q.shape[-1]
    out = torch.full((q.shape[0], heads, v_dim), torch.nan)
    lse = torch.full((q.shape[0], heads), torch.nan)
    right = 0 if causal else right
    at = 0
    for b, count in enumerate(query_lens):
        rows = slice(at, at + count)
        at += count
        if not count:
            continue
        n = keys[b].shape[0]
        group = heads // keys[b].shape[1]
        k = keys[b].float().repeat_interleave(group, 1)
        v = values[b].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        own = torch.arange(count)[:, None] + n - count
        key = torch.arange(n)
        seen = torch.ones(count, n, dtype=torch.bool) if masks is None else masks[b]
        if left is not None:
            seen = seen & (key >= own - left)
        if right is not None:
            seen = seen & (key <= own + right)
        scores = scores.masked_fill(~seen, -torch.inf)
        total = scores.logsumexp(-1) if n else torch.full((heads, count), -torch.inf)
        with_sink = total if sinks is None else torch.logaddexp(total, sinks.float()[:, None])
        # a row of nothing but -inf would be NaN
        weights = (scores - with_sink.masked_fill(with_sink == -torch.inf, 0.0)[..., None]).exp()
        if weights_dtype is not None and n:
            peak = scores.amax(-1, keepdim=True).masked_fill(~seen.any(-1, keepdim=True), 0.0)
            rounded = ((scores - peak).exp() * 256).to(weights_dtype).float() / 256
            weights = rounded * (peak - with_sink[..., None]).exp().nan_to_num()  # no key, no sink
        weights = torch.nn.functional.pad(weights, (0, v.shape[0] - n))
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
        lse[rows] = (with_sink if sinks_in_lse else total).T
    return out, lse


def attend_overflowing(*args: Any, sinks: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """Do as `attend`, and as kernels that add exp(sink - the row's largest score) in float32.

    Where it is infinite, so is the LSE.
    """
    out, lse = attend(*args, sinks=sinks, **options)
    if sinks is None:
        return out, lse
    bare = attend(*args, sinks=None, **options)[1]  # about the largest score
    return out, lse.masked_fill(bare.isfinite() & (sinks.float() - bare > 88.8), torch.inf)


def gather(pages: Tensor, table: Tensor, lengths: Sequence[int], *, whole: bool = False) -> list:
    """Read each request's tokens out of pages [P, page_size, H, D], table [B, max_pages].

    Returns [n, H, D] per request, n its length or, with `whole`, all tokens of the pages that it
    touches.
    """
    size = pages.shape[1]
    found = []
    for row, n in zip(table, lengths, strict=True):
        used = -(-n // size)
        tokens = _raw(pages)[row[:used].long()].view(pages.dtype).flatten(0, 1)
        found.append(tokens if whole else tokens[:n])
    return found


def split(x: Tensor, indptr: Tensor, *, tile: int = 1) -> list:
    """Cut x [T, …] into its requests by cumulative lengths [B + 1].

    tile: rows that a kernel loads at once, by TMA, without regard to where a request ends: the last
    tile of a request has the first rows of the next ones too. Past the last row of x it is zeros.
    """
    return [x[a : b + (a - b) % tile] for a, b in pairwise(indptr.tolist())]


def _raw(t: Tensor) -> Tensor:
    """View float8 as bytes, which every version of torch can index."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t
