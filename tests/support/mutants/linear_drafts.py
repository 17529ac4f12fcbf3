"""Faults of linear attention: verify and commit."""

from dataclasses import replace

from linear_backend import LinearReference


class TreeTakenForAChain(LinearReference):
    def parents(self, batch, row, n):
        return tuple(range(-1, n - 1))


class TreeOfTheFirstRequest(LinearReference):
    def mask(self, batch, row):
        return super().mask(batch, 0)


class ParentIsTheRoot(LinearReference):
    """Of the drafts that one sees, the first is taken for its parent."""

    def parent(self, seen):
        return min((j for j, sees in enumerate(seen) if sees), default=-1)


class ParentByDepth(LinearReference):
    """The parent is taken to be the draft of the depth above, counted along the chain."""

    def parent(self, seen):
        return sum(seen) - 1


class SiblingsCommitted(LinearReference):
    """All drafts up to the accepted one are taken in."""

    def path(self, x, draft):
        return list(range(draft + 1))


class LastDraftNotCommitted(LinearReference):
    def path(self, x, draft):
        return super().path(x, draft)[:-1]


class OneDraftTooManyCommitted(LinearReference):
    """The number of accepted drafts is taken for their last index."""

    def path(self, x, draft):
        return super().path(x, min(draft + 1, x.tokens - 1))


class RejectedTakenForTheFirstDraft(LinearReference):
    def accepted(self, accepted, x):
        return max(accepted[x.row], 0)


class RejectedTakenForTheLastDraft(LinearReference):
    def accepted(self, accepted, x):
        return accepted[x.row] % x.tokens


class AcceptedOfRealRequests(LinearReference):
    """Padding is not counted where the accepted drafts are looked up."""

    def commit(self, pool, batch, metadata, accepted):
        packed = [replace(x, row=i) for i, x in enumerate(metadata)]
        super().commit(pool, batch, packed, accepted)


class CommitWithTheRecordsOfTheFirstLayer(LinearReference):
    def records(self, pool, layer, x):
        return super().records(pool, 0, x)


class CommitOfTheFirstLayerAlone(LinearReference):
    def commit(self, pool, batch, metadata, accepted):
        rest = pool.states.state[1:].clone()
        super().commit(pool, batch, metadata, accepted)
        pool.states.state[1:] = rest


class CommitForgotten(LinearReference):
    """Accepted drafts are taken in by the next decode, and by nothing else."""

    pending = None

    def commit(self, pool, batch, metadata, accepted):
        self.pending = (pool, batch, metadata, accepted)

    def decode(self, *args, **kwargs):
        if self.pending is not None:
            super().commit(*self.pending)
            self.pending = None
        return super().decode(*args, **kwargs)


class VerifyWritesTheState(LinearReference):
    def verify(self, q, k, v, g, beta, layer, state, batch, metadata, *, out=None):
        found = super().verify(q, k, v, g, beta, layer, state, batch, metadata, out=out)
        self.extend(q, k, v, g, beta, layer, state, batch, metadata)
        return found


class RecordsAtTheSlotRead(LinearReference):
    def record(self, x):
        return x.read


class RecordsWithRawKeys(LinearReference):
    """The records hold keys before their norm."""

    def verify(self, q, k, v, g, beta, layer, state, batch, metadata, *, out=None):
        found = super().verify(q, k, v, g, beta, layer, state, batch, metadata, out=out)
        for x in metadata:
            state.k[x.write, : x.tokens] = k[x.first : x.first + x.tokens].float()
        return found


class RecordsInBfloat16(LinearReference):
    def records(self, pool, layer, x):
        return tuple(r.bfloat16().float() for r in super().records(pool, layer, x))


class TreesOfTheCapture(LinearReference):
    """A replay runs over the trees of the capture."""

    def init_forward_metadata_capture_cuda_graph(self, batch):
        mask = None if batch.spec is None else batch.spec.tree_mask
        self.captured_mask = None if mask is None else mask.clone()
        return super().init_forward_metadata_capture_cuda_graph(batch)

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        if batch.spec is not None:
            batch = replace(batch, spec=replace(batch.spec, tree_mask=self.captured_mask))
        super().init_forward_metadata_replay_cuda_graph(batch, metadata)
