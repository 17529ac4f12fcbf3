"""The data of one forward pass: its mode, its ragged batch and its speculation."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attn_core.errors import BatchError
from attn_core.runtime.batch_checks import (
    check_instance,
    check_number,
    check_starts,
    check_states,
    check_tensor,
    integers,
)
from attn_core.runtime.cache_view import CacheView as CacheView
from attn_core.runtime.cache_view import positions_of


class ForwardMode(enum.Enum):
    """The kind of a forward pass."""

    EXTEND = "extend"  # new tokens of one or more requests, with or without a cached prefix
    DECODE = "decode"  # one token per request
    MIXED = "mixed"  # extend and decode rows in one batch
    TARGET_VERIFY = "target_verify"  # the target model scores n draft tokens per request
    DRAFT_DECODE = "draft_decode"  # the draft model proposes: B·topk plain decode rows
    DRAFT_EXTEND = "draft_extend"  # the draft model takes in accepted tokens
    IDLE = "idle"  # no tokens: a rank that only keeps step
    __hash__ = object.__hash__  # Enum's own is a call in Python, and every layer looks a mode up


DECODE_MODES = frozenset({ForwardMode.DECODE, ForwardMode.DRAFT_DECODE})
EVEN_MODES = DECODE_MODES | {ForwardMode.TARGET_VERIFY}  # as many queries for every request


@dataclass(frozen=True, kw_only=True, eq=False)
class SpecInfo:
    """Speculation of one TARGET_VERIFY pass.

    tree_mask: bool [B, n, n], n = num_draft_tokens; mask[b, i, j] = query i sees draft j. Every
    query sees the prefix. None means a chain: query i sees drafts 0..i. Drafts may be in any order:
    the position of a draft is the prefix length plus the number of other drafts that it sees.
    Raises BatchError for numbers that are no integers of 0 or more.
    """

    topk: int
    num_draft_tokens: int
    tree_mask: Tensor | None = None

    def __post_init__(self) -> None:
        check_number("topk", self.topk)
        check_number("num_draft_tokens", self.num_draft_tokens)
        mask = self.tree_mask
        if mask is not None and not isinstance(mask, Tensor):
            raise BatchError(
                f"tree_mask is {type(mask).__name__} (expected a tensor of bool, or None)"
            )

    def check_tree(self, b: int, device: torch.device) -> None:
        """Raise BatchError for a tree_mask that is not bool [B, n, n] on the batch's device."""
        n, mask = self.num_draft_tokens, self.tree_mask
        if mask is not None:
            check_tensor("tree_mask", mask, torch.bool, (b, n, n))
            if mask.device != device:
                raise BatchError(f"tree_mask on {mask.device} (expected {device}, of the batch)")

    @property
    def depth(self) -> Tensor | None:
        """The other drafts that each draft sees, int64 [B, n]; None without a tree_mask."""
        mask = self.tree_mask
        return None if mask is None else mask.sum(-1) - mask.diagonal(dim1=-2, dim2=-1).long()


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch:
    """One forward pass over B requests with T query tokens, validated once, at construction.

    cu_seqlens_q: int32 [B + 1]. positions: int64 [T]. max_q_len: the longest query.
    views: "full", "window", "cross" … → CacheView; a layer names its view.
    state_slots: int32 [B], where linear layers read the state of each request; -1 = padding, which
    is neither read nor written, in every mode and by every kernel.
    state_slots_out: int32 [B], where they write it and the records of drafts; None = state_slots.
    It is -1 where state_slots is. No slot is written by two requests, or read by one and written by
    another.
    state_fresh: bool [B], the requests that start from zeros, whatever their slot holds; None = no.
    checkpoint_slots: int32 [chunks], where an extend also writes the state after each chunk of 64
    of a request's new tokens, -1 = nowhere. The chunks of all requests are packed; the last one of
    a request may be shorter.
    query_lens_host: [B], on the host.
    spec: only for TARGET_VERIFY; no other mode accepts a tree_mask.
    All tensors are contiguous. Values are checked only against the host copies, so construction
    never syncs with a device.
    """

    forward_mode: ForwardMode
    cu_seqlens_q: Tensor
    positions: Tensor
    max_q_len: int
    views: Mapping[str, CacheView] = field(default_factory=dict)
    spec: SpecInfo | None = None
    state_slots: Tensor | None = None
    query_lens_host: tuple[int, ...] | None = None
    state_slots_out: Tensor | None = None
    state_fresh: Tensor | None = None
    checkpoint_slots: Tensor | None = None

    @property
    def batch_size(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    @cached_property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @cached_property
    def known(self) -> dict[Hashable, Any]:
        """What a layer's tensors were found to be: those of others are compared with them."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "known"}

    def __post_init__(self) -> None:
        mode = self.forward_mode
        check_instance("forward_mode", mode, ForwardMode)
        check_tensor("cu_seqlens_q", self.cu_seqlens_q, torch.int32, (None,))
        check_tensor("positions", self.positions, torch.int64, (None,))
        check_number("max_q_len", self.max_q_len)
        b, t = self.batch_size, self.num_tokens
        if b < 0:
            raise BatchError("cu_seqlens_q is empty (expected B + 1 entries)")
        if self.spec is not None:
            check_instance("spec", self.spec, SpecInfo)
        devices = {str(x.device) for x in (self.cu_seqlens_q, self.positions)}
        check_instance("views", self.views, Mapping)
        for name, view in self.views.items():
            if not isinstance(view, CacheView):
                raise BatchError(f"view {name!r} is {type(view).__name__} (expected CacheView)")
            rows = view.page_table.shape[0]
            if rows != b:
                raise BatchError(f"view {name!r} has {rows} requests, the batch {b}")
            devices.add(str(view.page_table.device))
        devices |= check_states(
            b, self.state_slots, self.state_slots_out, self.state_fresh, self.checkpoint_slots,
            self.query_lens_host,
        )  # fmt: skip
        extends = mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
        if self.checkpoint_slots is not None and not extends:
            raise BatchError(
                f"{mode.value} with checkpoint_slots (only extend and mixed take them)"
            )
        if len(devices) > 1:
            raise BatchError(f"a batch on several devices: {sorted(devices)}")
        if mode is ForwardMode.IDLE and t:
            raise BatchError(f"an idle pass with {t} tokens")
        if mode in DECODE_MODES and t != b:
            raise BatchError(f"{mode.value}: {t} tokens for {b} requests (one each)")
        self._check_spec(b)
        self._check_host_lengths(b, t)
        check_starts("cu_seqlens_q", self.cu_seqlens_q, t, self.query_lens_host)

    def _check_host_lengths(self, b: int, t: int) -> None:
        lens, mode, most = self.query_lens_host, self.forward_mode, self.max_q_len
        if lens is not None:
            integers("query_lens_host", lens[:1])
        if lens is None:
            if t > b * most:
                raise BatchError(f"{t} tokens of {b} requests: more than max_q_len {most} each")
        else:
            if len(lens) != b:
                raise BatchError(f"query_lens_host has {len(lens)} lengths for {b} requests")
            if sum(lens) != t:
                raise BatchError(f"query lengths add up to {sum(lens)}, positions hold {t}")
            low, top = min(lens, default=0), max(lens, default=0)
            if low < 0:
                raise BatchError(f"negative length {low} in query_lens_host")
            if top > most:
                raise BatchError(f"max_q_len {most} is below {top}")
            if mode in DECODE_MODES and top > 1:
                raise BatchError(f"{mode.value} of {top} tokens (one each)")
        views = ((n, v) for n, v in self.views.items() if n != "cross")  # of an encoder's lengths
        known = {n: v.seq_lens_host for n, v in views if v.seq_lens_host}
        for name, keys in known.items():
            short = [i for i, (q, s) in enumerate(zip(lens or (), keys, strict=False)) if s < q]
            if lens and short:
                q, s = lens[short[0]], keys[short[0]]
                raise BatchError(f"view {name!r}, request {short[0]}: length {s} < its {q} queries")
        if len(set(map(tuple, known.values()))) > 1:
            raise BatchError(f"views of one batch with different lengths: {known}")

    def _check_spec(self, b: int) -> None:
        mode, spec = self.forward_mode, self.spec
        if mode is not ForwardMode.TARGET_VERIFY:
            if spec is not None and spec.tree_mask is not None:
                raise BatchError(f"{mode.value} with a tree_mask (only target_verify takes one)")
            return
        if spec is None:
            raise BatchError("target_verify without spec (SpecInfo)")
        n, mask = spec.num_draft_tokens, spec.tree_mask
        if self.num_tokens != b * n:
            raise BatchError(f"{self.num_tokens} tokens for {b} requests of {n} drafts")
        if any(q != n for q in self.query_lens_host or ()):
            raise BatchError(
                f"query_lens_host has other lengths than {n}, the drafts of each request"
            )
        if spec.topk != 1 and mask is None:
            raise BatchError(f"topk {spec.topk} without a tree_mask")
        spec.check_tree(b, self.positions.device)

    @classmethod
    def build(
        cls,
        forward_mode: ForwardMode,
        *,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        page_table: Tensor,
        page_size: int,
        spec: SpecInfo | None = None,
        views: Mapping[str, CacheView] | None = None,
        state_slots: Tensor | None = None,
        state_slots_out: Tensor | None = None,
        state_fresh: Tensor | None = None,
        checkpoint_slots: Tensor | None = None,
        writes: bool = True,
    ) -> ForwardBatch:
        """Build a batch from ragged lengths.

        query_lens, seq_lens: B ints each; seq_lens includes this pass's tokens.
        page_table: int32 [B, max_pages] of the view "full"; `views` adds more views. It is complete
        when the pass is planned, because a plan may name pages.
        writes: False if the engine writes the K/V of "full" itself.
        Positions count up to the sequence length; in a tree they are prefix + depth. Raises
        BatchError.
        """
        check_tensor("page_table", page_table, torch.int32, (None, None), rows=True)
        device = page_table.device
        query_lens, seq_lens = integers("query lengths", query_lens), integers("lengths", seq_lens)
        full = CacheView.build(
            page_table=page_table, page_size=page_size, seq_lens=seq_lens, new_lens=query_lens,
            writes=writes,
        )  # fmt: skip
        verified = spec if forward_mode is ForwardMode.TARGET_VERIFY else None
        if verified is not None:
            check_instance("spec", verified, SpecInfo)
            verified.check_tree(len(seq_lens), device)
        depth = None if verified is None else verified.depth
        if verified is not None and depth is not None:
            prefix = torch.tensor(
                [s - verified.num_draft_tokens for s in seq_lens], dtype=torch.int64, device=device
            )
            positions = (prefix[:, None] + depth).reshape(-1)
        else:
            positions = positions_of(seq_lens, query_lens).to(device)
        return cls(
            forward_mode=forward_mode,
            cu_seqlens_q=torch.tensor([0, *query_lens], device="cpu")
            .cumsum(0, dtype=torch.int32)
            .to(device),
            positions=positions,
            max_q_len=max(query_lens, default=0),
            views={"full": full, **(views or {})},
            spec=spec,
            state_slots=state_slots,
            state_slots_out=state_slots_out,
            state_fresh=state_fresh,
            checkpoint_slots=checkpoint_slots,
            query_lens_host=query_lens,
        )
