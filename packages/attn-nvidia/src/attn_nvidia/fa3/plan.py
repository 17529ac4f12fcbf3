"""Plans of fa3: the calls of one pass, with all of their arguments that no layer changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from attn_core import (
    TORCH_DTYPES,
    BackendConfig,
    CacheView,
    ForwardBatch,
    ForwardMode,
    LayerGroup,
    SpecInfo,
)
from torch import Tensor

from attn_nvidia.common.tree_page_table import seen_slots
from attn_nvidia.fa3.library import Library

NO_WINDOW: Final = (-1, -1)


class CallGroup(NamedTuple):
    """What of a layer decides its plan: the kernel's tiles depend on a soft cap too."""

    layer: LayerGroup
    capped: bool


class Call(NamedTuple):
    """One call over the cache: the arguments that all layers of a kind share.

    tokens: the page table names single tokens. last: the call that counts the sinks. rotation: of
    the three queries of dual chunk attention, the one that this call takes.
    """

    arguments: dict[str, Any]
    rotation: int = 0
    tokens: bool = False
    last: bool = True


Plan = tuple[Call, ...]  # the results of several calls are merged
Plans = Mapping[CallGroup, Plan]


def window_of(window: int | None) -> tuple[int, int]:
    """Return a window of W tokens as the library has it: how many before a token are seen."""
    return NO_WINDOW if window is None else (window - 1, 0)


class Planner:
    """Plans each kind of layer of a pass, without asking the device for a length."""

    def __init__(self, config: BackendConfig, library: Library) -> None:
        self.config, self._library = config, library
        self._splits = 1 if config.deterministic else 0  # 0: the library's choice
        self._counting = torch.arange(1, dtype=torch.int32, device=config.device)

    def plan(self, kind: CallGroup, batch: ForwardBatch, captured: Plan | None = None) -> Plan:
        """Return the calls of one kind, in the shapes of the plan `captured` by a graph, if any."""
        view, group = batch.views[kind.layer.view], kind.layer
        spec = batch.spec if batch.forward_mode is ForwardMode.TARGET_VERIFY else None
        if spec is None or spec.tree_mask is None or not group.causal:
            window = window_of(group.window)
            paged_inputs = (batch.cu_seqlens_q, batch.max_q_len, view.seq_lens, view.page_table)
            size = self.config.page_size
            return (
                Call(self._call(kind, *paged_inputs, size, causal=group.causal, window=window)),
            )
        return tuple(self._tree(kind, batch, view, spec, captured))

    def _tree(
        self,
        kind: CallGroup,
        batch: ForwardBatch,
        view: CacheView,
        spec: SpecInfo,
        captured: Plan | None,
    ) -> Iterator[Call]:
        assert spec.tree_mask is not None
        n, window, size = spec.num_draft_tokens, kind.layer.window, self.config.page_size
        prefix = view.seq_lens - n
        if window is None:
            paged_inputs = (batch.cu_seqlens_q, batch.max_q_len, prefix, view.page_table)
            yield Call(self._call(kind, *paged_inputs, size), last=False)
        width = n if window is None else max(n, min(window, view.max_seq_len))
        if captured is not None:  # as wide as at the capture, whose longest request is a bound
            width = captured[-1].arguments["page_table"].shape[1] - 1
        table, lengths = seen_slots(
            view.page_table, prefix, spec.tree_mask, size, window=window, width=width
        )
        tokens = batch.num_tokens
        if self._counting.shape[0] <= tokens:
            self._counting = torch.arange(
                2 * tokens + 1, dtype=torch.int32, device=self.config.device
            )
        counting = self._counting[: tokens + 1]
        yield Call(self._call(kind, counting, 1, lengths, table, 1), tokens=True)

    def _call(
        self,
        kind: CallGroup,
        cu_seqlens_q: Tensor,
        max_q: int,
        lengths: Tensor,
        page_table: Tensor,
        page_size: int,
        *,
        causal: bool = False,
        window: tuple[int, int] = NO_WINDOW,
    ) -> dict[str, Any]:
        """Return arguments of a call, with the schedule that each layer would make anew.

        Only of one query per request: sglang-kernel 0.4.5 writes out of bounds where layers share a
        schedule of several queries whose keys are split. Nor does SGLang share one for MLA.
        """
        group, schedule = kind.layer, None
        if max_q == 1 and self.config.row.kind == "mha":
            schedule = self._library.schedule(
                lengths.shape[0],
                max_q,
                page_table.shape[1] * page_size,  # what the call itself takes as the longest
                group.num_q_heads,
                group.num_kv_heads,
                group.head_dim,
                lengths,
                qkv_dtype=TORCH_DTYPES[self.config.kv_cache_dtype],
                headdim_v=group.v_head_dim,
                cu_seqlens_q=cu_seqlens_q,
                page_size=page_size,
                causal=causal,
                window_size=window,
                has_softcap=kind.capped,
                num_splits=self._splits,
            )
        return {
            "cache_seqlens": lengths,
            "page_table": page_table,
            "cu_seqlens_q": cu_seqlens_q,
            "max_seqlen_q": max_q,
            "causal": causal,
            "window_size": window,
            "num_splits": self._splits,
            "scheduler_metadata": schedule,
        }
