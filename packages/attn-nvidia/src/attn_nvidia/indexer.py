"""The indexer's scores by DeepGEMM: FP8 queries against the FP8 index keys of pages of 64."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any, Final

import torch
from attn_core import AttentionLayer, ForwardBatch, ForwardMode, LayerCache
from torch import Tensor

_DISTRIBUTION: Final = "sgl-deep-gemm"
_HEADS: Final = (32, 64)  # of its kernels for sm90
_DIM: Final = 128
_PAGE: Final = 64
_MOST_SCORES: Final = 1 << 26  # float32 numbers that exist at once: 256 MiB


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
    ) -> Tensor:
        """Choose the keys of each query; plan: of triton's indexer, with each token's request."""
        assert layer.index_topk is not None
        q_index, weights = q_index.contiguous(), weights.contiguous()
        view, tokens = batch.views[layer.view], q_index.shape[0]
        if batch.max_q_len == 1 and tokens == batch.batch_size:  # a query each: fewer launches
            visible, request = view.seq_lens, None
        else:
            request = plan.requests.long()
            token = torch.arange(tokens, dtype=torch.int32, device=q_index.device)
            visible = view.seq_lens[request] - (batch.cu_seqlens_q[request + 1] - token) + 1
        visible = visible.clamp(1, view.max_seq_len)  # of a padded row it may be anything
        chosen = torch.empty(tokens, layer.index_topk, dtype=torch.int32, device=q_index.device)
        pages = -(-view.max_seq_len // _PAGE)
        rows = max(1, _MOST_SCORES // (pages * _PAGE))
        prompts = batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
        news = batch.query_lens_host if prompts else None
        first = 0
        for number, count in enumerate((tokens,) if news is None else news):
            if not count:
                continue
            keys = None if news is None else self._keys(cache, view.page_table[number, :pages])
            for start in range(first, first + count, rows):
                part = slice(start, min(start + rows, first + count))
                asked = (q_index[part], weights[part], visible[part])
                if keys is not None:
                    scores = self._gathered(*asked, keys)
                else:
                    table = view.page_table[part if request is None else request[part], :pages]
                    scores = self._paged(*asked, cache, table, pages * _PAGE)
                self._selects.select(scores, start, chosen, layer, cache, batch, plan)
            first += count
        return chosen

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
        visible: Tensor,
        cache: LayerCache,
        table: Tensor,
        longest: int,
    ) -> Tensor:
        library, lengths = self._library, visible[:, None].contiguous()
        assert cache.index is not None
        schedule = library.get_paged_mqa_logits_metadata(lengths, _PAGE, self._multiprocessors)
        scores: Tensor = library.fp8_paged_mqa_logits(
            q_index[:, None],
            cache.index.view(-1, _PAGE, 1, cache.index.shape[1] // _PAGE),
            weights,
            lengths,
            table,
            schedule,
            longest,
        )
        return scores
