"""vLLM's passes as attn-core's batches: views of vLLM's tensors, planned once per pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_core.errors import UnsupportedError
from attn_core.runtime.backend import Metadata
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.layer import AttentionLayer
from attn_core.selection.result import Selection


class Part(NamedTuple):
    """Requests of a pass that run together.

    tokens: their rows of the pass. batch, plan: what the dispatcher takes.
    """

    tokens: slice
    batch: ForwardBatch
    plan: Metadata

    def new_keys(
        self, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return what the pass has of these rows, in the cache already, for prompts.

        Kernels of prompts without a prefix read them in place of pages.
        """
        if key is None or value is None or self.batch.forward_mode is not ForwardMode.EXTEND:
            return None, None
        return key[self.tokens], value[self.tokens]


class Pass(NamedTuple):
    """A planned pass of the layers of one KV-cache group, whose metadata vLLM hands to each."""

    dispatcher: HybridDispatcher
    layers: Mapping[str, AttentionLayer]
    parts: tuple[Part, ...]


class PassBuilder:
    """Plans passes of layers that share a block table.

    create: makes the dispatcher, once vLLM has bound the caches.
    drafts: the tokens of a request in a verify pass; 0 without speculation.
    max_bs: requests of a captured pass, at most. max_num_tokens: tokens of any pass, at most.
    """

    def __init__(
        self,
        create: Callable[[], HybridDispatcher],
        selection: Selection,
        *,
        device: torch.device,
        page_size: int,
        drafts: int,
        max_bs: int,
        max_num_tokens: int,
    ) -> None:
        self._create = create
        self._dispatcher: HybridDispatcher | None = None
        self.page_size, self.drafts = page_size, drafts
        self.roles = selection.roles
        self.host_lengths = any(x.row.needs_host_lengths for x in self.roles.values())
        self._limits = (max_bs, max_bs * max(drafts, 1))
        # vLLM does not name the positions of every pass; of chains attn-core reads none
        self._positions = torch.arange(max_num_tokens, device=device)
        self._first = torch.arange(max_num_tokens + 1, dtype=torch.int32, device=device)
        self._starts: dict[int, Tensor] = {}  # cu_seqlens_q, by the queries of each request
        self._captured: dict[tuple[int, ...], Metadata] = {}

    @property
    def dispatcher(self) -> HybridDispatcher:
        """The dispatcher over the bound caches."""
        if self._dispatcher is None:
            self._dispatcher = self._create()
        return self._dispatcher

    def is_even(self, common: Any, requests: int, tokens: int) -> bool:
        """Say whether a pass's first tokens are decode, or verification, of its first requests.

        As many tokens as requests do not say so: requests without tokens may pad a pass, and then
        the first one has more than its share.
        """
        queries, rest = divmod(tokens, requests) if requests else (0, 0)
        if rest or not queries or queries not in (1, self.drafts):
            return False
        return int(common.query_start_loc_cpu[1]) == queries

    def even(self, common: Any, requests: int, tokens: int) -> Part:
        """Plan decode or verification of a pass's first requests.

        Once a pass of as many requests and tokens was captured, all such passes over the same
        tensors refill its plan: vLLM does not say which of them a graph replays.
        """
        plan = self._captured.get(_memory(common, requests, tokens))
        batch = self._even_batch(common, requests, tokens, captured=plan is not None)
        if plan is None:
            plan = self.dispatcher.init_forward_metadata(batch)
        else:
            self.dispatcher.init_forward_metadata_replay_cuda_graph(batch, plan)
        return Part(slice(0, tokens), batch, plan)

    def capture(self, common: Any) -> Part:
        """Plan a pass that a graph captures; one of the same tensors keeps the first one's plan."""
        requests, tokens = common.num_reqs, common.num_actual_tokens
        if not self.is_even(common, requests, tokens):
            raise UnsupportedError(
                f"a captured pass of {tokens} tokens of {requests} requests on attn_core, which "
                "captures decode and verification; choose a cudagraph_mode of FULL_DECODE_ONLY, "
                "FULL_AND_PIECEWISE or PIECEWISE"
            )
        key = _memory(common, requests, tokens)
        if key in self._captured:
            return self.even(common, requests, tokens)
        if not self._captured:
            self.dispatcher.init_cuda_graph_state(*self._limits)
        batch = self._even_batch(common, requests, tokens, captured=True)
        plan = self.dispatcher.init_forward_metadata_capture_cuda_graph(batch)
        self._captured[key] = plan
        return Part(slice(0, tokens), batch, plan)

    def ragged(self, common: Any, rows: slice) -> Part:
        """Plan prefill of some of a pass's requests."""
        starts = common.query_start_loc_cpu[rows.start : rows.stop + 1].tolist()
        host = tuple(end - start for start, end in pairwise(starts))
        tokens = slice(starts[0], starts[-1])
        cu_seqlens = common.query_start_loc[rows.start : rows.stop + 1]
        if tokens.start:
            cu_seqlens = cu_seqlens - tokens.start
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            cu_seqlens_q=cu_seqlens,
            positions=self._positions_of(common, tokens),
            max_q_len=max(host),
            views={"full": self._prompts(common, rows, host)},
            query_lens_host=host,
        )
        return Part(tokens, batch, self.dispatcher.init_forward_metadata(batch))

    def _even_batch(
        self, common: Any, requests: int, tokens: int, *, captured: bool
    ) -> ForwardBatch:
        queries = tokens // requests
        lengths = (queries,) * requests
        verifies = queries > 1
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY if verifies else ForwardMode.DECODE,
            cu_seqlens_q=self._even_starts(requests, queries),
            positions=self._positions_of(common, slice(0, tokens)),
            max_q_len=queries,
            views={"full": self._view(common, slice(0, requests), lengths, captured=captured)},
            spec=SpecInfo(topk=1, num_draft_tokens=queries) if verifies else None,
            query_lens_host=lengths if self.host_lengths else None,
        )

    def _even_starts(self, requests: int, queries: int) -> Tensor:
        """Return cu_seqlens_q, with as many queries for the requests that only pad a pass."""
        starts = self._starts.get(queries)
        if starts is None:
            starts = self._first[::queries].contiguous()
            self._starts[queries] = starts
        return starts[: requests + 1]

    def _positions_of(self, common: Any, tokens: slice) -> Tensor:
        positions: Tensor | None = common.positions
        if positions is None or positions.dim() != 1:
            positions = self._positions
        return positions[tokens]

    def _view(
        self, common: Any, rows: slice, queries: tuple[int, ...], *, captured: bool = False
    ) -> CacheView:
        """captured: of a pass that serves every length that its table has columns for."""
        table = common.block_table_tensor[rows]
        return CacheView(
            page_table=table,
            seq_lens=common.seq_lens[rows],
            out_cache_loc=None,  # vLLM's layers write before they attend
            max_seq_len=table.shape[1] * self.page_size if captured else common.max_seq_len,
            seq_lens_host=self._lengths_host(common, rows, queries) if self.host_lengths else None,
        )

    def _prompts(self, common: Any, rows: slice, queries: tuple[int, ...]) -> CacheView:
        """Return the view of a prefill, with its lengths if no request has a prefix.

        No request is longer than vLLM's bound, nor shorter than its queries: where the two are
        equal, so is the length, and nothing is read from the device.
        """
        bound = common.seq_lens_cpu_upper_bound
        if bound is None or tuple(bound[rows].tolist()) != queries:
            return self._view(common, rows, queries)
        return replace(self._view(common, rows, queries), seq_lens_host=queries)

    def _lengths_host(self, common: Any, rows: slice, queries: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths on the host, those of padded requests as long as their queries."""
        bound = common.seq_lens_cpu_upper_bound
        exact = bound if bound is not None and not self.drafts else common.seq_lens.cpu()
        return tuple(max(n, q) for n, q in zip(exact[rows].tolist(), queries, strict=True))


def _memory(common: Any, requests: int, tokens: int) -> tuple[int, ...]:
    """Return what a graph keeps of a pass: its size, and where the engine's tensors lie."""
    table = common.block_table_tensor
    return requests, tokens, table.data_ptr(), table.shape[1], common.seq_lens.data_ptr()


def check_pass(common: Any, common_prefix_len: int = 0) -> None:
    """Raise UnsupportedError for a pass that no plan of attn-core serves."""
    if common.causal is not True:
        raise UnsupportedError(
            "a pass of vLLM that is not causal on attn_core; use another --attention-backend for "
            "this model, or for its draft model"
        )
    if common_prefix_len:
        raise UnsupportedError(
            f"cascade attention over {common_prefix_len} tokens on attn_core; set "
            "disable_cascade_attn"
        )
