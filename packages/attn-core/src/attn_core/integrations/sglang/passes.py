"""SGLang's ForwardBatch as attn-core's, with memory that CUDA graphs can keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_core.cache.page_table import num_pages_for
from attn_core.errors import UnsupportedError
from attn_core.integrations.sglang.page_tables import Tables, fill_page_table
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode, SpecInfo

MODES: Mapping[str, ForwardMode] = {
    "EXTEND": ForwardMode.EXTEND,
    "SPLIT_PREFILL": ForwardMode.EXTEND,
    "MIXED": ForwardMode.MIXED,
    "DECODE": ForwardMode.DECODE,
    "TARGET_VERIFY": ForwardMode.TARGET_VERIFY,
    "DRAFT_EXTEND_V2": ForwardMode.DRAFT_EXTEND,
    "IDLE": ForwardMode.IDLE,
}


@dataclass(frozen=True, kw_only=True)
class StaticTables:
    """The buffers of captured passes.

    views: name → tables. tree_mask: bool [requests, n, n]. window_slots: int64 [tokens], the slots
    in the pool of the windowed layers; None where there is one pool.
    """

    views: Mapping[str, Tables]
    cu_seqlens_q: Tensor
    tree_mask: Tensor | None
    window_slots: Tensor | None


class PassBuilder:
    """Turns SGLang's passes into ForwardBatches.

    req_to_token: int32 [requests, context]. slot_map: of the windowed layers' pool, asked in every
    pass since SGLang registers it after the backend. topk, drafts: of speculation, 0 without.
    host_lengths: some chosen row plans on the host.
    """

    def __init__(
        self,
        req_to_token: Tensor,
        page_size: int,
        *,
        slot_map: Any,
        topk: int,
        drafts: int,
        host_lengths: bool,
    ) -> None:
        self.req_to_token = req_to_token
        self.page_size = page_size
        self.topk = topk
        self.drafts = drafts
        self.host_lengths = host_lengths
        self._slot_map = slot_map

    @property
    def max_context_len(self) -> int:
        """Tokens that a request can have."""
        return self.req_to_token.shape[1]

    def mode(self, engine_batch: Any) -> ForwardMode:
        """Return the mode of a pass. Raises UnsupportedError for one that is not served."""
        name = engine_batch.forward_mode.name
        if name not in MODES:
            raise UnsupportedError(
                f"a pass of SGLang's mode {name} on attn_core (serves {', '.join(MODES)}); use "
                "another --attention-backend"
            )
        return MODES[name]

    def queries_per_request(self, mode: ForwardMode) -> int:
        """Return how many queries each request has; 0: each has its own number."""
        if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
            return self.drafts
        return 1 if mode is ForwardMode.DECODE else 0

    def static(self, max_bs: int, max_num_tokens: int) -> StaticTables:
        """Create the buffers of captured passes of up to `max_bs` requests."""
        device = self.req_to_token.device
        queries = max_num_tokens // max_bs
        views = {name: self._tables(max_bs, self.max_context_len) for name in self.views()}
        mask = None
        if queries > 1 and self.topk > 1:  # eager passes of more requests use the mask too
            chain = torch.ones(queries, queries, dtype=torch.bool, device=device).tril()
            mask = chain.expand(self.req_to_token.shape[0], queries, queries).contiguous()
        cu = torch.arange(0, max_num_tokens + 1, queries, dtype=torch.int32, device=device)
        slots = None
        if "window" in views:
            slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        return StaticTables(views=views, cu_seqlens_q=cu, tree_mask=mask, window_slots=slots)

    def eager(
        self, engine_batch: Any, mode: ForwardMode, static: StaticTables | None = None
    ) -> ForwardBatch:
        """Return the batch of a pass that no graph replays, in memory of its own.

        static: whose tree mask SGLang may have filled for this pass too.
        """
        size, queries = engine_batch.batch_size, self.queries_per_request(mode)
        if mode is ForwardMode.DRAFT_EXTEND:
            queries = 0  # all drafts of a request, accepted or not; SGLang says how many
        longest = self.longest(engine_batch, queries if mode is ForwardMode.TARGET_VERIFY else 0)
        views = {name: self._tables(size, longest) for name in self.views()}
        self._fill(engine_batch, mode, views)
        device = self.req_to_token.device
        if queries:
            cu = torch.arange(0, size * queries + 1, queries, dtype=torch.int32, device=device)
            max_q_len, tokens = queries, size * queries
            host = (queries,) * size
        else:
            counts = engine_batch.extend_seq_lens.int()
            cu = pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
            known = engine_batch.extend_seq_lens_cpu
            host = tuple(int(n) for n in (counts.tolist() if known is None else known))
            max_q_len, tokens = max(host, default=0), sum(host)
        tree = None
        if mode is ForwardMode.TARGET_VERIFY:
            tree = self._tree(engine_batch, None if static is None else static.tree_mask)
        slots = self._window_slots(engine_batch, tokens)
        return self._batch(
            engine_batch, mode, views, cu, max_q_len, tokens, longest, tree, host, slots
        )

    def captured(self, engine_batch: Any, mode: ForwardMode, static: StaticTables) -> ForwardBatch:
        """Return the batch of a pass in the static buffers, filled for this pass."""
        size, queries = engine_batch.batch_size, self.queries_per_request(mode)
        views, slots = self._fill_static(engine_batch, mode, static)
        mask = None
        if mode is ForwardMode.TARGET_VERIFY and static.tree_mask is not None:
            mask = static.tree_mask[:size]
        return self._batch(
            engine_batch,
            mode,
            views,
            static.cu_seqlens_q[: size + 1],
            queries,
            size * queries,
            self.max_context_len,
            mask,
            (queries,) * size if self.host_lengths else None,
            slots,
        )

    def refill(self, engine_batch: Any, mode: ForwardMode, static: StaticTables) -> None:
        """Fill the static buffers for a replay: lengths, page tables and the tree mask."""
        self._fill_static(engine_batch, mode, static)
        if mode is ForwardMode.TARGET_VERIFY and static.tree_mask is not None:
            tree = self._tree(engine_batch, static.tree_mask)
            if tree is not None and tree.data_ptr() != static.tree_mask.data_ptr():
                static.tree_mask[: tree.shape[0]].copy_(tree)  # else SGLang filled ours itself

    def views(self) -> tuple[str, ...]:
        """Return the names of a batch's views."""
        return ("full",) if self._slot_map() is None else ("full", "window")

    def slot_map(self, view: str) -> Tensor | None:
        """Return slot → slot of a view's pool; None where they are the same."""
        slots: Tensor | None = self._slot_map() if view == "window" else None
        return slots

    def _tables(self, size: int, longest: int) -> Tables:
        device, columns = self.req_to_token.device, num_pages_for(longest, self.page_size)
        return Tables(
            page_table=torch.zeros(size, columns, dtype=torch.int32, device=device),
            lengths=torch.ones(size, dtype=torch.int32, device=device),
        )

    def longest(self, engine_batch: Any, new_tokens: int) -> int:
        """Return the longest length of a pass, or a bound where only the device knows."""
        lengths = engine_batch.seq_lens_cpu
        if lengths is None or not len(lengths):
            return self.max_context_len
        return min(int(lengths.max()) + new_tokens, self.max_context_len)

    def lengths_host(self, engine_batch: Any, mode: ForwardMode) -> tuple[int, ...] | None:
        """Return the lengths of a pass on the host; None if no row plans with them."""
        lengths = engine_batch.seq_lens_cpu if self.host_lengths else None
        if lengths is None:
            return None
        new_tokens = self.drafts if mode is ForwardMode.TARGET_VERIFY else 0
        return tuple(int(n) + new_tokens for n in lengths[: engine_batch.batch_size])

    def _fill(self, engine_batch: Any, mode: ForwardMode, views: Mapping[str, Tables]) -> None:
        new_tokens = self.drafts if mode is ForwardMode.TARGET_VERIFY else 0
        size = engine_batch.batch_size  # SGLang's graphs of draft extend hand over whole buffers
        for name, tables in views.items():
            fill_page_table(
                self.req_to_token,
                engine_batch.req_pool_indices[:size],
                engine_batch.seq_lens[:size],
                new_tokens,
                self.page_size,
                tables.page_table,
                tables.lengths,
                self.slot_map(name),
            )

    def _fill_static(
        self, engine_batch: Any, mode: ForwardMode, static: StaticTables
    ) -> tuple[dict[str, Tables], Tensor | None]:
        """Fill the static tables and window slots of a pass, and return its rows of them."""
        size = engine_batch.batch_size
        views = {name: tables.rows(size) for name, tables in static.views.items()}
        self._fill(engine_batch, mode, views)
        tokens = size * self.queries_per_request(mode)
        return views, self._window_slots(engine_batch, tokens, static)

    def _window_slots(
        self, engine_batch: Any, num_tokens: int, static: StaticTables | None = None
    ) -> Tensor | None:
        """Return the new tokens' slots in the pool of the windowed layers, in static memory."""
        slot_map = self._slot_map()
        if slot_map is None:
            return None
        slots: Tensor = slot_map[engine_batch.out_cache_loc[:num_tokens].long()].long()
        slots = pad(slots, (0, num_tokens - len(slots)))  # padded requests write the dummy slot
        if static is None or static.window_slots is None:
            return slots
        return static.window_slots[:num_tokens].copy_(slots)

    def _tree(self, engine_batch: Any, static: Tensor | None = None) -> Tensor | None:
        """Return the mask of the drafts, bool [B, n, n]; None is a chain."""
        n = self.drafts
        mask: Tensor | None = engine_batch.spec_info.custom_mask
        if mask is None or self.topk == 1:
            return None
        requests = engine_batch.batch_size
        if static is not None and mask.data_ptr() == static.data_ptr():
            return static[:requests]
        if mask.numel() % n**2 or mask.numel() > requests * n**2:
            raise UnsupportedError(
                f"a tree mask of {mask.numel()} values for {requests} requests of {n} drafts "
                f"(expected {requests * n**2}): SGLang built it over the context; attn-core's hook "
                "was not applied"
            )
        trees = mask.view(-1, n, n)
        if len(trees) == requests:
            return trees
        chains = torch.ones(n, n, dtype=torch.bool, device=mask.device).tril()
        padding = chains.expand(requests - len(trees), n, n)  # of data parallelism and graphs
        return torch.cat([trees, padding])

    def _batch(
        self,
        engine_batch: Any,
        mode: ForwardMode,
        tables: Mapping[str, Tables],
        cu_seqlens_q: Tensor,
        max_q_len: int,
        num_tokens: int,
        longest: int,
        tree: Tensor | None,
        query_lens: tuple[int, ...] | None,
        window_slots: Tensor | None,
    ) -> ForwardBatch:
        slots = engine_batch.out_cache_loc[:num_tokens].long()
        host = self.lengths_host(engine_batch, mode)
        views = {
            name: CacheView(
                page_table=part.page_table,
                seq_lens=part.lengths,
                out_cache_loc=slots if name == "full" else window_slots,
                max_seq_len=longest,
                seq_lens_host=host,
            )
            for name, part in tables.items()
        }
        spec = None
        if mode is ForwardMode.TARGET_VERIFY:
            topk = 1 if tree is None else self.topk
            spec = SpecInfo(topk=topk, num_draft_tokens=self.drafts, tree_mask=tree)
        return ForwardBatch(
            forward_mode=mode,
            cu_seqlens_q=cu_seqlens_q,
            positions=engine_batch.positions[:num_tokens].long(),
            max_q_len=max_q_len,
            views=views,
            spec=spec,
            query_lens_host=query_lens,
        )
