"""The pages of one model: its pool, the owners of its pages, and growth on demand."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from attn_core.cache.allocator import PageAllocator
from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.cache.page_table import num_pages_for
from attn_core.cache.pool import IndexDtype, KVPool
from attn_core.errors import OutOfPagesError, UnsupportedError, UsageError
from attn_core.integrations.transformers.architectures import ModelAttention
from attn_core.integrations.transformers.passes import Pass
from attn_core.integrations.transformers.states import States
from attn_core.ops.kv import copy_slots
from attn_core.plugins.registry import Registry
from attn_core.runtime.dispatcher import HybridDispatcher
from attn_core.runtime.torch_ops import numbered
from attn_core.selection.result import Selection

_SLACK = 256  # tokens: what a view that grows on demand adds beyond the need


class PagedCache:
    """A KV pool, a PageAllocator for each view of it, and the dispatcher that attends over it.

    windows: view → the longest window of its layers, None where they see everything. A request
    has one key, in every view. num_pages: pages of each view, the dummy page 0 included; None
    grows on demand. Raises UsageError for a selection that is not for such layers, and what
    creating the backends raises.

    lock: held for a whole pass and for every change of a cache, because the pool, its pages and the
    backends' workspaces are one for all threads.
    """

    def __init__(
        self,
        attention: ModelAttention,
        selection: Selection,
        registry: Registry,
        *,
        dtype: str,
        device: torch.device,
        num_pages: int | Mapping[str, int] | None,
    ) -> None:
        if selection.page_size is None:
            raise UsageError("the selection has no page size: it chose no backend")
        if selection.requirements.dtype != dtype:
            raise UsageError(
                f"the selection is for a model in {selection.requirements.dtype}, this one is in "
                f"{dtype}; select again with select_for()"
            )
        kind = attention.kind
        chosen = {selection.roles[role].row.kind for role in ("prefill", "decode")}
        if chosen != {kind}:
            raise UsageError(
                f"the selection is for {', '.join(sorted(chosen))}, the model is {kind}"
            )
        self.selection, self.device, self.page_size = selection, device, selection.page_size
        writes = selection.roles["prefill"].row.fused_kv_write  # while it attends: no row may wait
        self.shares_prompts = selection.requirements.shared_prefix and not writes
        self.layers, self.linear_layers = attention.layers, attention.linear_layers
        self.kind, self.rotary, self._dtype = kind, attention.rotary, dtype
        self._indexers = attention.indexers
        self.windows: dict[str, int | None] = {}
        for x in self.layers:
            window = self.windows.get(x.view)
            self.windows[x.view] = max(window or 0, x.sliding_window or 0) or None
        self.lock = threading.RLock()
        # Keys of caches that became garbage. A finalizer may run in any thread and in the middle of
        # a pass, so it only leaves the keys here.
        self.dropped: deque[list[str]] = deque()
        self._grows = num_pages is None
        self.number = numbered(self)  # by which a compiled model finds this
        self._by_id = {x.layer_id: x for x in self.layers}
        self._linear_by_id = {
            x.layer_id: (x, m.conv1d)
            for x, m in zip(self.linear_layers, attention.linear_modules, strict=True)
        }
        self.running: Pass | None = None
        sizes = _sizes(self.windows, num_pages)
        self.pool = self._pool(sizes)  # first: a number that is too large for the memory ends here
        self.pages = {view: PageAllocator(n, self.page_size) for view, n in sizes.items()}
        self.dispatcher = HybridDispatcher.from_selection(
            selection,
            registry,
            self.layers,
            self.pool,
            vision_layers=attention.vision_layers,
            adaptive=True,
        )
        self.states: States | None = None
        if self.linear_layers:
            self.states = States(attention, selection, registry, dtype=dtype, device=device)
            self.dispatcher.linear = self.states.routes

    def check_model(self, model: Any) -> None:
        """Refuse a model whose weights have another dtype or device by now."""
        expected = (TORCH_DTYPES[self._dtype], self.device)
        if (model.dtype, model.device) != expected:
            raise UnsupportedError(
                f"a model in {model.dtype} on {model.device}, attn-core was enabled for "
                f"{expected[0]} on {expected[1]}; call disable() of its handle and enable() again"
            )

    def attend_into(
        self, out: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, layer_id: int
    ) -> None:
        """Run a layer of the current pass for a compiled model.

        q, k, v: those of Pass.attend, or qkv, f and b of Pass.attend_linear. For `out` of int32
        they are those of Pass.choose.
        """
        assert self.running is not None  # `current` of the requests
        assert k is not None
        if out.dtype == torch.int32:
            assert v is not None
            out.copy_(self.running.choose(q, k, v, self._by_id[layer_id]))
        elif layer_id in self._by_id:
            out.copy_(self.running.attend(q, k, v, self._by_id[layer_id]))
        else:
            assert v is not None
            layer, conv = self._linear_by_id[layer_id]
            out.copy_(self.running.attend_linear(q, k, v, layer, conv))

    @property
    def num_held(self) -> int:
        """Pages that some request holds, of all views together."""
        self.collect()
        return sum(pages.num_held for pages in self.pages.values())

    def start(
        self, keys: Sequence[str], lens: Sequence[int], prompts: Sequence[tuple[int, int]]
    ) -> None:
        """Give every key pages for lens[i] new tokens; all or nothing.

        prompts: for each key an earlier one and the first tokens whose pages it takes from that.
        """
        size, rows = self.page_size, range(len(keys))
        new = sum(num_pages_for(n, size) for n in lens) - sum(n // size for _, n in prompts)
        for pages in self.pages.values():
            for key in keys:  # of a first pass that failed
                if key in pages:
                    pages.release(key)
                pages.grow(key, 0)
        self.reserve(dict.fromkeys(self.pages, new))
        for pages in self.pages.values():
            for i in rows:
                source, shared = prompts[i]
                if shared:
                    pages.release(keys[i])
                    pages.share(keys[i], keys[source], shared)
                pages.grow(keys[i], lens[i])

    def collect(self) -> None:
        """Give the pages of caches that became garbage back."""
        with self.lock:
            while self.dropped:
                self.release(self.dropped.popleft())

    def release(self, keys: list[str]) -> None:
        """Give all pages of some requests back and empty the list of their keys."""
        with self.lock:
            for key in keys:
                for pages in self.pages.values():
                    if key in pages:
                        pages.release(key)
            keys.clear()

    def reserve(self, new_pages: Mapping[str, int]) -> None:
        """Make sure that so many pages of each view are free.

        Raises OutOfPagesError and changes nothing.
        """
        self.collect()
        missing = {v: n - self.pages[v].num_free for v, n in new_pages.items()}
        short = [view for view, n in missing.items() if n > 0]
        if short and not self._grows:
            view, pages = short[0], self.pages[short[0]]
            view_text = f' of view "{view}"' if len(self.pages) > 1 else ""
            raise OutOfPagesError(
                f"{new_pages[view]} more pages of {self.page_size} tokens{view_text} are asked, "
                f"{pages.num_free} of {pages.total} are free; drop a cache, ask for fewer tokens "
                "or give more with num_pages"
            )
        if short:
            self._grow({view: missing[view] for view in short})

    def _grow(self, missing: Mapping[str, int]) -> None:
        slack = num_pages_for(_SLACK, self.page_size)
        sizes = {view: pages.total + 1 for view, pages in self.pages.items()}
        for view, n in missing.items():
            sizes[view] += max(n, self.pages[view].total) + slack
        pool, old = self._pool(sizes), self.pool
        for layer in self.layers:
            num_pages = self.pages[layer.view].total + 1
            parts = zip(
                pool.layer(layer.layer_id).parts(), old.layer(layer.layer_id).parts(), strict=True
            )
            for (target, _), (part, _) in parts:
                target[:num_pages] = part
        self.pool = self.dispatcher.caches = pool
        for view in missing:
            self.pages[view].extend(sizes[view])

    def behind(self, view: str, length: int) -> int:
        """Return the first token that the token after the first `length` sees in a view."""
        window = self.windows[view]
        return 0 if window is None else max(0, length - window + 1)

    def check_past(self, key: str, length: int, cached: int) -> None:
        """Refuse to go back from `cached` tokens to a length whose window has lost pages."""
        for view, pages in self.pages.items():
            first = self.behind(view, length) // self.page_size
            if 0 in pages.pages(key)[first : num_pages_for(length, self.page_size)]:
                raise UnsupportedError(
                    f"a crop to {length} of {cached} tokens: the pages behind the window of "
                    f"{self.windows[view]} were given back; call activate_past_recording() of the "
                    "cache before the tokens come"
                )

    def trim(self, key: str, length: int) -> None:
        """Give back the pages that the token after the first `length` does not see."""
        for view, window in self.windows.items():
            if window is not None:
                self.pages[view].release_before(key, self.behind(view, length))

    def copy(self, view: str, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy tokens between slots of a view, in all its layers."""
        if src:
            a, b = (torch.tensor(slots, device=self.device) for slots in (src, dst))
            for layer in self.layers:
                if layer.view == view:
                    copy_slots(self.dispatcher.caches.layer(layer.layer_id), a, b)

    def _pool(self, num_pages: Mapping[str, int]) -> KVPool:
        try:
            return KVPool(
                self.layers,
                num_pages=num_pages,
                page_size=self.page_size,
                kv_cache_dtype=self.selection.kv_cache_dtype,
                device=self.device,
                kind=self.kind,
                layout=self.selection.layout,
                index_dim=next((x.head_dim for x in self._indexers.values()), 0),
                index_dtype=cast(IndexDtype, self._dtype),  # as its own cache
                index_layers=self._indexers.keys(),
            )
        except (RuntimeError, MemoryError, OverflowError) as error:  # torch has no class of its own
            message = str(error).partition("\n")[0][:300]
            raise OutOfPagesError(
                f"a pool of {max(num_pages.values())} pages of {self.page_size} tokens does not "
                f"fit on {self.device} ({message}); drop a cache, ask for fewer tokens or a "
                "smaller kv_cache_dtype"
            ) from error


def _sizes(
    views: Mapping[str, object], num_pages: int | Mapping[str, int] | None
) -> dict[str, int]:
    if not isinstance(num_pages, Mapping):
        return dict.fromkeys(views, 1 if num_pages is None else num_pages)
    if num_pages.keys() != views.keys():
        raise UsageError(
            f"num_pages for the views {sorted(num_pages)} (the model has {sorted(views)})"
        )
    return dict(num_pages)
