"""Per-query softmax attention over explicitly listed keys: slow, plain, independent of backends.

In float64 it is the truth. In a backend's own dtype it is the yardstick: a backend may be twice as
far from the truth as this is, plus one rounding of a partial result and one of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


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
    if not causal:
        return list(range(num_keys))
    prefix = num_keys - num_queries
    if parents is None:
        own = prefix + query
        return [j for j in range(own + 1) if window is None or j > own - window]

    def path(draft: int) -> list[int]:
        return [] if draft < 0 else [*path(parents[draft]), draft]

    position = {j: j for j in range(prefix)}
    position |= {prefix + i: prefix + len(path(i)) - 1 for i in range(num_queries)}
    seen = [*range(prefix), *(prefix + i for i in path(query))]
    own = position[prefix + query]
    return [j for j in seen if window is None or position[j] > own - window]


def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    logit_cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with one query in the dtype of its operands.

    q [Hq, D], k [n, Hkv, D], v [n, Hkv, Dv], sinks [Hq]. Returns out [Hq, Dv] and the natural
    log-sum-exp [Hq], sinks included. No keys: zeros, and -inf or the sink.
    """
    group = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.stack([k[:, h] @ q[h] for h in range(q.shape[0])]) * scale  # [Hq, n]
    if logit_cap is not None:
        scores = torch.tanh(scores / logit_cap) * logit_cap
    logits = scores if sinks is None else torch.cat([scores, sinks[:, None].to(scores)], 1)
    if logits.shape[1] == 0:
        return q.new_zeros(q.shape[0], v.shape[-1]), q.new_full((q.shape[0],), -math.inf)
    p = logits.softmax(-1)[:, : scores.shape[1]]
    out = torch.stack([p[h] @ v[:, h] for h in range(q.shape[0])])
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return out, wide.logsumexp(-1)


def assert_within_budget(
    name: str, got: Tensor, truth: Tensor, yardstick: Tensor, rounding: torch.dtype
) -> None:
    """Fail unless |got - truth| <= 2 · |yardstick - truth| + two roundings, by largest entries.

    Infinities must agree entry by entry; NaN never passes.
    """
    got, yardstick = got.double(), yardstick.double()
    finite = truth.isfinite()
    assert torch.equal(got[~finite], truth[~finite]), f"{name}: infinities differ"
    assert got[finite].isfinite().all(), (
        f"{name}: {int((~got[finite].isfinite()).sum())} not finite"
    )
    if not finite.any():
        return
    error = (got - truth)[finite].abs().max().item()
    allowed = 2 * (yardstick - truth)[finite].abs().max().item()
    allowed += 2 * torch.finfo(rounding).eps * truth[finite].abs().max().item()
    assert error <= allowed, f"{name}: error {error:.3e} > {allowed:.3e}"
