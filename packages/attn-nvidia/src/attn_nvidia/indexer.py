"""The indexer's scores by DeepGEMM: FP8 queries against the FP8 index keys of pages of 64."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any, Final, NamedTuple

import torch
from attn_core import AttentionLayer, ForwardBatch, ForwardMode, LayerCache
from torch import Tensor

_DISTRIBUTION: Final = "sgl-deep-gemm"
_HEADS: Final = (32, 64)  # of its kernels for sm90
_DIM: Final = 128
_PAGE: Final = 64
_MOST_SCORES: Final = 1 << 26  # float32 numbers that exist at once: 256 MiB


class _Part(NamedTuple):
    """What the kernel of pages reads of some queries in each layer of a pass."""

    table: Tensor
    lengths: Tensor
    schedule: Any


class _Shared(NamedTuple):
    """What layers of a view share in a pass.

    batch: whose pass it is. visible: int32 [T], the keys that each query sees. request: int64 [T],
    None where each query is a request of its own. parts: by their first and last queries.
    """

    batch: ForwardBatch
    visible: Tensor
    request: Tensor | None
    parts: dict[tuple[int, int], _Part]

    @classmethod
    def of(cls, layer: AttentionLayer, batch: ForwardBatch, plan: Any) -> _Shared:
        """Make it."""
        view, tokens = batch.views[layer.view], batch.num_tokens
        if batch.max_q_len == 1 and tokens == batch.batch_size:  # a query each: fewer launches
            visible, request = view.seq_lens, None
        else:
            request = plan.requests.long()
            token = torch.arange(tokens, dtype=torch.int32, device=view.seq_lens.device)
            visible = view.seq_lens[request] - (batch.cu_seqlens_q[request + 1] - token) + 1
        visible = visible.clamp(1, view.max_seq_len)  # of a padded row it may be anything
        return cls(batch, visible, request, {})


class DeepGemmIndexer:
    """Scores some queries at a time; `select` of triton's indexer takes the greatest.

    Prompts gather a request's keys once and score all of its queries against them. Other passes
    read the pages in place, each query a request of its own.
    """

    def __init__(self, library: Any, selects: Any, multiprocessors: int) -> None:
        self._library, self._selects = library, selects
        self._multiprocessors = multiprocessors

    @staticmethod
    def load(selects: Any, multiprocessors: int) -> DeepGemmIndexer | None:
        """Return an indexer where the library is installed; None elsewhere."""
        try:
            importlib.metadata.version(_DISTRIBUTION)
        except importlib.metadata.PackageNotFoundError:
            return None
        return DeepGemmIndexer(importlib.import_module("deep_gemm"), selects, multiprocessors)

    def takes(
        self, q_index: Tensor, layer: AttentionLayer, cache: LayerCache, longest: int
    ) -> bool:
        """Say whether its kernels score this: what they are not built for, they refuse or misread.

        longest: of the requests. Up to layer.index_topk keys there is nothing to score.
        """
        index, (_, heads, dim) = cache.index, q_index.shape
        stored = index is not None and index.dtype == torch.uint8 and index.is_contiguous()
        shaped = heads in _HEADS and dim == _DIM and cache.page_size == _PAGE
        fp8 = q_index.dtype == torch.float8_e4m3fn
        return stored and shaped and fp8 and longest > (layer.index_topk or 0)

    def index_topk(
        self,
        q_index: Tensor,
        weights: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        batch: ForwardBatch,
        plan: Any,
        buffers: dict[Any, Any],
    ) -> Tensor:
        """Choose the keys of each query; plan: of triton's indexer, with each token's request.

        buffers: what the layers of a pass share. In a graph, which replays other lengths, that is
        nothing: what the first layer makes may have been made before the capture.
        """
        assert layer.index_topk is not None
        q_index, weights = q_index.contiguous(), weights.contiguous()
        view, tokens = batch.views[layer.view], q_index.shape[0]
        key = (layer.view, id(batch))
        shared = _Shared.of(layer, batch, plan) if key not in buffers else buffers[key]
        if not plan.captured:
            buffers[key] = shared
        chosen = torch.empty(tokens, layer.index_topk, dtype=torch.int32, device=q_index.device)
        pages = -(-view.max_seq_len // _PAGE)
        rows = max(1, _MOST_SCORES // (pages * _PAGE))
        prompts = batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
        query_lens = batch.query_lens_host if prompts else None
        first = 0
        for number, count in enumerate((tokens,) if query_lens is None else query_lens):
            if not count:
                continue
            keys = (
                None if query_lens is None else self._keys(cache, view.page_table[number, :pages])
            )
            for start in range(first, first + count, rows):
                part = slice(start, min(start + rows, first + count))
                q, w = q_index, weights
                if part.stop - part.start < tokens:
                    q, w = q_index[part], weights[part]
                if keys is not None:
                    scores = self._gathered(q, w, shared.visible[part], keys)
                else:
                    range_key = (start, part.stop)
                    if range_key not in shared.parts:
                        shared.parts[range_key] = self._part(shared, view.page_table, part, pages)
                    scores = self._paged(q, w, cache, shared.parts[range_key], pages * _PAGE)
                self._selects.select(scores, start, chosen, layer, cache, batch, plan)
            first += count
        return chosen

    def _part(self, shared: _Shared, page_table: Tensor, part: slice, pages: int) -> _Part:
        """Return what its kernel reads of some queries, each a request of its own."""
        table = page_table[part if shared.request is None else shared.request[part], :pages]
        lengths = shared.visible[part][:, None].contiguous()
        count = self._multiprocessors
        return _Part(
            table, lengths, self._library.get_paged_mqa_logits_metadata(lengths, _PAGE, count)
        )

    def _keys(self, cache: LayerCache, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the keys of a request: e4m3 [n, 128] and their scales [n]."""
        values, scales = cache.index_keys
        assert scales is not None
        raw = values.view(torch.uint8).index_select(0, pages)
        return raw.flatten(0, 1).view(values.dtype), scales.index_select(0, pages).flatten()

    def _gathered(
        self, q_index: Tensor, weights: Tensor, visible: Tensor, keys: tuple[Tensor, Tensor]
    ) -> Tensor:
        starts = torch.zeros_like(visible)
        scores: Tensor = self._library.fp8_mqa_logits(q_index, keys, weights, starts, visible)
        return scores

    def _paged(
        self,
        q_index: Tensor,
        weights: Tensor,
        cache: LayerCache,
        part: _Part,
        longest: int,
    ) -> Tensor:
        assert cache.index is not None
        scores: Tensor = self._library.fp8_paged_mqa_logits(
            q_index[:, None],
            cache.index.view(-1, _PAGE, 1, cache.index.shape[1] // _PAGE),
            weights,
            part.lengths,
            part.table,
            part.schedule,
            longest,
        )
        return scores
