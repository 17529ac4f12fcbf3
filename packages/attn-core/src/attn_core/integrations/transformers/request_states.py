"""The states of one cache's requests: where a pass reads and writes them, and how to go back."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_core.errors import UnsupportedError
from attn_core.integrations.transformers.passes import Part
from attn_core.integrations.transformers.states import NUM_DRAFTS, States
from attn_core.ops.conv import ConvPlan, conv_commit
from attn_core.runtime.backend import Metadata
from attn_core.runtime.batch import ForwardBatch, ForwardMode, SpecInfo
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.linear_routes import HybridMetadata

_STEPS = 32  # recorded steps that are kept without a crop; each holds a slot of every row
_RECORD = "call activate_past_recording() of the cache before the tokens come"


@dataclass(eq=False)
class _Step:
    """A recorded pass or part of one: each of its rows wrote another slot than it read.

    before, counts: the tokens of each row before it and in it.
    drafts: the part whose tokens were verified as drafts; some of them can be taken back, once
    they are committed. None: all of them or none.
    """

    rows: list[int]
    before: list[int]
    counts: list[int]
    drafts: Part | None = None
    committed: bool = False


class RequestStates:
    """The slots of the rows of one cache; slots go back when these are released or garbage.

    A row without tokens has no slot, one with tokens has one that each pass overwrites. After
    `record`, a pass writes new slots and leaves the old ones, until the next crop. So a row can go
    back to where a pass began, and within the last tokens of a pass by the records of its drafts.
    """

    def __init__(self, states: States, dispatcher: HybridDispatcher) -> None:
        self._states, self._dispatcher = states, dispatcher
        self._slots: list[list[int]] = []  # of each row, the newest last; changed in place only
        self._steps: list[_Step] = []
        self._records = False
        self._new: list[_Step] = []  # of the pass that is planned
        self._fresh: list[int] = []  # its rows that had no slot
        self._overwrites = False  # it writes a state that it has read
        self._plan: tuple[list[int], list[int], list[int]] = ([], [], [])
        weakref.finalize(self, states.dropped.append, self._slots).atexit = False

    @property
    def can_go_back(self) -> bool:
        """Whether `record` makes crops possible."""
        return self._states.can_verify

    def record(self) -> None:
        """Keep what the next passes start from. Raises UnsupportedError, OutOfPagesError."""
        self._states.keep_records()
        self._records = True

    def begin(self, rows: list[int], counts: list[int], lens: Sequence[int]) -> dict[str, Any]:
        """Return the slots of a pass, as fields of ForwardBatch.

        rows: those with new tokens. counts: how many each has. lens: what every row of the cache
        holds before. Raises OutOfPagesError.
        """
        if not self._slots:
            self._slots += [[] for _ in lens]
        past_lens = [lens[i] for i in rows]
        self._plan = (rows, past_lens, counts)
        if self._records:
            self._keep(lens)
            if len(self._steps) >= _STEPS:
                self._forget()
            if max(counts) > 1:  # parts() has the slots
                return {"state_slots": self._tensor([-1] * len(rows))}
            self._new.append(_Step(rows, past_lens, counts))
            return self._push(rows)
        self._fresh = [i for i in rows if not self._slots[i]]
        self._overwrites = len(self._fresh) < len(rows)
        fresh = [not self._slots[i] for i in rows]
        for i, slot in zip(self._fresh, self._states.take(len(self._fresh)), strict=True):
            self._slots[i].append(slot)
        return self._fields([self._slots[i][-1] for i in rows], None, fresh)

    def parts(
        self, batch: ForwardBatch, metadata: Metadata, valid: Tensor | None
    ) -> tuple[Part, ...]:
        """Return how linear layers run the pass of `batch`; valid: as of Pass."""
        rows, past_lens, counts = self._plan
        if not self._records or max(counts) == 1:
            return (Part(batch, metadata, ConvPlan(batch, self._states.pool), valid),)
        n = min(NUM_DRAFTS, *counts)
        ends = list(itertools.accumulate(counts))
        tokens = torch.arange(ends[-1], device="cpu") if valid is None else valid.cpu()
        longer = [j for j, count in enumerate(counts) if count > n]
        parts = []
        if longer:
            heads = [tokens[ends[j] - counts[j] : ends[j] - n] for j in longer]
            step = _Step(
                [rows[j] for j in longer],
                [past_lens[j] for j in longer],
                [counts[j] - n for j in longer],
            )
            parts.append(self._part(step, ForwardMode.EXTEND, torch.cat(heads)))
        offsets = [start + count - n for start, count in zip(past_lens, counts, strict=True)]
        step = _Step(rows, offsets, [n] * len(rows))
        tails = torch.cat([tokens[end - n : end] for end in ends])
        step.drafts = self._part(step, ForwardMode.TARGET_VERIFY, tails)
        return (*parts, step.drafts)

    def _part(self, step: _Step, mode: ForwardMode, index: Tensor) -> Part:
        counts, device = step.counts, self._states.device
        positions = [
            torch.arange(b, b + n, device="cpu") for b, n in zip(step.before, counts, strict=True)
        ]
        self._new.append(step)
        verifies = mode is ForwardMode.TARGET_VERIFY
        batch = ForwardBatch(
            forward_mode=mode,
            cu_seqlens_q=self._tensor([0, *itertools.accumulate(counts)]),
            positions=torch.cat(positions).to(device),
            max_q_len=max(counts),
            spec=SpecInfo(topk=1, num_draft_tokens=counts[0]) if verifies else None,
            query_lens_host=tuple(counts),
            **self._push(step.rows),
        )
        metadata = HybridMetadata(None, self._states.routes.plan(batch))
        return Part(batch, metadata, ConvPlan(batch, self._states.pool), index.to(device))

    def commit(self) -> None:
        """Count the planned pass as run."""
        self._steps += self._new
        self._new, self._fresh, self._overwrites = [], [], False

    def abandon(self) -> bool:
        """Forget the planned pass, if any; False if it has overwritten states."""
        intact = not self._overwrites
        for i in (*self._fresh, *(i for step in self._new for i in step.rows)):
            self._states.give_back([self._slots[i].pop()])
        self._new, self._fresh, self._overwrites = [], [], False
        return intact

    def check_crop(self, lens: Sequence[int], new_lens: Sequence[int]) -> None:
        """Refuse to go back from lens[i] to after[i] tokens where nothing is kept for it."""
        first = list(lens)
        complete = True
        for step in reversed(self._steps):
            for i, past_len, count in zip(step.rows, step.before, step.counts, strict=True):
                first[i] = past_len
                complete &= step.drafts is not None or not past_len < new_lens[i] < past_len + count
        if complete and all(b <= a for b, a in zip(first, new_lens, strict=True)):
            return
        num_cropped = max(a - b for a, b in zip(lens, new_lens, strict=True))
        limit = f"the last {NUM_DRAFTS} of a pass can be" if self._records else "none was recorded"
        raise UnsupportedError(
            f"a crop of {num_cropped} tokens: linear layers keep one state for all of them, and "
            f"{limit} taken back; {'draft fewer tokens' if self._records else _RECORD}"
        )

    def crop(self, new_lens: Sequence[int]) -> None:
        """Go back to after[i] tokens in each row, which check_crop allows."""
        self._keep(new_lens)
        self._forget()

    def choose(self, sources: Sequence[int], lens: Sequence[int]) -> None:
        """Let row i go on from what row sources[i] holds; lens: what every row holds."""
        if not self._slots:  # nothing but padding so far
            return
        self._keep(lens)
        self._forget()
        chosen: list[list[int]] = []
        copies: list[tuple[int, int]] = []
        for i, source in enumerate(sources):
            slots = self._slots[source]
            if source in sources[:i]:  # a list of its own, also where padding has no slot
                new_slots = self._states.take(len(slots))
                copies += zip(slots, new_slots, strict=True)
                slots = new_slots
            chosen.append(slots)
        self._states.release([x for i, x in enumerate(self._slots) if i not in sources])
        self._states.copy(copies)
        self._slots[:] = chosen

    def reserve(self, sources: Sequence[int]) -> None:
        """Make sure that there are slots for `choose`. Raises OutOfPagesError."""
        self._states.reserve(len(sources) - len(set(sources)))

    def release(self) -> None:
        """Give all slots back."""
        self._states.release(self._slots)
        self._steps.clear()

    def _keep(self, lens: Sequence[int]) -> None:
        """Undo what lies behind lens[i] tokens of each row; commit the other drafts."""
        for step in reversed(self._steps):
            steps = [
                min(max(lens[i] - past_len, 0), count)
                for i, past_len, count in zip(step.rows, step.before, step.counts, strict=True)
            ]
            for i, n in zip(step.rows, steps, strict=True):
                if not n:
                    self._states.give_back([self._slots[i].pop()])
            if step.drafts is not None and (steps != step.counts or not step.committed):
                part, accepted = step.drafts, torch.tensor(steps, device=self._states.device) - 1
                self._dispatcher.commit(part.batch, part.metadata, accepted)
                conv_commit(self._states.pool, part.conv, accepted)
                step.committed = True

    def _forget(self) -> None:
        """Give back what earlier passes started from."""
        for slots in self._slots:
            self._states.give_back(slots[:-1])
            del slots[:-1]
        self._steps.clear()

    def _push(self, rows: Sequence[int]) -> dict[str, Any]:
        """Give rows a new slot each; return what reads their last one and writes the new one."""
        new = self._states.take(len(rows))
        old = [self._slots[i][-1:] for i in rows]
        for i, slot in zip(rows, new, strict=True):
            self._slots[i].append(slot)
        reads = [x[0] if x else slot for x, slot in zip(old, new, strict=True)]
        return self._fields(reads, new, [not x for x in old])

    def _fields(
        self, reads: list[int], writes: list[int] | None, fresh: list[bool]
    ) -> dict[str, Any]:
        fields = {"state_slots": self._tensor(reads)}
        if writes is not None:
            fields["state_slots_out"] = self._tensor(writes)
        if any(fresh):
            fields["state_fresh"] = torch.tensor(fresh, device=self._states.device)
        return fields

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self._states.device)
