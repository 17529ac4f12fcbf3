"""Who owns which pages: keys grow and are released, so pages cannot leak or be freed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from attn_core.cache.page_table import num_pages_for, reusable_prefix
from attn_core.errors import OutOfPagesError, UsageError


class PageAllocator:
    """Hands out the pages 1 .. num_pages - 1; page 0 is the dummy and never handed out.

    Callers hold keys (a request's id), not pages: a key's pages are asked with `pages`. Several
    keys may share the whole pages of a common prefix; a page is free when its last key lets go.
    A key is as long as `grow` or `share` last said, so a page that is still filled is never shared.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise UsageError(f"num_pages {num_pages}, page_size {page_size} (expected 1 or more)")
        self.page_size = page_size
        self.total = num_pages - 1
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: low pages first
        self._pages: dict[Hashable, list[int]] = {}  # 0 = behind the window, given back
        self._lengths: dict[Hashable, int] = {}  # tokens; a key may hold pages beyond them
        self._owners: Counter[int] = Counter()  # page → keys that hold it

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Distinct pages that some key holds."""
        return len(self._owners)

    def extend(self, num_pages: int) -> None:
        """Take in a pool that has grown to `num_pages`; pages that are held keep their numbers.

        Raises UsageError for a smaller pool.
        """
        if num_pages <= self.total:
            raise UsageError(f"a pool of {self.total + 1} pages cannot shrink to {num_pages}")
        self._free[:0] = range(num_pages - 1, self.total, -1)  # low pages first, as before
        self.total = num_pages - 1

    def __contains__(self, key: Hashable) -> bool:
        return key in self._pages

    def pages(self, key: Hashable) -> list[int]:
        """Return a key's pages in order, its row of the page table. Raises UsageError."""
        return list(self._pages_of(key))

    def grow(self, key: Hashable, length: int) -> list[int]:
        """Make `key` `length` tokens long, give it pages for them and return its pages, in order.

        A new key is taken in; pages that are there stay, whatever the length. All or nothing:
        OutOfPagesError changes nothing. Raises UsageError for a negative length.
        """
        _refuse_negative(key, length)
        pages = self._pages.get(key, [])
        num_new = max(0, num_pages_for(length, self.page_size) - len(pages))
        if num_new > len(self._free):
            raise OutOfPagesError(
                f"{key!r} asked for {num_new} more pages ({length} tokens in pages of "
                f"{self.page_size}), {len(self._free)} of {self.total} are free; release a "
                "request or create a pool with more pages"
            )
        fresh = [self._free.pop() for _ in range(num_new)]
        self._owners.update(fresh)
        self._pages[key], self._lengths[key] = [*pages, *fresh], length
        return self.pages(key)

    def share(self, key: Hashable, from_key: Hashable, tokens: int, *, behind: int = 0) -> int:
        """Start a new key on the first `tokens` tokens of another; return how many it reuses.

        Whole pages only (reusable_prefix): the rest is computed anew, in pages of its own that
        `grow` adds. behind: the new key's window begins at this token, so pages that lie before it
        may have been given back. Raises UsageError for a negative number, where `key` exists, and
        where `from_key` is shorter or gave pages that are not behind back.
        """
        _refuse_negative(key, tokens)
        if key in self._pages:
            raise UsageError(f"{key!r} holds pages already; share starts a new key")
        reused = reusable_prefix(tokens, self.page_size)
        prefix = self._pages_of(from_key)[: reused // self.page_size]
        lost, have = 0 in prefix[max(behind, 0) // self.page_size :], self._lengths[from_key]
        if tokens > have or lost:
            why = "gave some of them back" if lost else f"has {have}"
            raise UsageError(f"{key!r} asked to share {tokens} tokens, {from_key!r} {why}")
        self._owners.update(filter(None, prefix))
        self._pages[key], self._lengths[key] = list(prefix), reused
        return reused

    def release_before(self, key: Hashable, position: int) -> None:
        """Give back the whole pages that lie before token `position`, behind a sliding window.

        Their entries become the dummy page 0, so later pages keep their place.
        """
        pages = self._pages_of(key)
        behind = min(max(position, 0) // self.page_size, len(pages))
        self._let_go(pages[:behind])
        pages[:behind] = [0] * behind

    def release(self, key: Hashable) -> None:
        """Give all pages of a key back and forget the key. Raises UsageError for an unknown one."""
        self._let_go(self._pages_of(key))
        del self._pages[key], self._lengths[key]

    def _pages_of(self, key: Hashable) -> list[int]:
        try:
            return self._pages[key]
        except KeyError:
            raise UsageError(
                f"{key!r} holds no pages: never grown or shared, or released ({len(self._pages)} "
                "keys do)"
            ) from None

    def _let_go(self, pages: list[int]) -> None:
        for page in filter(None, pages):  # 0 was given back before
            self._owners[page] -= 1
            if not self._owners[page]:
                del self._owners[page]
                self._free.append(page)


def _refuse_negative(key: Hashable, tokens: int) -> None:
    if tokens < 0:
        raise UsageError(f"{key!r} asked for {tokens} tokens (expected 0 or more)")
