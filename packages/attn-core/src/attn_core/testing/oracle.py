"""Per-query softmax attention over explicitly listed keys: slow, plain, independent of backends.

In float64 it is the truth, in a backend's own dtype the yardstick of its error budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attn_core.ops.quant import to_fp8
from attn_core.spec.dual_chunk import DualChunk


def visible_keys(
    query: int,
    num_queries: int,
    num_keys: int,
    *,
    causal: bool,
    window: int | None = None,
    parents: Sequence[int] | None = None,
) -> list[int]:
    """List the keys that query `query` of a request sees; the last queries' keys end the keys.

    parents: draft i hangs on draft parents[i] (-1: on the prefix); it sees the prefix, its
    ancestors and itself. A window W keeps the keys less than W positions before the query.
    """
    row, drafts = _seen(query, num_queries, num_keys, causal, window, parents)
    return [*row, *drafts]


def _seen(
    query: int,
    num_queries: int,
    num_keys: int,
    causal: bool,
    window: int | None,
    parents: Sequence[int] | None,
) -> tuple[range, list[int]]:
    """Return the keys that a query sees: those that lie in a row, and those behind them."""
    if not causal:
        return range(num_keys), []
    prefix = num_keys - num_queries
    if parents is None:
        end = max(0, prefix + query + 1)  # of more queries than keys, the first see none
        return range(0 if window is None else max(0, end - window), end), []

    def path(draft: int) -> list[int]:
        return [] if draft < 0 else [*path(parents[draft]), draft]

    drafts = path(query)
    if window is None:
        return range(prefix), [prefix + i for i in drafts]
    first = prefix + len(drafts) - window  # position
    visible_drafts = [prefix + i for i in drafts if prefix + len(path(i)) - 1 >= first]
    return range(min(max(0, first), prefix), prefix), visible_drafts


def tree_mask(parents: Sequence[int]) -> Tensor:
    """Return the tree mask bool [n, n] of a list of parents: each sees its ancestors and itself."""
    n = len(parents)
    rows = [visible_keys(i, n, n, causal=True, parents=parents) for i in range(n)]
    return torch.tensor([[j in row for j in range(n)] for row in rows])


_SHIFTS = torch.tensor([0.0, 0.2, 0.4])  # within an octave
_FEW_COLUMNS = 16  # of values: the largest error of fewer depends on the order of their sum
_ORDERS = 8  # in which that is added up


def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    logit_cap: float | None = None,
    sinks: Tensor | None = None,
    products: Tensor | None = None,
    rounds: torch.dtype | None = None,
    in_turn: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend with one query in the dtype of its operands.

    q [Hq, D], k [n, Hkv, D], v [n, Hkv, Dv], sinks [Hq]. Returns out [Hq, Dv] and the natural
    log-sum-exp [Hq], sinks included. No keys: zeros, and -inf or the sink. products:
    q · k [Hq, n], where they were summed in another way. rounds: a float8 dtype that the query and
    the probabilities, relative to the largest, are rounded to. in_turn: add up outputs of few
    columns key by key.
    """
    heads, kv_heads = q.shape[0], k.shape[1]
    if rounds is not None:
        q = to_fp8(q, rounds, 1.0).to(q)
    if products is None:
        products = _products(q, k)
    scores = products * scale  # [Hq, n]
    if logit_cap is not None:
        scores = torch.tanh(scores / logit_cap) * logit_cap
    logits = scores if sinks is None else torch.cat([scores, sinks[:, None].to(scores)], 1)
    if logits.shape[1] == 0:
        return q.new_zeros(q.shape[0], v.shape[-1]), q.new_full((q.shape[0],), -math.inf)
    p = logits.softmax(-1)[:, : scores.shape[1]]
    if rounds is not None:
        top = p.amax(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        p = to_fp8(p / top, rounds, 1.0).to(p) * top
    grouped = p.reshape(kv_heads, heads // kv_heads, -1)
    if in_turn and v.shape[-1] < _FEW_COLUMNS:
        out = _outputs_in_turn(grouped, v)
    else:
        out = grouped @ v.transpose(0, 1)
    out = out.view(heads, -1)
    return out, _log_sum_exp(logits)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Return q · k [Hq, n] of a query [Hq, D], whose head h reads KV head h // group."""
    heads, kv_heads = q.shape[0], k.shape[1]
    return (q.view(kv_heads, heads // kv_heads, -1) @ k.permute(1, 2, 0)).view(heads, -1)


def _outputs_in_turn(p: Tensor, v: Tensor) -> Tensor:
    """Return p · v [Hkv, group, Dv] added up key by key, as a kernel does in one accumulator.

    p [Hkv, group, n], v [n, Hkv, Dv]. A sum that nearly cancels errs by roundings of what is added
    up, and a single number by more or less as its keys are ordered: of some orders, that which errs
    most is taken.
    """
    rng, n = torch.Generator().manual_seed(0), v.shape[0]
    orders = [torch.arange(n), *(torch.randperm(n, generator=rng) for _ in range(_ORDERS - 1))]
    keys = torch.stack(orders)
    weights, values = p[..., keys].permute(3, 2, 0, 1), v[keys].transpose(0, 1)
    out = p.new_zeros(_ORDERS, *p.shape[:2], v.shape[-1])
    for weight, value in zip(weights, values, strict=True):
        out.addcmul_(weight[..., None], value[:, :, None])
    exact = p.double() @ v.double().transpose(0, 1)
    index = (out - exact).abs().argmax(0, keepdim=True)
    return out.gather(0, index)[0]


def _log_sum_exp(logits: Tensor) -> Tensor:
    """Return the natural log-sum-exp of logits [Hq, n], as wide as float32.

    Kernels may add up the probabilities that they multiply with, which are rounded. How that errs
    depends on what was subtracted from the logits, and repeats with each octave: of three sums,
    within one, that which errs most is taken.
    """
    if logits.dtype == torch.float64:
        return logits.logsumexp(-1)
    logits32 = logits.float()
    exact = logits32.logsumexp(-1)
    shifts = _SHIFTS.to(logits32.device)[:, None]
    p = (logits32 - exact[:, None].nan_to_num(neginf=0.0) - shifts[..., None]).exp()
    sums = exact + p.to(logits.dtype).float().sum(-1).log() + shifts
    index = (sums - exact).abs().argmax(0, keepdim=True)
    return torch.where(exact.isfinite(), sums.gather(0, index)[0], exact)


def products_in_turn(q: Tensor, k: Tensor) -> Tensor:
    """Return q · k [n, Hq, s], added up one after the other, as a kernel does in one accumulator.

    q [n, Hq, D], k [s, Hkv, D]; a matrix product on a CPU sums in several, and errs less.
    """
    (n, heads, dim), kv_heads = q.shape, k.shape[1]
    across, grouped = k.permute(1, 2, 0), q.view(n, kv_heads, heads // kv_heads, dim)
    total = q.new_zeros(*grouped.shape[:3], k.shape[0])
    for d in range(dim):
        total = torch.addcmul(total, grouped[..., d, None], across[:, d, None])
    return total.view(n, heads, k.shape[0])


def attend_request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dtype: torch.dtype,
    causal: bool,
    scale: float,
    window: int | None = None,
    parents: Sequence[int] | None = None,
    logit_cap: float | None = None,
    sinks: Tensor | None = None,
    dual_chunk: DualChunk | None = None,
    queries: Sequence[int] | None = None,
    selected: Sequence[Tensor] | None = None,
    order: int = 0,
    rounds: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with the queries of one request, computed in `dtype`.

    q [n, Hq, D], k [s, Hkv, D], v [s, Hkv, Dv]; `queries` picks some of the n; `selected` are the
    keys of each query, in place of those that it sees; `order` 1 adds up scores in turn, 2 and on
    in other orders, and both so the outputs of few columns. With dual_chunk, q is [n, 3, Hq, D]; a
    key that lies 0, 1 or more chunks before a query meets its first, second or third. Returns out
    [n or picked, Hq, Dv] and LSE [n or picked, Hq]. The rest is as in visible_keys and attend_one.
    """
    n, s = q.shape[0], k.shape[0]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    rng = torch.Generator().manual_seed(order)
    if order > 1:
        dims = torch.randperm(q.shape[-1], generator=rng)
        q, k = q[..., dims], k[..., dims]
    rotations = q.unsqueeze(1) if dual_chunk is None else q  # [n, 1 or 3, Hq, D]
    picks = range(n) if queries is None else queries
    in_turn = None
    if order == 1:
        in_turn = [products_in_turn(x[[*picks]], k) for x in rotations.unbind(1)]
    outs, lses = [q.new_zeros(0, q.shape[-2], v.shape[2])], [q.new_zeros(0, q.shape[-2])]
    for number, i in enumerate(picks):
        row, drafts = range(0), []
        if selected is not None:
            drafts = selected[i].tolist()
        else:
            row, drafts = _seen(i, n, s, causal, window, parents)
        picked: Tensor | slice
        if order > 1:
            visible = torch.tensor([*row, *drafts], dtype=torch.int64)
            picked = visible[torch.randperm(len(visible), generator=rng)]
        elif not drafts:
            picked = slice(row.start, row.stop)
        else:
            ends = torch.tensor(drafts, dtype=torch.int64, device=k.device)
            picked = torch.cat([torch.arange(row.start, row.stop, device=k.device), ends])
        products = None if in_turn is None else [x[number][:, picked] for x in in_turn]
        if dual_chunk is not None:
            length = dual_chunk.chunk_len
            chunk_distance = (s - n + i) // length - torch.arange(s)[picked] // length
            intra, succ, inter = products or [_products(x, k[picked]) for x in rotations[i]]
            products = [
                torch.where(
                    chunk_distance == 0, intra, torch.where(chunk_distance == 1, succ, inter)
                )
            ]
        out, lse = attend_one(
            rotations[i, 0],
            k[picked],
            v[picked],
            scale=scale,
            logit_cap=logit_cap,
            sinks=sinks,
            products=None if products is None else products[0],
            rounds=rounds,
            in_turn=order > 0,
        )
        outs.append(out[None])
        lses.append(lse[None])
    return torch.cat(outs), torch.cat(lses)


def yardstick(
    solve: Callable[[torch.dtype, int], tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    truth: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the plain run in `dtype` that errors are measured by; solve(dtype, order) makes one.

    In float32, and where values have few columns, the error of one run is luck: three orders of
    summation are run, and of each number the one farthest from the truth is taken.
    """
    lucky = dtype == torch.float32 or truth[0].shape[-1] < _FEW_COLUMNS
    runs = [solve(dtype, order) for order in range(3 if lucky else 1)]
    out, lse = runs[0]
    for more_out, more_lse in runs[1:]:
        out, lse = _farther(out, more_out, truth[0]), _farther(lse, more_lse, truth[1])
    return out, lse


def _farther(a: Tensor, b: Tensor, truth: Tensor) -> Tensor:
    return torch.where((b - truth).abs() > (a - truth).abs(), b, a)
