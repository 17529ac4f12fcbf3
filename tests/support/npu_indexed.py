"""Passes of sparse MLA with index keys of the shape that npu_lightning_indexer takes."""

from __future__ import annotations

import dataclasses

import torch
from attn_core.plugins.registry import load_plugins
from attn_core.testing.harness import Bench
from attn_core.testing.indexer import index_scores, select, visible
from attn_core.testing.inputs import Point
from attn_core.testing.passes import create, prepared
from attn_core.testing.sparse_catalog import SPARSE
from attn_core.testing.sparse_passes import check_selection, chosen

CASES = {case.feature: case for case in SPARSE}


class Indexed:
    """A pass of the suite with 32 index heads of 128, and weights that the dtype of q can hold."""

    def __init__(self, case, *, page_size=128, index_shape=(32, 128), dtype="bf16", **changes):
        spec = load_plugins().get("ascend")
        row = next(r for r in spec.capabilities if r.kind == "dsa")
        self.case = dataclasses.replace(CASES[case], index_shape=index_shape, **changes)
        self.point = Point(dtype=dtype, page_size=page_size)
        self.bench = Bench(spec=spec, row=row, torch_device=torch.device("cpu"), arch="910b")
        inputs, self.right = prepared(self.bench, self.case, self.point)
        self.inputs = inputs if inputs.indexer is None else self._rounded(inputs)
        self.backend = create(self.bench, self.case, self.inputs, self.point)

    def _rounded(self, inputs):
        """Round the weights, and select by them again."""
        indexer = inputs.indexer
        weights = indexer.weights.to(indexer.q_index.dtype).float()
        selected = [
            select(
                index_scores(indexer.q_index[token], weights[token], indexer.keys[request][:seen]),
                self.case.index_topk,
            )
            for request, token, seen in visible(self.case)
        ]
        indexer = dataclasses.replace(indexer, weights=weights, selected=tuple(selected))
        return dataclasses.replace(inputs, indexer=indexer)

    def choose(self):
        """Return the slots that the backend selects, int32 [T, K]."""
        return chosen(self.backend, self.inputs)

    def check(self):
        """Compare the selection with the float64 scores."""
        table = self.inputs.batch.views["full"].page_table
        size = self.inputs.cache.page_size
        return check_selection(self.choose(), self.case, self.inputs.indexer, table, size)
