"""The short causal convolution in front of linear attention, over the slots of a pool of states.

Each channel of x is a weighted sum of its last W inputs, then SiLU; computed in float32. The state
of a request is its last W - 1 inputs. Slots, fresh requests, checkpoints and drafts are those of
linear attention: a pass runs a function here and then the backend's of the same name.

x: [T, channels]. weight: [channels, W]. bias: [channels] or None. The result is [T, channels] in
x's dtype, 0 for padding. All wait for the device, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from attn_core.cache.state_pool import CHUNK_SIZE, StateCache, StatePool
from attn_core.errors import UsageError


class SlotBatch(Protocol):
    """The attributes of a batch that are read here: ForwardBatch or an engine's own class."""

    @property
    def cu_seqlens_q(self) -> Tensor: ...
    @property
    def query_lens_host(self) -> tuple[int, ...] | None: ...
    @property
    def state_slots(self) -> Tensor | None: ...
    @property
    def state_slots_out(self) -> Tensor | None: ...
    @property
    def state_fresh(self) -> Tensor | None: ...
    @property
    def checkpoint_slots(self) -> Tensor | None: ...
    @property
    def spec(self) -> Any: ...


def conv_extend(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, batch: SlotBatch
) -> Tensor:
    """Convolve ragged new tokens; write each request's last inputs, and those of checkpoints."""
    state, out, width = _state(cache), torch.zeros_like(x), weight.shape[1]
    rows, writes = _rows(batch)
    old = _old(state, rows, batch)  # [R, channels, W - 1]
    lens = batch.query_lens_host
    lens = tuple(batch.cu_seqlens_q.diff().tolist()) if lens is None else lens
    saved = [] if batch.checkpoint_slots is None else batch.checkpoint_slots.tolist()
    firsts = [sum(lens[:row]) for row in rows.tolist()]
    chunks = [-(-n // CHUNK_SIZE) for n in lens]
    for i, row in enumerate(rows.tolist()):
        first, tokens = firsts[i], lens[row]
        inputs = torch.cat([old[i].mT, x[first : first + tokens].float()])
        taps = [inputs[w : w + tokens] for w in range(width)]
        out[first : first + tokens] = _convolved(taps, weight, bias)
        state[writes[i]] = inputs[tokens:].mT.to(state.dtype)
        chunk = sum(chunks[:row])
        for place, slot in enumerate(saved[chunk : chunk + chunks[row]]):
            end = min(CHUNK_SIZE * (place + 1), tokens)
            if slot >= 0:
                state[slot] = inputs[end : end + width - 1].mT.to(state.dtype)
    return out


def conv_decode(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, batch: SlotBatch
) -> Tensor:
    """Convolve one token per request; write its last inputs."""
    state, out = _state(cache), torch.zeros_like(x)
    rows, writes = _rows(batch)
    inputs = torch.cat([_old(state, rows, batch), x[rows, :, None].float()], -1)
    out[rows] = _convolved(inputs.unbind(-1), weight, bias).to(x.dtype)
    state.index_copy_(0, writes, inputs[..., 1:].to(state.dtype))
    return out


def conv_verify(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, batch: SlotBatch
) -> Tensor:
    """Convolve a chain or tree of drafts per request; write their inputs, not the state."""
    state, drafts, width = _state(cache), _drafts(cache), weight.shape[1]
    n, out = batch.spec.num_draft_tokens, torch.zeros_like(x)
    rows, writes = _rows(batch)
    new = torch.unflatten(x, 0, (-1, n))[rows]  # [R, n, channels]
    inputs = torch.cat([_old(state, rows, batch).mT, new.float()], 1)
    taps = _take(inputs, _paths(batch, rows, n, width)).unbind(2)  # W of [R, n, channels]
    torch.unflatten(out, 0, (-1, n))[rows] = _convolved(taps, weight, bias).to(x.dtype)
    drafts.narrow(1, 0, n).index_copy_(0, writes, new.to(drafts.dtype))
    return out


def conv_commit(pool: StatePool, batch: SlotBatch, accepted: Tensor) -> None:
    """Take in the inputs of accepted drafts in all layers, as LinearAttentionBackend.commit."""
    states, drafts = _state(pool.states), _drafts(pool.states)
    n, width = batch.spec.num_draft_tokens, states.shape[-1] + 1
    rows, writes = _rows(batch)
    kept = accepted.to(rows.device)[rows] >= 0
    rows, writes = rows[kept], writes[kept]
    last = accepted.to(rows.device, torch.int64)[rows]
    paths = _paths(batch, rows, n, width)
    window = paths[torch.arange(len(rows), device=rows.device), last][:, None, 1:]  # [R, 1, W - 1]
    for state, records in zip(states, drafts, strict=True):
        inputs = torch.cat([_old(state, rows, batch).mT, records[writes, :n].float()], 1)
        state.index_copy_(0, writes, _take(inputs, window)[:, 0].mT.to(state.dtype))


def _convolved(taps: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return SiLU of the weighted sum of W inputs [..., channels], the oldest first, float32."""
    weights = weight.float().unbind(1)
    total = taps[0] * weights[0]
    for tap, by in zip(taps[1:], weights[1:], strict=True):
        total.addcmul_(tap, by)
    return silu(total if bias is None else total.add_(bias.float()), inplace=True)


def _rows(batch: SlotBatch) -> tuple[Tensor, Tensor]:
    """Return the requests that are no padding, and the slots that they write; int64 [R]."""
    reads, writes = batch.state_slots, batch.state_slots_out
    if reads is None:
        raise UsageError("a batch without state_slots: the convolution has no state to read")
    rows = (reads >= 0).nonzero()[:, 0]
    return rows, (reads if writes is None else writes)[rows].long()


def _old(state: Tensor, rows: Tensor, batch: SlotBatch) -> Tensor:
    """Return the last inputs [R, channels, W - 1] of requests, float32, 0 of fresh ones."""
    assert batch.state_slots is not None  # _rows refuses that
    old = state[batch.state_slots[rows].long()].float()
    if batch.state_fresh is not None:
        old.masked_fill_(batch.state_fresh[rows, None, None], 0)
    return old


def _paths(batch: SlotBatch, rows: Tensor, n: int, width: int) -> Tensor:
    """Return the last W inputs of each draft, the oldest first, int64 [R, n, W].

    They are indices into W - 1 inputs of the state and then n drafts.
    """
    mask = batch.spec.tree_mask
    if mask is None:
        mask = torch.ones(1, n, n, dtype=torch.bool, device=rows.device).tril()
        mask = mask.expand(len(rows), n, n)
    else:
        mask = mask[rows]
    depth = mask.sum(-1) - 1  # [R, n]
    back = torch.arange(width - 1, -1, -1, device=rows.device)
    wanted = depth[..., None] - back  # [R, n, W]
    ancestors = mask[:, :, None, :] & (depth[:, None, None, :] == wanted[..., None])
    draft = ancestors.to(torch.uint8).argmax(-1)
    return width - 1 + torch.where(wanted < 0, wanted, draft)


def _take(inputs: Tensor, index: Tensor) -> Tensor:
    """Gather [R, n, W, channels] of inputs [R, rows, channels]."""
    requests = torch.arange(len(inputs), device=inputs.device)
    return inputs[requests[:, None, None], index]


def _state(cache: StateCache) -> Tensor:
    if cache.conv is None:
        raise UsageError("a pool without a convolution; create the StatePool with conv_channels")
    return cache.conv


def _drafts(cache: StateCache) -> Tensor:
    if cache.conv_drafts is None:
        raise UsageError("a pool without drafts of a convolution; create it with num_drafts")
    return cache.conv_drafts
