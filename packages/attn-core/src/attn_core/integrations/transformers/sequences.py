"""The sequences of one transformers cache: their real tokens and their pages."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_core.cache.page_table import num_pages_for, pad_page_table
from attn_core.errors import BatchError, UnsupportedError
from attn_core.integrations.transformers.common_prompts import common_prompts, written_once
from attn_core.integrations.transformers.paged_cache import PagedCache
from attn_core.integrations.transformers.passes import Pass
from attn_core.integrations.transformers.request_states import RequestStates
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode

_NUMBERS = itertools.count(1)


class Sequences:
    """The rows of one cache, each a request; padding is no part of any.

    Pages and states go back when the requests are released or garbage, whichever is first.
    """

    def __init__(self, memory: PagedCache) -> None:
        self._memory = memory
        self.first_layer_id = memory.layers[0].layer_id
        self._keys: list[str] = []  # the allocator's name of each row; changed in place only
        self._lens: list[int] = []
        # [B, columns] on the host, True = real
        self._seen = torch.zeros(0, 0, dtype=torch.bool, device="cpu")
        self._pass: Pass | None = None
        self._keeps_past = False  # pages behind the window stay until the next crop
        self._states = (
            None if memory.states is None else RequestStates(memory.states, memory.dispatcher)
        )
        self._broken = False
        weakref.finalize(self, memory.dropped.append, self._keys).atexit = False

    @property
    def columns(self) -> int:
        """Columns of the rectangle that transformers sees, padding included."""
        return self._seen.shape[1]

    @property
    def batch_size(self) -> int:
        return len(self._keys)

    @property
    def current(self) -> Pass:
        """The forward pass of the enabled model over these requests. Raises UnsupportedError."""
        if self._pass is None:
            raise UnsupportedError(
                "a paged cache outside the model that it was made for, or after disable(); start a "
                "new cache (past_key_values=None)"
            )
        return self._pass

    @property
    def pool(self) -> int:
        """The number of the pool that these requests lie in, for a compiled model."""
        return self._memory.number

    def belong_to(self, memory: PagedCache) -> bool:
        """Say whether these requests lie in the pool of `memory`."""
        return self._memory is memory

    def __reduce_ex__(self, protocol: object) -> str:
        raise UnsupportedError(
            "a paged cache cannot be copied or pickled; to go on from one prompt several times, "
            "repeat its rows with batch_repeat_interleave() or run the prompt again"
        )

    def _new_key(self) -> str:
        return f"request {next(_NUMBERS)}"  # a text, because messages name it

    def release(self) -> None:
        """Give all pages and states back and forget all tokens."""
        with self._memory.lock:
            self._memory.release(self._keys)
            if self._states is not None:
                self._states.release()
        self._lens, self._seen, self._broken = [], self._seen[:0, :0], False

    @property
    def can_crop(self) -> bool:
        """Whether a crop is possible after keep_past()."""
        return self._states is None or self._states.can_go_back

    def keep_past(self) -> None:
        """Keep pages behind the window, and states, so that the next crop may go back to them.

        Raises UnsupportedError where the backends of linear layers cannot go back.
        """
        self._keeps_past = True
        if self._states is not None:
            with self._memory.lock:
                self._states.record()

    def begin(
        self, batch_size: int, num_tokens: int, mask: Tensor | None, marks: Tensor | None = None
    ) -> None:
        """Plan a pass of `num_tokens` new columns in each of `batch_size` rows.

        mask: [batch_size, columns + num_tokens], non-zero = real, or None: all are. marks: as in
        common_prompts, where rows of a first pass may share pages. Nothing counts as seen before
        `commit`. Raises BatchError where it does not go on from what was seen, OutOfPagesError.
        """
        memory = self._memory
        if self._broken:
            raise UnsupportedError(
                "a pass over this cache failed in the middle of it, when linear layers had "
                "overwritten their states; start a new cache"
            )
        if self._states is not None:
            self._states.abandon()  # a pass that was planned and has not run
        if not self.columns and batch_size != self.batch_size:
            self.release()  # rows of a first pass that failed, or of which nothing is left
        new = self._new_tokens(batch_size, num_tokens, mask)
        if not self._keys:
            self._keys += [self._new_key() for _ in range(batch_size)]
            self._lens = [0] * batch_size
            self._seen = torch.zeros(batch_size, 0, dtype=torch.bool, device="cpu")
        counts: list[int] = new.sum(1).tolist()
        lens = [length + n for length, n in zip(self._lens, counts, strict=True)]
        if memory.rotary is not None:
            memory.rotary.refuse_parts(counts, lens, drafts=self._keeps_past)
        rows = [i for i, n in enumerate(counts) if n]
        prompts = [(i, 0) for i in range(batch_size)]
        if not any(self._lens):
            if marks is not None:
                prompts = common_prompts(marks, new, memory.page_size)
            memory.start(self._keys, lens, prompts)
        tables = self._grow(lens)
        seen = torch.cat([self._seen, new], 1)
        if not rows:
            self._pass = memory.running = Pass(memory.dispatcher, None, None, None, (), lens, seen)
            return
        queries, keys = [counts[i] for i in rows], [lens[i] for i in rows]
        views = {
            view: CacheView.build(
                page_table=pad_page_table([table[i] for i in rows], device=memory.device),
                page_size=memory.page_size,
                seq_lens=keys,
                new_lens=queries,
            )
            for view, table in tables.items()
        }
        if any(shared for _, shared in prompts):
            views = written_once(views, [lens[i] for i in rows], [prompts[i][1] for i in rows])
        decodes = num_tokens == 1 and all(self._lens[i] for i in rows)
        positions = [torch.arange(self._lens[i], lens[i], device="cpu") for i in rows]
        starts = [0, *itertools.accumulate(queries)]
        states = {} if self._states is None else self._states.begin(rows, queries, self._lens)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=memory.device),
            positions=torch.cat(positions).to(memory.device),
            max_q_len=max(queries),
            views=views,
            query_lens_host=tuple(queries),
            **states,
        )
        metadata = memory.dispatcher.init_forward_metadata(batch)
        valid = None if bool(new.all()) else new.flatten().nonzero()[:, 0].to(memory.device)
        parts = () if self._states is None else self._states.parts(batch, metadata, valid)
        self._pass = memory.running = Pass(
            memory.dispatcher, batch, metadata, valid, parts, lens, seen, memory.rotary
        )

    def _grow(self, lens: Sequence[int]) -> dict[str, list[list[int]]]:
        """Give every row room for lens[i] tokens; return the page tables of each view."""
        size, views = self._memory.page_size, self._memory.pages
        self._memory.reserve(
            {
                view: sum(
                    max(0, num_pages_for(n, size) - len(pages.pages(key)))
                    for key, n in zip(self._keys, lens, strict=True)
                )
                for view, pages in views.items()
            }
        )
        return {
            view: [pages.grow(key, n) for key, n in zip(self._keys, lens, strict=True)]
            for view, pages in views.items()
        }

    def _new_tokens(self, batch_size: int, num_tokens: int, mask: Tensor | None) -> Tensor:
        if self._keys and batch_size != self.batch_size:
            raise BatchError(f"{batch_size} rows for a cache of {self.batch_size}")
        if mask is None:
            return torch.ones(batch_size, num_tokens, dtype=torch.bool, device="cpu")
        expected = (batch_size, self.columns + num_tokens)
        if tuple(mask.shape) != expected:
            raise BatchError(f"attention_mask of shape {tuple(mask.shape)} (expected {expected})")
        host = mask.to("cpu", torch.bool)
        if self._keys and not torch.equal(host[:, : self.columns], self._seen):
            raise UnsupportedError(
                "the attention_mask differs from the one that the cached tokens were computed "
                "with; padding stays padding: start a new cache"
            )
        return host[:, self.columns :]

    def commit(self) -> None:
        """Count the tokens of the pass as seen."""
        assert self._pass is not None
        self._lens, self._seen = self._pass.lens, self._pass.seen
        self._pass = self._memory.running = None
        if self._states is not None:
            self._states.commit()
        if not self._keeps_past:
            self._trim()

    def _trim(self) -> None:
        for key, length in zip(self._keys, self._lens, strict=True):
            self._memory.trim(key, length)

    def abandon(self) -> None:
        """Forget a pass that failed: what it wrote lies behind every length.

        States that it has overwritten are lost, and with them these requests end here.
        """
        self._pass = self._memory.running = None
        if self._states is not None and not self._states.abandon():
            self._broken = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove columns.

        Raises UnsupportedError for a positive number, and where pages behind a window or states are
        needed again that are gone; keep_past() keeps them.
        """
        if tokens_to_remove > 0:
            raise UnsupportedError(
                f"crop({tokens_to_remove}): a length is deprecated in transformers; pass the "
                f"number of tokens to remove as a negative number"
            )
        with self._memory.lock:
            if tokens_to_remove and self._keys:
                seen = self._seen[:, : max(0, self.columns + tokens_to_remove)]
                lens: list[int] = seen.sum(1).tolist()
                if self._states is not None:
                    self._states.check_crop(self._lens, lens)
                self._rebuild(list(range(self.batch_size)), lens)
                self._seen = seen
            if self._states is not None:
                self._states.crop(self._lens)
            self._trim()

    def choose(self, sources: Sequence[int]) -> None:
        """Let row i go on from what row sources[i] holds; rows may repeat or vanish."""
        with self._memory.lock:
            if self._keys:
                lens = self._lens
                if self._states is not None:
                    self._states.reserve(sources)
                self._rebuild(sources, [lens[i] for i in sources])
                if self._states is not None:
                    self._states.choose(sources, lens)
                self._seen = self._seen[list(sources)]

    def _rebuild(self, sources: Sequence[int], lens: Sequence[int]) -> None:
        """Make row i the first lens[i] tokens of row sources[i]; all or nothing.

        Whole pages are shared. The page that will be written next is never shared: it stays with
        the first row that takes all of its source and is copied for the others.
        """
        memory, size = self._memory, self._memory.page_size
        for source, length in zip(sources, lens, strict=True):
            memory.check_past(self._keys[source], length, self._lens[source])
        keys, new_keys, reused_rows = [], [], set()
        for source, length in zip(sources, lens, strict=True):
            if length == self._lens[source] and source not in reused_rows:
                reused_rows.add(source)
                keys.append(self._keys[source])
                continue
            keys.append(self._new_key())
            new_keys.append((keys[-1], self._keys[source], length))
        copies = sum(1 for _, _, length in new_keys if length % size)
        memory.reserve(dict.fromkeys(memory.pages, copies))
        for view, pages in memory.pages.items():
            src: list[int] = []
            dst: list[int] = []
            for key, source_key, length in new_keys:
                reused = pages.share(key, source_key, length, behind=memory.behind(view, length))
                old, new = pages.pages(source_key), pages.grow(key, length)
                for position in range(reused, length):
                    page, offset = divmod(position, size)
                    src.append(old[page] * size + offset)
                    dst.append(new[page] * size + offset)
            memory.copy(view, src, dst)
            for i, key in enumerate(self._keys):
                if i not in reused_rows:
                    pages.release(key)
        self._keys[:] = keys
        self._lens = list(lens)
