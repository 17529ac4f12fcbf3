"""EAGLE's draft decode: several steps of a draft model, planned at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attn_core.cache.page_table import num_pages_for
from attn_core.integrations.sglang.backend import AttnCoreBackend
from attn_core.integrations.sglang.page_tables import Branches, fill_branches
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode


class DraftDecodeBackend:
    """Serves the decode steps of a draft model; SGLang runs step i on `attn_backends[i]`.

    Each of a request's topk branches is a decode row with a page table of its own: the request's
    tokens, then the branch's drafts. All steps share the table, and step i ends after draft i.
    DraftTreeBackend lays the branches out in another way.

    backend: of the draft model, whose choice all steps share. topk: branches of a request. steps:
    forward passes between two verifications. A layer's keys and values lie where SGLang put them.
    """

    mode = ForwardMode.DRAFT_DECODE

    def __init__(self, backend: AttnCoreBackend, topk: int, steps: int) -> None:
        self.attn_backends = [backend, *(backend.another() for _ in range(steps - 1))]
        self.topk = topk
        self.passes = backend.passes
        self.needs_cpu_seq_lens = backend.needs_cpu_seq_lens
        self.max_context_len = backend.max_context_len
        self._static: dict[str, Any] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan steps that no graph replays."""
        rows = self._rows(forward_batch.batch_size)
        longest = self.passes.longest(forward_batch, self._new_tokens())
        views = {name: self._tables(rows, longest) for name in self.passes.views()}
        self._fill(forward_batch, views)
        batches = self._batches(views, longest, self._lengths(forward_batch))
        for backend, batch in zip(self.attn_backends, batches, strict=True):
            backend.plan(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create the buffers of captured steps; a request has topk tokens in each."""
        rows = self._rows(max_bs)
        views = self.passes.views()
        self._static = {name: self._tables(rows, self.max_context_len) for name in views}
        for step, backend in enumerate(self.attn_backends):
            backend.dispatcher.init_cuda_graph_state(rows, self._tokens(max_bs, step))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan the steps to be captured, or refill what the captured ones point at."""
        rows = self._rows(forward_batch.batch_size)
        views = {name: tables.first(rows) for name, tables in self._static.items()}
        self._fill(forward_batch, views)
        lengths = self._lengths(forward_batch)
        if in_capture:
            batches = self._batches(views, self.max_context_len, lengths)
            for backend, batch in zip(self.attn_backends, batches, strict=True):
                backend.capture(batch)
            return
        for backend, host in zip(self.attn_backends, lengths, strict=True):
            backend.replay(backend.captured(self.mode, rows, host))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Do nothing: the graph reads buffers that are filled before it runs."""

    def _tables(self, rows: int, longest: int) -> Any:
        return self._create(rows, num_pages_for(longest, self.passes.page_size))

    def _fill(self, forward_batch: Any, views: Mapping[str, Any]) -> None:
        for name, tables in views.items():
            self._fill_view(forward_batch, tables, self.passes.slot_map(name))

    # what a layout of the branches decides

    def _rows(self, requests: int) -> int:
        """Return how many rows of a batch some requests have."""
        return requests * self.topk

    def _tokens(self, requests: int, step: int) -> int:
        """Return how many queries some requests have in a step."""
        return requests * self.topk

    def _new_tokens(self) -> int:
        """Return how many drafts a row has in the last step."""
        return len(self.attn_backends)

    def _create(self, rows: int, pages: int) -> Any:
        device = self.passes.req_to_token.device
        return Branches.create(rows, pages, len(self.attn_backends), device)

    def _fill_view(self, forward_batch: Any, tables: Any, slot_map: Tensor | None) -> None:
        size = forward_batch.batch_size
        fill_branches(
            self.passes.req_to_token,
            forward_batch.req_pool_indices[:size],
            forward_batch.seq_lens[:size],
            self.topk,
            self.passes.page_size,
            tables,
            slot_map,
        )

    def _lengths(self, forward_batch: Any) -> list[tuple[int, ...] | None]:
        """Return the rows' lengths in each step on the host; None if no row plans with them."""
        known = self.passes.lengths_host(forward_batch, ForwardMode.DRAFT_DECODE)
        ends = range(1, len(self.attn_backends) + 1)
        if known is None:
            return [None for _ in ends]
        return [tuple(n + end for n in known for _ in range(self.topk)) for end in ends]

    def _batches(
        self, views: Mapping[str, Any], longest: int, lengths: list[tuple[int, ...] | None]
    ) -> Iterator[ForwardBatch]:
        """Yield the batch of each step."""
        rows = views["full"].lengths.shape[1]
        cu = torch.arange(rows + 1, dtype=torch.int32, device=self.passes.req_to_token.device)
        for step, host in enumerate(lengths):
            yield ForwardBatch(
                forward_mode=ForwardMode.DRAFT_DECODE,
                cu_seqlens_q=cu,
                positions=views["full"].positions[step],
                max_q_len=1,
                views={
                    name: CacheView(
                        page_table=branches.page_table,
                        seq_lens=branches.lengths[step],
                        out_cache_loc=branches.slots[step],
                        max_seq_len=longest,
                        seq_lens_host=host,
                    )
                    for name, branches in views.items()
                },
                query_lens_host=(1,) * rows,
            )
