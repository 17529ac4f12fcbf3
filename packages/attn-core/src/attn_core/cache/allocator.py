"""Page ownership by key. Keys grow and are released, so pages cannot leak or be freed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from numbers import Integral

from attn_core.cache.page_table import num_pages_for, reusable_prefix
from attn_core.errors import OutOfPagesError, UsageError
from attn_core.spec.requirements import is_count


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1. Page 0 is the dummy page and is never handed out.

    Callers hold keys, such as request ids, and `pages` returns the pages of a key. Several keys may
    share the whole pages of a common prefix; a page becomes free when its last key releases it. The
    last `grow` or `share` sets the length of a key, so a partly filled page is never shared, and a
    shared one is never written. One thread may call it at a time.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if not is_count(num_pages) or not is_count(page_size):
            raise UsageError(
                f"num_pages {num_pages!r}, page_size {page_size!r} (expected integers of 1 or more)"
            )
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
        """Number of distinct pages that keys hold."""
        return len(self._owners)

    def extend(self, num_pages: int) -> None:
        """Add the pages of a pool that has grown to `num_pages`; held pages keep their numbers.

        Raises UsageError for a smaller pool.
        """
        if not is_count(num_pages):
            raise UsageError(f"num_pages {num_pages!r} (expected an integer of 1 or more)")
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
        """Make `key` `length` tokens long, add the pages it needs, and return its pages in order.

        An unknown key is added. Existing pages are kept, even for a smaller length. Its new tokens
        are about to be written, so none of their pages may be shared, or given back. Raises
        OutOfPagesError and UsageError, which change nothing.
        """
        _refuse_negative(key, length)
        pages = self._pages.get(key, [])
        length_before = self._lengths.get(key, 0)
        written = pages[length_before // self.page_size : num_pages_for(length, self.page_size)]
        shared = [page for page in written if self._owners[page] > 1]
        if shared and length > length_before:
            raise UsageError(
                f"{key!r} would write tokens {length_before} to {length - 1} into page "
                f"{shared[0]}, which {self._owners[shared[0]]} keys share; share() its first "
                f"{length_before} tokens with a new key and release {key!r}"
            )
        if 0 in written and length > length_before:
            raise UsageError(
                f"{key!r} would write tokens {length_before} to {length - 1} into pages that it "
                "gave back in release_before(); give back only what lies before its next token's "
                "window"
            )
        num_new = max(0, num_pages_for(length, self.page_size) - len(pages))
        if num_new > len(self._free):
            raise OutOfPagesError(
                f"{key!r} asked for {num_new} more pages ({length} tokens in pages of "
                f"{self.page_size}), {len(self._free)} of {self.total} are free; release a "
                "request or create a pool with more pages"
            )
        new_pages = [self._free.pop() for _ in range(num_new)]
        self._owners.update(new_pages)
        self._pages[key], self._lengths[key] = [*pages, *new_pages], length
        return self.pages(key)

    def share(self, key: Hashable, from_key: Hashable, tokens: int, *, behind: int = 0) -> int:
        """Start a new key on the first `tokens` tokens of another; return how many it reuses.

        Only whole pages are shared (reusable_prefix). The rest is computed again, in pages that
        `grow` adds.
        behind: the first token that the new key still reads, in the window of the first token that
        it computes or that is copied into it; earlier pages may have been released.
        Raises UsageError for a negative number, if `key` exists, or if `from_key` is shorter or has
        released a page that the new key needs.
        """
        _refuse_negative(key, tokens)
        _refuse_fraction("behind", behind)
        if key in self._pages:
            raise UsageError(f"{key!r} holds pages already; share starts a new key")
        reused = reusable_prefix(tokens, self.page_size)
        prefix = self._pages_of(from_key)[: reused // self.page_size]
        released, length = 0 in prefix[max(behind, 0) // self.page_size :], self._lengths[from_key]
        if tokens > length or released:
            reason = "gave some of them back" if released else f"has {length}"
            raise UsageError(f"{key!r} asked to share {tokens} tokens, {from_key!r} {reason}")
        self._owners.update(filter(None, prefix))
        self._pages[key], self._lengths[key] = list(prefix), reused
        return reused

    def release_before(self, key: Hashable, position: int) -> None:
        """Release the whole pages before token `position`, which a sliding window no longer sees.

        Their entries become the dummy page 0, so later pages keep their index. A position below 0
        releases nothing. Raises UsageError.
        """
        _refuse_fraction("position", position)
        pages = self._pages_of(key)
        num_released = min(max(position, 0) // self.page_size, len(pages))
        self._free_pages(pages[:num_released])
        pages[:num_released] = [0] * num_released

    def release(self, key: Hashable) -> None:
        """Release all pages of a key and forget the key. Raises UsageError for an unknown key."""
        self._free_pages(self._pages_of(key))
        del self._pages[key], self._lengths[key]

    def _pages_of(self, key: Hashable) -> list[int]:
        try:
            return self._pages[key]
        except KeyError:
            raise UsageError(
                f"{key!r} holds no pages: never grown or shared, or released ({len(self._pages)} "
                "keys do)"
            ) from None

    def _free_pages(self, pages: list[int]) -> None:
        for page in filter(None, pages):  # 0 was given back before
            self._owners[page] -= 1
            if not self._owners[page]:
                del self._owners[page]
                self._free.append(page)


def _refuse_fraction(name: str, token: int) -> None:
    if not isinstance(token, Integral):
        raise UsageError(f"{name} {token!r} (expected an integer, the index of a token)")


def _refuse_negative(key: Hashable, tokens: int) -> None:
    if tokens != 0 and not is_count(tokens):
        raise UsageError(f"{key!r} asked for {tokens!r} tokens (expected an integer of 0 or more)")
