"""Linear attention (GDN, KDA) in plain torch: every device, exact in float32, quick on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from attn_core.backends.plain_precision import plain_precision
from attn_core.backends.torch_native.delta_rule import (
    NOTHING_LEFT,
    drafts,
    dtype_of_sums,
    per_value_head,
    sequence,
)
from attn_core.backends.torch_native.flaws import find_flaws, with_flaws, without_flaws
from attn_core.cache.state_pool import CHUNK_SIZE, StateCache, StatePool
from attn_core.runtime.backend import LinearAttentionBackend, Metadata
from attn_core.runtime.batch import ForwardBatch
from attn_core.runtime.linear import LinearLayer, gated, normalised

HEADS_AT_ONCE = 64  # of all chunks that are prepared together: 5 MB of dims of 128 stay in cache


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a pass that is no padding: its row, slots, tokens and checkpoints."""

    row: int
    read: int
    write: int
    fresh: bool
    first: int
    tokens: int
    checkpoints: Sequence[int] = ()

    def old(self, state: Tensor) -> Tensor | None:
        """Return the stored state [Hv, V, K] that it starts from, None if that is zeros."""
        return None if self.fresh else state[self.read]


class TorchNativeLinear(LinearAttentionBackend):
    """Linear attention, a request after the other where states are read and written."""

    def init_forward_metadata(self, batch: ForwardBatch) -> list[Request]:
        """Read the slots and lengths of a pass on the host, once."""
        assert batch.state_slots is not None
        reads: list[int] = batch.state_slots.tolist()
        writes = reads if batch.state_slots_out is None else batch.state_slots_out.tolist()
        fresh = [False] * len(reads) if batch.state_fresh is None else batch.state_fresh.tolist()
        lens = batch.query_lens_host
        if lens is None:
            lens = tuple(batch.cu_seqlens_q.diff().tolist())
        saved = [] if batch.checkpoint_slots is None else batch.checkpoint_slots.tolist()
        requests, token, chunk = [], 0, 0
        for row, tokens in enumerate(lens):
            chunks = -(-tokens // CHUNK_SIZE)
            if reads[row] >= 0:
                own = saved[chunk : chunk + chunks]
                requests.append(
                    Request(row, reads[row], writes[row], fresh[row], token, tokens, own)
                )
            token, chunk = token + tokens, chunk + chunks
        return requests

    @plain_precision
    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        state: StateCache, batch: ForwardBatch, metadata: Metadata, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Update the states in place: each is read twice and written twice, in cache but once."""
        requests: list[Request] = metadata
        queries, keys, decay, beta = _prepared(q, k, g, beta, layer)
        queries, keys = (per_value_head(x, layer.num_v_heads) for x in (queries, keys))
        decay = decay.exp()
        decay = decay if layer.kind == "kda" else decay[..., None]  # [T, Hv, K or 1]
        # scale S exp(g) q = S (scale q exp(g)), to which the update adds scale u (k · q)
        queries = queries * layer.scale
        reads = torch.stack([keys, queries], -2) * decay[..., None, :]  # [T, Hv, 2, K]
        both, beta = (keys * queries).sum(-1, keepdim=True), beta[..., None]
        values, result = v.float(), _output(q, v, batch, requests, out)
        for x in requests:
            t, old = x.first, x.old(state.state)
            if old is None:
                u = values[t] * beta[t]
                work = u[..., None] * keys[t, :, None]
                result[t] = u * both[t]
            else:
                new = state.state[x.write]
                plain = new.dtype == torch.float32
                old = old if plain else old.float()
                seen = torch.bmm(reads[t], old.mT)  # [Hv, 2, V]
                u = (values[t] - seen[:, 0]) * beta[t]
                result[t] = torch.addcmul(seen[:, 1], u, both[t])
                work = new if plain else old
                torch.mul(old, decay[t, :, None], out=work)
                work.addcmul_(u[..., None], keys[t, :, None])
            _store(state.state, x.write, work)
        return result

    @plain_precision
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        state: StateCache, batch: ForwardBatch, metadata: Metadata, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run chunks of 64 tokens; those of one place in their requests side by side."""
        requests: list[Request] = sorted(metadata, key=lambda x: -x.tokens)
        result, states = _output(q, v, batch, requests, out), _loaded(requests, state.state)
        flat, hv = states.flatten(0, 1), layer.num_v_heads
        for steps in _parts(requests, max(1, HEADS_AT_ONCE // hv)):
            firsts = [(x, CHUNK_SIZE * s.place) for s in steps for x in requests[s.requests]]
            qs, ks, vs, gs, betas = (_chunks(x, firsts) for x in (q, k, v, g, beta))
            qs, ks, gs, betas = _prepared(qs, ks, gs, betas, layer)
            for decays, (x, first) in zip(gs, firsts, strict=True):
                decays[x.tokens - first :] = 0  # past the end: a gate makes 0 a decay
            prepared = sequence(qs, ks, gs, betas, layer.scale)
            values, chunk = vs.float().transpose(1, 2), 0
            for step in steps:
                running = requests[step.requests]
                these = slice(chunk, chunk + len(running))
                some, chunk = prepared.of(these), these.stop
                s = flat[step.requests.start * hv : step.requests.stop * hv]
                seen = torch.bmm(some.reads, s.mT)
                u, o = some.attend(seen, values[these].flatten(0, 1))
                s.mul_(some.decay).baddbmm_(u.mT, some.last_keys)
                self._keep(
                    running, step, states, torch.unflatten(o, 0, (-1, hv)), result, state.state
                )
        for x, s in zip(requests, states, strict=True):
            _store(state.state, x.write, s)
        return result

    @staticmethod
    def _keep(
        running: Sequence[Request],
        step: Step,
        states: Tensor,
        o: Tensor,
        result: Tensor,
        pool: Tensor,
    ) -> None:
        """Put outputs [R, Hv, 64, V] into their tokens, and states into their checkpoints."""
        for i, x in enumerate(running):
            first = CHUNK_SIZE * step.place
            tokens = min(CHUNK_SIZE, x.tokens - first)
            new = result[x.first + first : x.first + first + tokens]
            new.copy_(o[i, :, :tokens].transpose(0, 1))
            if x.checkpoints and x.checkpoints[step.place] >= 0:
                _store(pool, x.checkpoints[step.place], states[step.requests.start + i])

    @plain_precision
    def verify(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer,
        state: StateCache, batch: ForwardBatch, metadata: Metadata, *, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Solve the triangular system of each request's drafts over one read of its state."""
        requests: list[Request] = metadata
        assert batch.spec is not None
        n, mask, hv = batch.spec.num_draft_tokens, batch.spec.tree_mask, layer.num_v_heads
        if mask is None:
            mask = torch.ones(1, n, n, dtype=torch.bool, device=q.device).tril()
        inputs = (*_prepared(q, k, g, beta, layer), v.float())
        rows = torch.tensor([x.row for x in requests], device=q.device, dtype=torch.int64)
        qs, ks, gs, betas, vs = (torch.unflatten(x, 0, (-1, n))[rows] for x in inputs)
        masks = mask if mask.shape[0] == 1 else mask[rows]
        flawed = find_flaws(ks, gs, betas, vs)
        keys, decays, betas, vs = without_flaws(flawed, ks, gs, betas, vs)
        some = drafts(qs, keys, decays, betas, masks, layer.scale).of(slice(None))
        seen = vs.new_zeros(len(requests) * hv, 2 * n, layer.head_v_dim)
        for i, x in enumerate(requests):
            old, heads = x.old(state.state), slice(i * hv, (i + 1) * hv)
            if old is not None:
                torch.bmm(some.reads[heads], old.float().mT, out=seen[heads])
        u, o = some.attend(seen, vs.transpose(1, 2).flatten(0, 1))
        u, o = (torch.unflatten(x, 0, (-1, hv)).transpose(1, 2) for x in (u, o))
        u, o = with_flaws(flawed, masks, u, o)
        writes = torch.tensor([x.write for x in requests], device=q.device, dtype=torch.int64)
        for records, new in zip(state.records, (u, ks, gs), strict=True):
            records.narrow(1, 0, n).index_copy_(0, writes, new)
        result = _output(q, v, batch, requests, out)
        torch.unflatten(result, 0, (-1, n)).index_copy_(0, rows, o.to(result.dtype))
        return result

    @plain_precision
    def commit(
        self, pool: StatePool, batch: ForwardBatch, metadata: Metadata, accepted: Tensor
    ) -> None:
        """Add the accepted drafts' updates to the states, layer after layer."""
        requests: list[Request] = metadata
        states, last = pool.states, accepted.tolist()
        hv = states.state.shape[2]
        tree = None if batch.spec is None else batch.spec.tree_mask
        seen = None if tree is None else tree.tolist()
        for x in requests:
            draft = last[x.row]
            if draft < 0:
                continue
            path = list(range(draft + 1))
            if seen is not None:
                path = [j for j, sees in enumerate(seen[x.row][draft]) if sees]
            u, k, g = (r[:, x.write, path] for r in states.records)
            total = g.cumsum(1, dtype=dtype_of_sums(g.device))  # [layers, p, Hv, …]
            total = total if g.dim() == 4 else total[..., None]
            decay = total[:, -1, :, None].float().exp()
            k = per_value_head(k, hv) * (total[:, -1:] - total).float().exp()
            for i, state in enumerate(states.state):
                old, new = x.old(state), state[x.write]
                work = new if new.dtype == torch.float32 else torch.empty_like(new, dtype=u.dtype)
                if old is None:
                    work.zero_()
                else:
                    torch.mul(old, decay[i], out=work)
                work.baddbmm_(u[i].permute(1, 2, 0), k[i].transpose(0, 1))
                _store(state, x.write, work)


@dataclass(frozen=True, slots=True)
class Step:
    """The chunks at one place in consecutive requests, which run side by side."""

    place: int
    requests: slice


def _parts(requests: Sequence[Request], most: int) -> Iterator[list[Step]]:
    """Yield the steps prepared together, up to `most` chunks; the longest requests come first."""
    steps, chunks = list[Step](), 0
    for place in range(-(-requests[0].tokens // CHUNK_SIZE) if requests else 0):
        running = sum(x.tokens > place * CHUNK_SIZE for x in requests)
        for first in range(0, running, most):
            last = min(first + most, running)
            if steps and chunks + last - first > most:
                yield steps
                steps, chunks = [], 0
            steps.append(Step(place, slice(first, last)))
            chunks += last - first
    if steps:
        yield steps


def _chunks(x: Tensor, firsts: Sequence[tuple[Request, int]]) -> Tensor:
    """Gather chunks [N, 64, …] of x [T, …], 0 past the end; first: the token of the request."""
    counts = [min(CHUNK_SIZE, r.tokens - first) for r, first in firsts]
    if min(counts) == CHUNK_SIZE and all(
        a is b and m + CHUNK_SIZE == n for (a, m), (b, n) in pairwise(firsts)
    ):  # neighbours of one request
        start = firsts[0][0].first + firsts[0][1]
        return torch.unflatten(x[start : start + CHUNK_SIZE * len(firsts)], 0, (-1, CHUNK_SIZE))
    chunks = x.new_zeros(len(firsts), CHUNK_SIZE, *x.shape[1:])
    for chunk, (r, first), tokens in zip(chunks, firsts, counts, strict=True):
        chunk[:tokens] = x[r.first + first : r.first + first + tokens]
    return chunks


def _loaded(requests: Sequence[Request], state: Tensor) -> Tensor:
    """Return the states that requests start from, float32 [R, Hv, V, K]."""
    states = state.new_zeros(len(requests), *state.shape[1:], dtype=torch.float32)
    for x, s in zip(requests, states, strict=True):
        old = x.old(state)
        if old is not None:
            s.copy_(old)
    return states


def _store(state: Tensor, slot: int, new: Tensor) -> None:
    """Write a state into its slot, unless it was computed there."""
    slot_state = state[slot]
    if new.data_ptr() != slot_state.data_ptr():
        slot_state.copy_(new)


def _prepared(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, layer: LinearLayer
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q and k normalised, log decay and beta, all float32.

    A decay that float32 rounds to 0 is as good as any below, and differences of infinities are NaN.
    """
    decay, beta = gated(layer, g, beta)
    return normalised(layer, q), normalised(layer, k), decay.clamp(min=NOTHING_LEFT), beta


def _output(
    q: Tensor, v: Tensor, batch: ForwardBatch, requests: Sequence[Request], out: Tensor | None
) -> Tensor:
    """Return `out` or a new tensor [T, Hv, V] in the dtype of q, 0 where there is padding alone.

    `out` may be v itself, which is still to be read.
    """
    out, end = v.new_empty(v.shape, dtype=q.dtype) if out is None else out, 0
    if len(requests) < batch.batch_size:
        for x in sorted(requests, key=lambda x: x.first):
            out[end : x.first] = 0
            end = max(end, x.first + x.tokens)
        out[end:] = 0
    return out
