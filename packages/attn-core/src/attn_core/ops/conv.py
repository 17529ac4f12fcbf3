"""The short causal convolution in front of linear attention, over the slots of a pool of states.

Each channel of x is a weighted sum of its last W inputs, then SiLU; computed in float32. The state
of a request is its last W - 1 inputs. Slots, fresh requests, checkpoints and drafts are those of
linear attention: a pass runs a function here and then the backend's of the same name.

x: [T, channels]. weight: [channels, W]. bias: [channels] or None. The result is [T, channels] in
x's dtype, 0 for padding. All layers of a pass share a ConvPlan, which alone waits for the device.
UsageError is raised for x and weights of other channels or another W than the pool's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

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


class ConvRequest(NamedTuple):
    """A request of an extend on the host: its tokens, the slots of its state and checkpoints."""

    first: int
    tokens: int
    write: int
    checkpoints: Sequence[int]


class ConvPlan:
    """What the convolutions of all layers need to know of a pass; it waits for the device.

    rows: int64 [R], the requests of `batch` that are no padding.
    reads, writes: int64 [R], their slots in `pool`.
    Raises UsageError for a batch without state_slots and a pool without a convolution.
    """

    def __init__(self, batch: SlotBatch, pool: StatePool) -> None:
        if batch.state_slots is None:
            raise UsageError("a batch without state_slots: the convolution has no state to read")
        self._batch, self._width = batch, _state(pool.states).shape[-1] + 1
        self.rows = (batch.state_slots >= 0).nonzero()[:, 0]
        slots_out = batch.state_slots if batch.state_slots_out is None else batch.state_slots_out
        self.reads, self.writes = (x[self.rows].long() for x in (batch.state_slots, slots_out))
        state_fresh = batch.state_fresh
        self._fresh = None if state_fresh is None else state_fresh[self.rows, None, None]

    def old_inputs(self, state: Tensor) -> Tensor:
        """Return the last inputs [R, channels, W - 1] in a layer's state, float32, 0 of fresh."""
        old = state[self.reads].float()
        return old if self._fresh is None else old.masked_fill_(self._fresh, 0)

    @cached_property
    def requests(self) -> list[ConvRequest]:
        """The requests of an extend."""
        batch, result = self._batch, []
        lens = batch.query_lens_host
        lens = tuple(batch.cu_seqlens_q.diff().tolist()) if lens is None else lens
        saved = [] if batch.checkpoint_slots is None else batch.checkpoint_slots.tolist()
        firsts = [0, *accumulate(lens)]
        chunks = [0, *accumulate(-(-n // CHUNK_SIZE) for n in lens)]
        for row, write in zip(self.rows.tolist(), self.writes.tolist(), strict=True):
            checkpoints = saved[chunks[row] : chunks[row + 1]]
            result.append(ConvRequest(firsts[row], lens[row], write, checkpoints))
        return result

    @cached_property
    def paths(self) -> Tensor:
        """The last W inputs of each draft, the oldest first, int64 [R, n, W].

        They are indices into W - 1 inputs of the state and then n drafts.
        """
        spec, rows, width = self._batch.spec, self.rows, self._width
        n, mask = spec.num_draft_tokens, spec.tree_mask
        if mask is None:
            mask = torch.ones(1, n, n, dtype=torch.bool, device=rows.device).tril()
            mask = mask.expand(len(rows), n, n)
        else:
            mask = mask[rows]
        depth = mask.sum(-1) - 1  # [R, n]
        distance = torch.arange(width - 1, -1, -1, device=rows.device)
        ancestor_depth = depth[..., None] - distance  # [R, n, W]
        ancestors = mask[:, :, None, :] & (depth[:, None, None, :] == ancestor_depth[..., None])
        draft = ancestors.to(torch.uint8).argmax(-1)
        return width - 1 + torch.where(ancestor_depth < 0, ancestor_depth, draft)


def conv_extend(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, plan: ConvPlan
) -> Tensor:
    """Convolve ragged new tokens; write each request's last inputs, and those of checkpoints."""
    state, out, width = _fitting(cache, x, weight), torch.zeros_like(x), weight.shape[1]
    for old, (first, tokens, write, checkpoints) in zip(
        plan.old_inputs(state), plan.requests, strict=True
    ):
        inputs = torch.cat([old.mT, x[first : first + tokens].float()])
        taps = [inputs[w : w + tokens] for w in range(width)]
        out[first : first + tokens] = _convolved(taps, weight, bias)
        state[write] = inputs[tokens:].mT.to(state.dtype)
        for chunk, slot in enumerate(checkpoints):
            end = min(CHUNK_SIZE * (chunk + 1), tokens)
            if slot >= 0:
                state[slot] = inputs[end : end + width - 1].mT.to(state.dtype)
    return out


def conv_decode(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, plan: ConvPlan
) -> Tensor:
    """Convolve one token per request; write its last inputs."""
    state, out, rows = _fitting(cache, x, weight), torch.zeros_like(x), plan.rows
    inputs = torch.cat([plan.old_inputs(state), x[rows, :, None].float()], -1)
    out[rows] = _convolved(inputs.unbind(-1), weight, bias).to(x.dtype)
    state.index_copy_(0, plan.writes, inputs[..., 1:].to(state.dtype))
    return out


def conv_verify(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, plan: ConvPlan
) -> Tensor:
    """Convolve a chain or tree of drafts per request; write their inputs, not the state."""
    state, drafts, rows = _fitting(cache, x, weight), _drafts(cache), plan.rows
    n, out = plan.paths.shape[1], torch.zeros_like(x)
    new = torch.unflatten(x, 0, (-1, n))[rows]  # [R, n, channels]
    inputs = torch.cat([plan.old_inputs(state).mT, new.float()], 1)
    taps = _take(inputs, plan.paths).unbind(2)  # W of [R, n, channels]
    torch.unflatten(out, 0, (-1, n))[rows] = _convolved(taps, weight, bias).to(x.dtype)
    drafts.narrow(1, 0, n).index_copy_(0, plan.writes, new.to(drafts.dtype))
    return out


def conv_commit(pool: StatePool, plan: ConvPlan, accepted: Tensor) -> None:
    """Take in the inputs of accepted drafts in all layers, as LinearAttentionBackend.commit."""
    states, drafts = _state(pool.states), _drafts(pool.states)
    rows, writes, n = plan.rows, plan.writes, plan.paths.shape[1]
    last = accepted.to(rows.device, torch.int64)[rows]
    requests = torch.arange(len(rows), device=rows.device)
    window = plan.paths[requests, last.clamp(min=0)][:, None, 1:]  # [R, 1, W - 1]
    for state, records in zip(states, drafts, strict=True):
        inputs = torch.cat([plan.old_inputs(state).mT, records[writes, :n].float()], 1)
        new = _take(inputs, window)[:, 0].mT.to(state.dtype)
        state.index_copy_(0, writes, new.where(last[:, None, None] >= 0, state[writes]))


def _convolved(taps: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return SiLU of the weighted sum of W inputs [..., channels], the oldest first, float32."""
    weights = weight.float().unbind(1)
    total = taps[0] * weights[0]
    for tap, by in zip(taps[1:], weights[1:], strict=True):
        total.addcmul_(tap, by)
    return silu(total if bias is None else total.add_(bias.float()), inplace=True)


def _take(inputs: Tensor, index: Tensor) -> Tensor:
    """Gather [R, n, W, channels] of inputs [R, rows, channels]."""
    requests = torch.arange(len(inputs), device=inputs.device)
    return inputs[requests[:, None, None], index]


def _fitting(cache: StateCache, x: Tensor, weight: Tensor) -> Tensor:
    """Return the state of a convolution. Raises UsageError for x or a weight of other sizes."""
    state = _state(cache)
    _, channels, past = state.shape
    if weight.shape != (channels, past + 1) or x.dim() != 2 or x.shape[1] != channels:
        raise UsageError(
            f"a convolution of x {list(x.shape)} by a weight {list(weight.shape)}, the pool's has "
            f"{channels} channels and width {past + 1} (expected [T, {channels}] and [{channels}, "
            f"{past + 1}]); create the StatePool with conv_channels and conv_width of the model"
        )
    return state


def _state(cache: StateCache) -> Tensor:
    if cache.conv is None:
        raise UsageError("a pool without a convolution; create the StatePool with conv_channels")
    return cache.conv


def _drafts(cache: StateCache) -> Tensor:
    if cache.conv_drafts is None:
        raise UsageError("a pool without drafts of a convolution; create it with num_drafts")
    return cache.conv_drafts
