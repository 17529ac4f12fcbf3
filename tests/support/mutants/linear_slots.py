"""Faults of linear attention: slots, strides and checkpoints."""

from dataclasses import replace

import torch
from attn_core.cache.state_pool import CHUNK_SIZE
from linear_backend import LinearReference


class PaddingIsSlotZero(LinearReference):
    def slots(self, batch):
        reads, writes, fresh = super().slots(batch)
        return [max(x, 0) for x in reads], [max(x, 0) for x in writes], fresh


class PaddingIsTheLastSlot(LinearReference):
    """An index of -1 wraps."""

    def is_padding(self, slot):
        return False


class FreshIgnored(LinearReference):
    def slots(self, batch):
        reads, writes, fresh = super().slots(batch)
        return reads, writes, [False] * len(fresh)


class FreshTimesZero(LinearReference):
    """A fresh state is multiplied by 0, and NaN stays."""

    def start(self, states, x):
        return states[x.read].float() * (0 if x.fresh else 1)


class FreshIgnoredByCommit(LinearReference):
    def commit(self, pool, batch, metadata, accepted):
        super().commit(pool, batch, [replace(x, fresh=False) for x in metadata], accepted)


class WriteSlotIgnored(LinearReference):
    def slots(self, batch):
        reads, _, fresh = super().slots(batch)
        return reads, reads, fresh


class WriteSlotRead(LinearReference):
    def slots(self, batch):
        _, writes, fresh = super().slots(batch)
        return writes, writes, fresh


class WrittenToBothSlots(LinearReference):
    """A state is updated in place and then moved."""

    def start(self, states, x):
        found = super().start(states, x)
        states[x.read] = found.to(states.dtype)
        return found

    def extend(self, q, k, v, g, beta, layer, state, batch, metadata, *, out=None):
        found = super().extend(q, k, v, g, beta, layer, state, batch, metadata, out=out)
        for x in metadata:
            state.state[x.read] = state.state[x.write]
        return found

    decode = extend


class SlotsOfTheCapture(LinearReference):
    """A replay runs over the slots of the capture."""

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        pass


class SlotsOfTheFirstPass(LinearReference):
    """Passes of as many requests are planned once."""

    def init_forward_metadata(self, batch):
        plans = self.__dict__.setdefault("plans", {})
        return plans.setdefault((batch.forward_mode, batch.batch_size), super().requests(batch))


class RequestsWithoutTokensSkipped(LinearReference):
    """Their state is neither moved nor cleared."""

    def requests(self, batch):
        return [x for x in super().requests(batch) if x.tokens]


class LinearBatchEndsAtTheFirstEmptyRequest(LinearReference):
    def requests(self, batch):
        found = super().requests(batch)
        ends = [i for i, x in enumerate(found) if not x.tokens]
        return found[: ends[0]] if ends else found


class LinearRequestsUpTo64(LinearReference):
    def requests(self, batch):
        return super().requests(batch)[:64]


class SlotsOfAPackedPool(LinearReference):
    """A slot is found as if nothing lay between two."""

    def flat(self, states):
        size, dims = states[0].numel(), states.shape
        memory = states.as_strided((dims[0] * size,), (1,))
        return memory.view(dims)

    def start(self, states, x):
        return super().start(self.flat(states), x)

    def store(self, states, slot, s):
        super().store(self.flat(states), slot, s)


class InputsTakenForContiguous(LinearReference):
    def prepared(self, q, k, v, g, beta, layer):
        k = torch.as_strided(k, k.shape, torch.empty(k.shape).stride())
        return super().prepared(q, k, v, g, beta, layer)


class GatesTakenForContiguous(LinearReference):
    def prepared(self, q, k, v, g, beta, layer):
        beta = torch.as_strided(beta, beta.shape, torch.empty(beta.shape).stride())
        return super().prepared(q, k, v, g, beta, layer)


class LinearOutIgnored(LinearReference):
    def output(self, tensors, out):
        return super().output(tensors, None)


class CheckpointOfTheChunkBefore(LinearReference):
    def checkpoints(self, saved, chunk, chunks, row):
        own = super().checkpoints(saved, chunk, chunks, row)
        return [*own[1:], -1] if own else own


class CheckpointsCountedPerRequest(LinearReference):
    """Every request's chunks are counted from the first checkpoint slot."""

    def checkpoints(self, saved, chunk, chunks, row):
        return saved[:chunks]


class CheckpointsOfWholeChunks(LinearReference):
    """The state after a shorter last chunk is not saved."""

    def requests(self, batch):
        return [
            replace(x, checkpoints=(*x.checkpoints[:-1], -1)) if x.tokens % CHUNK_SIZE else x
            for x in super().requests(batch)
        ]


class CheckpointIsTheEnd(LinearReference):
    """Every checkpoint is the state at the end of the pass."""

    def extend(self, q, k, v, g, beta, layer, state, batch, metadata, *, out=None):
        plain = [replace(x, checkpoints=()) for x in metadata]
        found = super().extend(q, k, v, g, beta, layer, state, batch, plain, out=out)
        for x in metadata:
            for slot in x.checkpoints:
                if slot >= 0:
                    state.state[slot] = state.state[x.write]
        return found
