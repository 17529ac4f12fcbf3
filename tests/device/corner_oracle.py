"""What the definition says of a random pass of corners.py, in float64, and how far off one is."""

from __future__ import annotations

import math
from typing import Any

import torch
from attn_core import read_index, read_kv
from torch import Tensor

EPS = {"bf16": 4e-2, "fp16": 8e-3, "fp32": 1e-4}


def wrong(world: Any, p: Any, outputs: tuple[Tensor, ...]) -> str:
    """Say what of a pass is not as the definition says, "" for nothing."""
    at, result = 0, ""
    for i, (n, s) in enumerate(zip(p.query_lens, p.seq_lens, strict=True)):
        mine, at = slice(at, at + n), at + n
        if n:
            part = [o[mine] for o in outputs]
            why = _request(world, p, i, n, s, part, [x[mine] for x in p.inputs])
            result += f" request {i} ({n} of {s}): {why}" if why else ""
    return result


def _seen(world: Any, p: Any, i: int, n: int, s: int) -> Tensor:
    """Return which keys [s] each of n queries sees, bool [n, s]."""
    key = torch.arange(s, device=world.device)
    place = key[s - n :]
    seen = key <= place[:, None]
    if p.batch.spec is not None and p.batch.spec.tree_mask is not None:
        tree = p.batch.spec.tree_mask[i]
        seen[:, : s - n], seen[:, s - n :] = True, tree
        place = s - n + tree.sum(1) - 1
        key = torch.cat([key[: s - n], place])
    window = world.x.sliding_window
    return seen if window is None else seen & (key > place[:, None] - window)


def _request(
    world: Any, p: Any, i: int, n: int, s: int, got: list[Tensor], new: list[Tensor]
) -> str:
    x, seen = world.x, _seen(world, p, i, n, s)
    keys, values = read_kv(world.cache, p.slots[i], torch.float32)
    values = keys[..., : x.v_head_dim] if values is None else values
    if world.model.kind == "dsa" and len(chosen := got.pop()):
        seen, why = _selected(world, p.slots[i], seen, chosen, new[2], new[4])
        if why:
            return why
    q = new[0].double().unflatten(1, (x.num_kv_heads, -1))
    scores = torch.einsum("nhgd,khd->nhgk", q, keys.double()) * x.scale
    scores = scores.masked_fill(~seen[:, None, None], -math.inf)
    if x.sinks is not None:
        sink = x.sinks.double().view(1, x.num_kv_heads, -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., :s]
    want = torch.einsum("nhgk,khd->nhgd", weights, values.double()).flatten(1, 2)
    total = scores.logsumexp(-1).flatten(1)
    peak = float(q.norm(dim=-1).max() * keys.norm(dim=-1).max()) * x.scale
    loose = (0.06 if world.rounded else 0.003) * peak
    allowed = EPS[world.model.dtype] * max(1.0, loose) * max(1.0, float(values.abs().max()))
    error = float((got[0].double() - want).abs().max())
    if not error <= allowed * (3 if world.rounded else 1):
        return f"error {error:.3g}, allowed {allowed:.3g}"
    apart = float((got[1].double() - total).abs().max()) if world.lse else 0.0
    return "" if apart <= 0.02 + loose else f"LSE apart by {apart:.3g}, allowed {0.02 + loose:.3g}"


def _selected(
    world: Any, slots: Tensor, seen: Tensor, chosen: Tensor, q: Tensor, weights: Tensor
) -> tuple[Tensor, str]:
    """Return the keys that each query has chosen, and where it should have chosen others."""
    keys = read_index(world.cache, slots, torch.float32).double()
    scores = torch.einsum("nhd,kd->nhk", q.double(), keys).relu()
    scores = (scores * weights.double()[..., None]).sum(1).masked_fill(~seen, -math.inf)
    place = torch.full((world.cache.num_pages * world.model.page,), -1, device=world.device)
    place[slots] = torch.arange(len(slots), device=world.device)
    result = torch.zeros_like(seen)
    for i, row in enumerate(chosen):
        mine = place[row[row >= 0].long()]
        most = min(int(seen[i].sum()), world.x.index_topk)
        result[i, mine.clamp(min=0)] = True
        if bool((mine < 0).any()) or len(mine) != most or int((result[i] & seen[i]).sum()) != most:
            return result, f"query {i} selects {len(mine)} keys that are not {most} of its own"
        best = scores[i].topk(most)[0]
        if float(best[-1] - scores[i][result[i]].min()) > 0.02 * float(best[0].abs()) + 1e-3:
            return result, f"query {i} leaves better keys out"
    return result, ""
