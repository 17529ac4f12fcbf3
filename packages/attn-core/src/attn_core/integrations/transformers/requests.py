"""The requests of one transformers cache: which tokens are real, which pages hold them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attn_core.allocator import PageAllocator
from attn_core.backend import Metadata
from attn_core.dispatcher import HybridDispatcher
from attn_core.errors import BatchError, UnsupportedError
from attn_core.forward import AttentionLayer, ForwardBatch, ForwardMode
from attn_core.kv_cache import copy_slots
from attn_core.page_table import num_pages_for, pad_page_table

_NUMBERS = itertools.count(1)


class Memory(Protocol):
    """What the requests use of the engine that owns the pool."""

    @property
    def pages(self) -> PageAllocator: ...
    @property
    def dispatcher(self) -> HybridDispatcher: ...
    @property
    def layers(self) -> tuple[AttentionLayer, ...]: ...
    @property
    def device(self) -> torch.device: ...
    def reserve(self, pages: int) -> None: ...  # make sure that so many pages are free, or raise


@dataclass(frozen=True, eq=False)
class _Pass:
    """One forward pass: planned once, used by every layer."""

    batch: ForwardBatch | None  # None: nothing but padding
    metadata: Metadata
    real: Tensor | None  # int64 [N]: the real ones among the B · T tokens, None where all are
    lens: list[int]
    seen: Tensor


def _release(pages: PageAllocator, keys: list[str]) -> None:
    for key in keys:
        if key in pages:
            pages.release(key)
    keys.clear()


class Requests:
    """The rows of one cache, each a request; padding is no part of any.

    Pages go back when the requests are released or garbage, whichever is first.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.first_layer_id = memory.layers[0].layer_id
        self._keys: list[str] = []  # the allocator's name of each row; changed in place only
        self._lens: list[int] = []
        self._seen = torch.zeros(0, 0, dtype=torch.bool)  # [B, columns] on the host, True = real
        self._pass: _Pass | None = None
        weakref.finalize(self, _release, memory.pages, self._keys).atexit = False

    @property
    def columns(self) -> int:
        """Columns of the rectangle that transformers sees, padding included."""
        return self._seen.shape[1]

    @property
    def batch_size(self) -> int:
        return len(self._keys)

    @property
    def in_pass(self) -> bool:
        """Whether the enabled model is in the middle of a forward pass over these requests."""
        return self._pass is not None

    def belong_to(self, memory: Memory) -> bool:
        """Say whether these requests lie in the pool of `memory`."""
        return self._memory is memory

    def _new_key(self) -> str:
        return f"request {next(_NUMBERS)}"  # a text, because messages name it

    def release(self) -> None:
        """Give all pages back and forget all tokens."""
        _release(self._memory.pages, self._keys)
        self._lens, self._seen = [], torch.zeros(0, 0, dtype=torch.bool)

    def begin(self, batch_size: int, num_tokens: int, mask: Tensor | None) -> None:
        """Plan a pass of `num_tokens` new columns in each of `batch_size` rows.

        mask: [batch_size, columns + num_tokens], non-zero = real, or None: all are. Nothing counts
        as seen before `commit`. Raises BatchError where it does not go on from what was seen,
        OutOfPagesError.
        """
        pages = self._memory.pages
        new = self._new_tokens(batch_size, num_tokens, mask)
        if not self._keys:
            self._keys += [self._new_key() for _ in range(batch_size)]
            for key in self._keys:
                pages.grow(key, 0)
            self._lens = [0] * batch_size
            self._seen = torch.zeros(batch_size, 0, dtype=torch.bool)
        counts: list[int] = new.sum(1).tolist()
        lens = [have + n for have, n in zip(self._lens, counts, strict=True)]
        self._memory.reserve(
            sum(
                max(0, num_pages_for(n, pages.page_size) - len(pages.pages(key)))
                for key, n in zip(self._keys, lens, strict=True)
            )
        )
        tables = [pages.grow(key, n) for key, n in zip(self._keys, lens, strict=True)]
        rows = [i for i, n in enumerate(counts) if n]
        seen = torch.cat([self._seen, new], 1)
        if not rows:
            self._pass = _Pass(None, None, None, lens, seen)
            return
        decodes = num_tokens == 1 and all(self._lens[i] for i in rows)
        batch = ForwardBatch.build(
            ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
            query_lens=[counts[i] for i in rows],
            seq_lens=[lens[i] for i in rows],
            page_table=pad_page_table([tables[i] for i in rows], device=self._memory.device),
            page_size=pages.page_size,
        )
        metadata = self._memory.dispatcher.init_forward_metadata(batch)
        real = None if bool(new.all()) else new.flatten().nonzero()[:, 0].to(self._memory.device)
        self._pass = _Pass(batch, metadata, real, lens, seen)

    def _new_tokens(self, batch_size: int, num_tokens: int, mask: Tensor | None) -> Tensor:
        if self._keys and batch_size != self.batch_size:
            raise BatchError(f"{batch_size} rows for a cache of {self.batch_size}")
        if mask is None:
            return torch.ones(batch_size, num_tokens, dtype=torch.bool)
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
        self._lens, self._seen, self._pass = self._pass.lens, self._pass.seen, None

    def abandon(self) -> None:
        """Forget a pass that failed: what it wrote lies behind every length."""
        self._pass = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        """Write and attend for one layer: [B, H, T, D] each → [B, T, Hq, Dv], padding 0."""
        current = self._pass
        assert current is not None  # update() of the same layer looked
        b, hq, t, _ = query.shape
        shape = (b * t, hq, layer.v_head_dim)
        if current.batch is None:
            return query.new_zeros(shape).view(b, t, hq, layer.v_head_dim)

        def ragged(x: Tensor) -> Tensor:
            x = x.transpose(1, 2).flatten(0, 1)
            return x if current.real is None else x[current.real]

        out = self._memory.dispatcher.forward(
            ragged(query), ragged(key), ragged(value), layer, current.batch, current.metadata
        )
        assert isinstance(out, Tensor)  # no LSE was asked for
        if current.real is not None:
            out = out.new_zeros(shape).index_copy_(0, current.real, out)
        return out.view(b, t, hq, layer.v_head_dim)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove columns. Raises UnsupportedError for a positive one."""
        if tokens_to_remove > 0:
            raise UnsupportedError(
                f"crop({tokens_to_remove}): a length is deprecated in transformers; pass the "
                f"number of tokens to remove as a negative number"
            )
        if tokens_to_remove and self._keys:
            seen = self._seen[:, : max(0, self.columns + tokens_to_remove)]
            self._rebuild(list(range(self.batch_size)), seen.sum(1).tolist())
            self._seen = seen

    def choose(self, sources: Sequence[int]) -> None:
        """Let row i go on from what row sources[i] holds; rows may repeat or vanish."""
        if self._keys:
            self._rebuild(sources, [self._lens[i] for i in sources])
            self._seen = self._seen[list(sources)]

    def _rebuild(self, sources: Sequence[int], lens: Sequence[int]) -> None:
        """Make row i the first lens[i] tokens of row sources[i]; all or nothing.

        Whole pages are shared. The page that will be written next is never shared: it stays with
        the first row that takes all of its source and is copied for the others.
        """
        pages, size = self._memory.pages, self._memory.pages.page_size
        keys, fresh, kept = [], [], set()
        src: list[int] = []
        dst: list[int] = []
        for source, length in zip(sources, lens, strict=True):
            if length == self._lens[source] and source not in kept:
                kept.add(source)
                keys.append(self._keys[source])
                continue
            keys.append(self._new_key())
            fresh.append((keys[-1], source, length))
        self._memory.reserve(sum(1 for _, _, length in fresh if length % size))
        for key, source, length in fresh:
            reused = pages.share(key, self._keys[source], length)
            old, new = pages.pages(self._keys[source]), pages.grow(key, length)
            for position in range(reused, length):
                page, offset = divmod(position, size)
                src.append(old[page] * size + offset)
                dst.append(new[page] * size + offset)
        if src:
            device = self._memory.device
            a, b = torch.tensor(src, device=device), torch.tensor(dst, device=device)
            for layer in self._memory.layers:
                copy_slots(self._memory.dispatcher.caches.layer(layer.layer_id), a, b)
        for source, key in enumerate(self._keys):
            if source not in kept:
                pages.release(key)
        self._keys[:] = keys
        self._lens = list(lens)
