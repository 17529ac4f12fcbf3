"""EAGLE's draft decode: several steps of a draft model, planned at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from attn_core.cache.page_table import num_pages_for
from attn_core.integrations.sglang.backend import AttnCoreBackend
from attn_core.integrations.sglang.page_tables import Branches, fill_branches
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode


class DraftDecodeBackend:
    """Serves the decode steps of a draft model; SGLang runs step i on `attn_backends[i]`.

    Each of a request's topk branches is a decode row with a page table of its own: the request's
    tokens, then the branch's drafts. All steps share the table, and step i ends after draft i.

    backend: of the draft model, whose choice all steps share. topk: branches of a request. steps:
    forward passes between two verifications. A layer's keys and values lie where SGLang put them.
    """

    def __init__(self, backend: AttnCoreBackend, topk: int, steps: int) -> None:
        self.attn_backends = [backend, *(backend.another() for _ in range(steps - 1))]
        self.topk = topk
        self.passes = backend.passes
        self.needs_cpu_seq_lens = backend.needs_cpu_seq_lens
        self.max_context_len = backend.max_context_len
        self._static: dict[str, Branches] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan steps that no graph replays."""
        rows = forward_batch.batch_size * self.topk
        longest = self.passes.longest(forward_batch, len(self.attn_backends))
        views = {name: self._branches(rows, longest) for name in self.passes.views()}
        self._fill(forward_batch, views)
        batches = self._batches(views, longest, self._lengths(forward_batch))
        for backend, batch in zip(self.attn_backends, batches, strict=True):
            backend.plan(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Create the buffers of captured steps; a request has topk tokens in each."""
        rows = max_bs * self.topk
        views = self.passes.views()
        self._static = {name: self._branches(rows, self.max_context_len) for name in views}
        for backend in self.attn_backends:
            backend.dispatcher.init_cuda_graph_state(rows, rows)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan the steps to be captured, or refill what the captured ones point at."""
        rows = forward_batch.batch_size * self.topk
        views = {name: branches.first(rows) for name, branches in self._static.items()}
        self._fill(forward_batch, views)
        lengths = self._lengths(forward_batch)
        if in_capture:
            batches = self._batches(views, self.max_context_len, lengths)
            for backend, batch in zip(self.attn_backends, batches, strict=True):
                backend.capture(batch)
            return
        for backend, host in zip(self.attn_backends, lengths, strict=True):
            backend.replay(backend.captured(ForwardMode.DRAFT_DECODE, rows, host))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Do nothing: the graph reads buffers that are filled before it runs."""

    def _branches(self, rows: int, longest: int) -> Branches:
        pages = num_pages_for(longest, self.passes.page_size)
        device = self.passes.req_to_token.device
        return Branches.create(rows, pages, len(self.attn_backends), device)

    def _fill(self, forward_batch: Any, views: Mapping[str, Branches]) -> None:
        size = forward_batch.batch_size
        for name, branches in views.items():
            fill_branches(
                self.passes.req_to_token,
                forward_batch.req_pool_indices[:size],
                forward_batch.seq_lens[:size],
                self.topk,
                self.passes.page_size,
                branches,
                self.passes.slot_map(name),
            )

    def _lengths(self, forward_batch: Any) -> list[tuple[int, ...] | None]:
        """Return the branches' lengths in each step on the host; None if no row plans with them."""
        known = self.passes.lengths_host(forward_batch, ForwardMode.DRAFT_DECODE)
        ends = range(1, len(self.attn_backends) + 1)
        if known is None:
            return [None for _ in ends]
        return [tuple(n + end for n in known for _ in range(self.topk)) for end in ends]

    def _batches(
        self, views: Mapping[str, Branches], longest: int, lengths: list[tuple[int, ...] | None]
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
