"""The page size rule: a row can use a pool whose page size is a multiple of one of its sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import gcd, lcm

from attn_core.spec.capabilities import Capabilities
from attn_core.spec.requirements import Requirements


def takes_page(row: Capabilities, page_size: int) -> bool:
    """Say whether a row can use a pool of this page size: one of its sizes divides the pool's.

    In layout HND it has to be one of them: the parts of a page lie apart in each of its heads.
    """
    fits = not row.page_sizes or any(page_size % p == 0 for p in row.page_sizes)
    whole = not row.page_sizes or page_size in row.page_sizes or "NHD" in row.layouts
    return fits and whole and (row.max_page_size is None or page_size <= row.max_page_size)


def sharing(rows: Iterable[Capabilities]) -> tuple[Capabilities, ...]:
    """Return rows over one cache, each with the layouts that all of them take."""
    rows = tuple(rows)
    layouts = frozenset.intersection(*(frozenset(x.layouts) for x in rows)) if rows else frozenset()
    return tuple(row if row.layouts == layouts else replace(row, layouts=layouts) for row in rows)


def page_limit(needs: Requirements) -> int:
    """Return what every page size has to divide: the chunks of dual chunk attention; 0 = any."""
    return gcd(*(x.dual_chunk.chunk_len for x in needs.layers if x.dual_chunk is not None))


def smallest_page(rows: Iterable[Capabilities], limit: int = 0) -> int | None:
    """Return the smallest pool page that every row accepts, or None if there is none.

    limit: what the page has to divide, 0 = any.
    """
    rows, pages = sharing(rows), {1}
    for row in rows:
        pages = {lcm(p, q) for p in pages for q in (row.page_sizes or {1})}
    sizes = (p for p in pages if not limit % p and all(takes_page(row, p) for row in rows))
    return min(sizes, default=None)
