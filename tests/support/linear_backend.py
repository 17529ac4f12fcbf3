"""A small right backend of linear attention, cut into steps so that a test can plant one fault."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from attn_core.backends.torch_native.linear import TorchNativeLinear
from attn_core.runtime.backend import LinearAttentionBackend
from attn_core.spec.capabilities import ANY_TOPK, BackendSpec, Capabilities

CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a pass that is no padding: its row, slots, tokens and checkpoints."""

    row: int
    read: int
    write: int
    fresh: bool
    first: int
    tokens: int
    checkpoints: tuple[int, ...]
    parents: tuple[int, ...]  # of drafts, else each token's predecessor


class LinearReference(LinearAttentionBackend):
    """Runs one token after another in float32."""

    # the plan

    def init_forward_metadata(self, batch):
        return self.requests(batch)

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        metadata[:] = self.requests(batch)

    def requests(self, batch):
        reads, writes, fresh = self.slots(batch)
        lens = batch.cu_seqlens_q.diff().tolist()
        saved = None if batch.checkpoint_slots is None else batch.checkpoint_slots.tolist()
        found, first, chunk = [], 0, 0
        for row, n in enumerate(lens):
            chunks = -(-n // CHUNK)
            if not self.is_padding(reads[row]):
                own = self.checkpoints(saved, chunk, chunks, row) if saved is not None else ()
                request = Request(
                    row=row, read=reads[row], write=writes[row], fresh=fresh[row], first=first,
                    tokens=n, checkpoints=tuple(own), parents=self.parents(batch, row, n),
                )  # fmt: skip
                found.append(request)
            first, chunk = first + n, chunk + chunks
        return found

    def is_padding(self, slot):
        return slot < 0

    def slots(self, batch):
        reads = batch.state_slots.tolist()
        writes = reads if batch.state_slots_out is None else batch.state_slots_out.tolist()
        fresh = batch.state_fresh
        return reads, writes, [False] * len(reads) if fresh is None else fresh.tolist()

    def checkpoints(self, saved, chunk, chunks, row):
        return saved[chunk : chunk + chunks]

    def parents(self, batch, row, n):
        if batch.spec is None or batch.spec.tree_mask is None:
            return tuple(range(-1, n - 1))
        return tuple(self.parent(seen[:i]) for i, seen in enumerate(self.mask(batch, row)))

    def mask(self, batch, row):
        return batch.spec.tree_mask[row].tolist()

    def parent(self, seen):
        """The last of the earlier drafts that a draft sees."""
        return max((j for j, sees in enumerate(seen) if sees), default=-1)

    # the inputs

    def prepared(self, q, k, v, g, beta, layer):
        """Return q, k [T, Hv, K], v, decay and beta as the recurrence takes them, float32."""
        if layer.gate is not None:
            g, beta = self.log_decay(g, layer), self.strength(beta, layer)
        q, k = self.normalised(q, k, layer)
        q, k = (self.per_value_head(x, layer.num_v_heads) for x in (q, k))
        return q, k, v.float(), g, beta

    def log_decay(self, f, layer):
        gate = layer.gate
        a = gate.A_log.float().exp()
        a = a if layer.kind == "gdn" else a[:, None]
        x = f.float() + gate.dt_bias.float()
        if gate.lower_bound is None:
            return -a * self.softplus(x)
        return gate.lower_bound * torch.sigmoid(a * x)

    def softplus(self, x):
        return torch.nn.functional.softplus(x)

    def strength(self, b, layer):
        return torch.sigmoid(b.float()) * (2 if layer.gate.neg_eigval else 1)

    def normalised(self, q, k, layer):
        q, k = q.float(), k.float()
        return (q, k) if layer.qk_norm is None else tuple(self.norm(x, layer) for x in (q, k))

    def norm(self, x, layer):
        return x * (x.square().sum(-1, keepdim=True) + layer.qk_norm).rsqrt()

    def per_value_head(self, x, hv):
        return x.repeat_interleave(hv // x.shape[1], 1)

    def decay(self, g, layer):
        """Return what a state is multiplied by, [Hv, 1, K or 1]."""
        return g.exp()[:, None] if layer.kind == "kda" else g.exp()[:, None, None]

    # the recurrence

    def step(self, s, q, k, v, decay, beta, scale):
        s = s * decay
        u = beta[:, None] * (v - self.read(s, k))
        s = s + u[..., None] * k[:, None]
        return s, self.read(s, q) * scale, u

    def read(self, s, x):
        return torch.einsum("hvk,hk->hv", s, x)

    def scale(self, layer):
        return layer.scale

    def start(self, states, x):
        return torch.zeros_like(states[x.read]).float() if x.fresh else states[x.read].float()

    def store(self, states, slot, s):
        states[slot] = s.to(states.dtype)

    def run(self, tensors, layer, state, batch, requests, out, *, keep):
        """Run every request; `keep` is given each with its start, its states and its updates."""
        q, k, v, g, beta = self.prepared(*tensors, layer)
        result = self.output(tensors, out)
        for x in requests:
            start = self.start(state.state, x)
            states, updates = [], []
            for i in range(x.tokens):
                t = x.first + i
                s = start if x.parents[i] < 0 else states[x.parents[i]]
                decay = self.decay(g[t], layer)
                s, o, u = self.step(s, q[t], k[t], v[t], decay, beta[t], self.scale(layer))
                states.append(s)
                updates.append((u, k[t], g[t]))
                result[t] = o.to(result.dtype)
            keep(x, start, states, updates)
        return result

    def output(self, tensors, out):
        q, v = tensors[0], tensors[2]
        return torch.empty(v.shape, dtype=q.dtype) if out is None else out

    def extend(self, q, k, v, g, beta, layer, state, batch, metadata, *, out=None):
        def keep(x, start, states, updates):
            ends = [min((c + 1) * CHUNK, x.tokens) - 1 for c in range(len(x.checkpoints))]
            for end, slot in zip(ends, x.checkpoints, strict=True):
                if slot >= 0:
                    self.store(state.state, slot, states[end])
            self.store(state.state, x.write, states[-1] if states else start)

        tensors = (q, k, v, g, beta)
        return self.run(tensors, layer, state, batch, metadata, out, keep=keep)

    decode = extend

    def verify(self, q, k, v, g, beta, layer, state, batch, metadata, *, out=None):
        hk = layer.num_k_heads

        def keep(x, start, states, updates):
            for i, (u, key, decay) in enumerate(updates):
                state.u[self.record(x), i] = u
                state.k[self.record(x), i] = key[:: layer.num_v_heads // hk]
                state.g[self.record(x), i] = decay

        tensors = (q, k, v, g, beta)
        return self.run(tensors, layer, state, batch, metadata, out, keep=keep)

    def record(self, x):
        return x.write

    def commit(self, pool, batch, metadata, accepted):
        for x in metadata:
            draft = self.accepted(accepted.tolist(), x)
            for i in range(len(pool.layer_ids)) if draft >= 0 else ():
                states, (u, k, g) = pool.states.state[i], self.records(pool, i, x)
                hv, s = states.shape[1], self.start(states, x)
                for j in self.path(x, draft):
                    key = self.per_value_head(k[j][None], hv)[0]
                    decay = g[j].exp()
                    s = s * (decay[:, None] if decay.dim() == 2 else decay[:, None, None])
                    s = s + u[j][..., None] * key[:, None]
                self.store(states, x.write, s)

    def accepted(self, accepted, x):
        return accepted[x.row]

    def records(self, pool, layer, x):
        return tuple(records[layer, self.record(x)] for records in pool.states.records)

    def path(self, x, draft):
        path = []
        while draft >= 0:
            path.insert(0, draft)
            draft = x.parents[draft]
        return path


class ChunkReference(TorchNativeLinear):
    """torch_native's chunks, whose plan a replay refills."""

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        metadata[:] = self.init_forward_metadata(batch)


class OffsetsOf16Bits(LinearReference):
    """Where a slot begins is counted in numbers, and wraps."""

    def start(self, states, x):
        return super().start(states, dataclasses.replace(x, read=self.wrapped(states, x.read)))

    def store(self, states, slot, s):
        super().store(states, self.wrapped(states, slot), s)

    def wrapped(self, states, slot):
        size = states[0].numel()
        return slot * size % (1 << 16) // size


class Decoder(LinearReference):
    """Refuses what its row declares: to verify."""

    verify = LinearAttentionBackend.verify


ROW = Capabilities(
    kind="gdn",
    device="any",
    dtypes={"fp32", "bf16"},
    kv_dtypes={"fp32", "bf16"},
    priority=1,
    head_dim_pairs="any",
    max_verify_topk=ANY_TOPK,
    deterministic=True,
    cuda_graph="uniform",
    separate_write_slots=True,
    checkpoints=True,
)


def linear_spec(create: str = "linear_backend:LinearReference") -> BackendSpec:
    """The declaration of the linear reference."""
    rows = (ROW, dataclasses.replace(ROW, kind="kda"))
    return BackendSpec(name="linear-reference", capabilities=rows, create=create)
