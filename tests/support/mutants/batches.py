"""Faults of a batch: its requests, queries, plan, buffers and graphs."""

import time
from dataclasses import replace

import torch
from attn_core.testing.inputs import mapped
from reference import Reference


class LengthOfTheLongest(Reference):
    def rows(self, batch, view):
        result = super().rows(batch, view)
        return [replace(r, length=max(x.length for x in result)) for r in result]


class LengthsOfTheSpec(Reference):
    """Every request of a batch with a spec is taken to have as many queries as drafts."""

    def rows(self, batch, view):
        result = super().rows(batch, view)
        if batch.spec is None:
            return result
        n, total = batch.spec.num_draft_tokens, batch.num_tokens
        slices = [slice(min(r.index * n, total), min((r.index + 1) * n, total)) for r in result]
        return [replace(r, tokens=s) for r, s in zip(result, slices, strict=True)]


class NoKeysNowhere(Reference):
    """A pass in which no request has a key gives its buffer back."""

    def forward(self, q, k, v, layer, cache, batch, metadata, *, out=None, **kwargs):
        if not any(r.length for r in self.rows(metadata["batch"], layer.view)):
            lse = torch.full(q.shape[:2], -torch.inf)
            out = torch.empty_like(q).fill_(torch.nan) if out is None else out
            return (out, lse) if kwargs.get("return_lse") else out
        return super().forward(q, k, v, layer, cache, batch, metadata, out=out, **kwargs)


class BatchEndsAtTheFirstEmptyRequest(Reference):
    def rows(self, batch, view):
        result = super().rows(batch, view)
        ends = [r.index for r in result if not r.queries]
        return result[: ends[0]] if ends else result


class RequestsUpTo64(Reference):
    def rows(self, batch, view):
        return super().rows(batch, view)[:64]


class QueriesTakenForContiguous(Reference):
    def queries(self, q):
        return q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))


class QueryHeadsTakenForAdjacent(Reference):
    def queries(self, q):
        return q.as_strided(q.shape, (q.stride(0), q.shape[2], 1), q.storage_offset())


class QueriesByTheLargestOfTheBatch(Reference):
    def queries(self, q):
        top = q.abs().amax()
        return (q / top).nan_to_num(posinf=0.0, neginf=0.0) * top


class BufferNotFilled(Reference):
    """A new output is returned instead of the buffer that was given."""

    def buffer(self, q, layer, out):
        return super().buffer(q, layer, None)


class OutputInFloat32(Reference):
    def buffer(self, q, layer, out):
        return super().buffer(q.float(), layer, None)


class PlanOfTheFirstPass(Reference):
    first = None

    def init_forward_metadata(self, batch):
        self.first = self.first or super().init_forward_metadata(batch)
        return self.first


class PlanOfAllInstances(Reference):
    """The plan is kept in the class: the last one of any instance counts."""

    plans: list = []  # noqa: RUF012  # shared on purpose: that is the fault

    def init_forward_metadata(self, batch):
        self.plans[:] = [batch]
        return self.plans

    def forward(self, q, k, v, layer, cache, batch, metadata, **kwargs):
        metadata = metadata if isinstance(metadata, dict) else {"batch": metadata[0]}
        return super().forward(q, k, v, layer, cache, batch, metadata, **kwargs)


class ScratchOfAllThreads(Reference):
    """Queries are staged in a buffer of the class."""

    scratch = torch.empty(1 << 20)

    def queries(self, q):
        staged = self.scratch[: q.numel()].view(q.shape)
        staged.copy_(q)
        time.sleep(1e-4)
        return staged.to(q.dtype).clone()


class StaleAfterReplay(Reference):
    """The plan of the capture is not refilled."""

    def init_forward_metadata_capture_cuda_graph(self, batch):
        self.static["batch"] = mapped(batch, torch.Tensor.clone)
        return self.static

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        pass


class StaleTablesAfterReplay(StaleAfterReplay):
    """Lengths are refilled, page tables are not."""

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        old = metadata["batch"]
        views = {
            name: replace(view, page_table=old.views[name].page_table)
            for name, view in batch.views.items()
        }
        metadata["batch"] = replace(batch, views=views)


class LongestOfTheFirstReplay(Reference):
    longest = None

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        self.longest = self.longest or batch.views["full"].max_seq_len
        super().init_forward_metadata_replay_cuda_graph(batch, metadata)

    def rows(self, batch, view):
        longest = self.longest or 1 << 30
        return [replace(r, length=min(r.length, longest)) for r in super().rows(batch, view)]


class TableTakenForContiguousInAGraph(Reference):
    graph = False

    def init_cuda_graph_state(self, *args):
        self.graph = True
        super().init_cuda_graph_state(*args)

    def rows(self, batch, view):
        if self.graph:
            full = batch.views[view]
            table = full.page_table.as_strided(full.page_table.shape, (full.page_table.shape[1], 1))
            batch = replace(batch, views={**batch.views, view: replace(full, page_table=table)})
        return super().rows(batch, view)
