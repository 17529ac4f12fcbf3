"""One case of linear attention as data: passes over the states of alike layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from attn_core.runtime.batch import ForwardMode
from attn_core.spec.kinds import Kind, Phase
from attn_core.spec.requirements import LayerRequirements, Requirements, Speculation
from attn_core.testing.cases import Parents
from attn_core.testing.strides import Strides

GateName = Literal["softplus", "bounded", "neg_eigval"]


@dataclass(frozen=True, kw_only=True)
class LinearPass:
    """One pass of B requests: its mode, its lengths and its slots, as in ForwardBatch.

    query_lens: new tokens per request.
    slots: where each request reads its state, -1 is padding.
    slots_out: where it writes it; None is where it has read it.
    fresh: the requests that start from zeros.
    checkpoint_slots: a slot per chunk of 64 tokens, -1 is nowhere; None saves nothing.
    trees: the parents of each request's drafts; in a verify pass None is a chain.
    accepted: the last accepted draft of each request, -1 is none; None commits nothing.
    device_lengths: no lengths on the host.
    """

    mode: ForwardMode
    query_lens: tuple[int, ...]
    slots: tuple[int, ...]
    slots_out: tuple[int, ...] | None = None
    fresh: tuple[int, ...] = ()
    checkpoint_slots: tuple[int, ...] | None = None
    trees: tuple[Parents, ...] | None = None
    accepted: tuple[int, ...] | None = None
    device_lengths: bool = False

    @property
    def writes(self) -> tuple[int, ...]:
        """The slot that each request writes."""
        return self.slots if self.slots_out is None else self.slots_out

    @property
    def drafts(self) -> int:
        """Draft tokens per request of a verify pass, else 0."""
        return self.query_lens[0] if self.mode is ForwardMode.TARGET_VERIFY else 0

    @property
    def topk(self) -> int:
        """The speculation that this pass needs: 0 none, 1 a chain, more a tree of drafts."""
        if self.trees is None:
            return min(self.drafts, 1)
        return max(2, *(max(Counter(t).values()) for t in self.trees))

    def parents(self, request: int) -> Parents | None:
        """Return the tree of a request; None is a chain."""
        return None if self.trees is None else self.trees[request]


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """Passes one after another over the states of alike layers.

    heads = (Hk, Hv), dims = (K, V): a row that lacks them gets its own, unless `fixed` names them.
    num_slots: slot 0 and the last one belong to nobody unless a pass names them.
    gate: None hands in log decay and beta. qk_norm: q and k are not normalised. scale_by multiplies
    the scale of K ** -0.5.
    decay: the largest log decay of a token without a gate, negated; with constant_decay that of
    every token. near_equal_keys: and beta near 1, the worst that a triangular system can meet.
    strides: of the inputs. pages: states lie in an engine's pages, other numbers between them.
    all_states: run with every dtype of states, not with the finest alone.
    """

    feature: str
    passes: tuple[LinearPass, ...]
    kind: Kind = "gdn"
    heads: tuple[int, int] = (2, 6)
    dims: tuple[int, int] = (32, 48)
    fixed: frozenset[str] = frozenset()
    num_layers: int = 1
    num_slots: int = 10
    gate: GateName | None = None
    qk_norm: bool = False
    scale_by: float = 1.0
    decay: float = 1.0
    constant_decay: bool = False
    near_equal_keys: bool = False
    strides: Strides = "packed"
    pages: bool = False
    all_states: bool = False

    @property
    def modes(self) -> frozenset[ForwardMode]:
        return frozenset(p.mode for p in self.passes)

    @property
    def drafts(self) -> int:
        """The most drafts of a request."""
        return max(p.drafts for p in self.passes)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that must run it, all of them; where it only verifies, either will do."""
        modes, phases = self.modes, []
        if modes & {ForwardMode.EXTEND, ForwardMode.MIXED}:
            phases.append(Phase.PREFILL)
        if modes & {ForwardMode.DECODE, ForwardMode.MIXED}:
            phases.append(Phase.DECODE)
        return tuple(phases) or (Phase.PREFILL, Phase.DECODE)

    @property
    def every_phase(self) -> bool:
        return self.modes != {ForwardMode.TARGET_VERIFY}

    @property
    def cells(self) -> frozenset[str]:
        """The cells of the support matrix that this case is evidence for."""
        modes = self.modes
        covers = {
            "prefill": bool(modes & {ForwardMode.EXTEND, ForwardMode.MIXED}),
            "decode": bool(modes & {ForwardMode.DECODE, ForwardMode.MIXED}),
            "target_verify": ForwardMode.TARGET_VERIFY in modes,
        }
        return frozenset(cell for cell, is_it in covers.items() if is_it)

    def needs(self, dtype: str, *, deterministic: bool = False) -> Requirements:
        """Return what a row must declare to be asked for this case."""
        layer = LayerRequirements(
            kind=self.kind,
            head_dim=self.dims[0],
            v_head_dim=self.dims[1],
            num_q_heads=self.heads[0],
            num_kv_heads=self.heads[1],
        )
        topk, n = max(p.topk for p in self.passes), self.drafts
        spec = Speculation(topk=topk, num_draft_tokens=n) if n else None
        return Requirements(
            layers=(layer,), dtype=dtype, speculation=spec, deterministic=deterministic
        )

    @cached_property
    def live_slots(self) -> frozenset[int]:
        """The slots that hold a state before the first pass: those read before they are written.

        Slot 0 and the last one too: a -1 that is clamped or wraps finds them.
        """
        in_use, written = {0, self.num_slots - 1}, set[int]()
        for p in self.passes:
            in_use |= {s for i, s in enumerate(p.slots) if s >= 0 and i not in p.fresh} - written
            written |= {*p.writes, *(p.checkpoint_slots or ())}
        return frozenset(in_use)


@dataclass(frozen=True, kw_only=True)
class LinearPoint:
    """Where a case is run: the dtype of its inputs and that of its states."""

    dtype: str
    state_dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}-states-{self.state_dtype}"
