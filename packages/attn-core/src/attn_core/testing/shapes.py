"""Head counts, head dims and pages that a backend's rows declare, and cases of those shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import TypeVar

from attn_core.runtime.batch import ForwardMode
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.kinds import LATENT_KINDS, Kind
from attn_core.spec.page_size import takes_page
from attn_core.testing.cases import FINEST_FIRST, Case, RaggedCase
from attn_core.testing.inputs import Point
from attn_core.testing.pools import ORDERS

C = TypeVar("C", Case, RaggedCase)

# What is asked where a row takes any value.
_DIMS = (13, 80, 256)
_PAIRS = ((192, 128), (32, 96))
_HEADS = ((3, 3), (8, 1), (14, 2), (6, 2))
_PAGES = (1, 16, 64)


def adapted(case: C, row: Capabilities) -> C:
    """Give a case heads and dims that the row takes, where the case is not about them."""
    heads, dims = _heads(case, row), _dims(case, row)
    if (heads, dims) == (case.heads, case.dims):
        return case
    return replace(case, heads=heads, dims=dims)


def _heads(case: Case | RaggedCase, row: Capabilities) -> tuple[int, int]:
    hq, hkv = case.heads

    def fits(q: int, kv: int) -> bool:
        group_fits = not row.group_sizes or q // kv in row.group_sizes
        return q % kv == 0 and group_fits and (not row.q_heads or q in row.q_heads)

    if "heads" in case.fixed or fits(hq, hkv):
        return hq, hkv
    groups = sorted(row.group_sizes) or [hq // hkv, 2, 1]
    latent = case.kind in LATENT_KINDS and hkv == 1  # there is one latent
    for q in sorted(row.q_heads) or [groups[0] * (1 if latent else 2)]:
        for kv in [1] if latent else [q // g for g in groups if q % g == 0]:
            if fits(q, kv):
                return q, kv
    return hq, hkv


def _dims(case: Case | RaggedCase, row: Capabilities) -> tuple[int, int]:
    d, dv = case.dims
    if "dims" in case.fixed or case.kind in LATENT_KINDS:  # 576/512, and 192/128 without a cache
        return d, dv
    if not row.head_dims or d in row.head_dims:
        return d, dv
    head_dims = sorted(row.head_dims)
    nearest = next((x for x in head_dims if x >= d), head_dims[-1])
    return nearest, nearest


def _turning_points(dims: Set[int]) -> Set[int]:
    """Return few of many dims: both ends, multiples of 32, powers of two and what is beside them.

    A kernel pads a head dim to a power of two, and reads it in vectors and in blocks.
    """
    if len(dims) <= 64:
        return dims
    neighbours = {d for i in range(max(dims).bit_length()) for d in (2**i - 1, 2**i, 2**i + 1)}
    return (
        {d for d in dims if d in neighbours or d % 32 == 0}
        | {min(dims), max(dims)}
        | dims & {*_DIMS}
    )


def shape_cases(kind: Kind, rows: Sequence[Capabilities]) -> Iterator[Case]:
    """Yield a prefill and a decode per head dim, pair of dims and number of heads of the rows.

    Every declared value is asked, but of more than 64 head dims those of `_turning_points`; where a
    row takes any, a few odd ones are.
    """
    latent = kind in LATENT_KINDS
    pairs = {(d, d) for r in rows for d in _turning_points(r.head_dims)}
    if any(not r.head_dims for r in rows):
        pairs |= {(d, d) for d in _DIMS}
    for r in rows:
        pairs |= set(_PAIRS) if r.head_dim_pairs == "any" else set(r.head_dim_pairs)
    for dims in () if latent else sorted(pairs):
        name = "-".join(map(str, dims if dims[0] != dims[1] else dims[:1]))
        yield from _both(f"dim-{name}", Case, dims=dims, fixed=frozenset({"dims"}))
    heads = {(q, q // g) for r in rows for q in r.q_heads for g in r.group_sizes if q % g == 0}
    heads |= {(g * kv, kv) for r in rows if not r.q_heads for g in r.group_sizes for kv in (1, 2)}
    heads |= {(q, 1) for r in rows if not r.group_sizes for q in r.q_heads}
    if any(not r.q_heads and not r.group_sizes for r in rows):
        heads |= set(_HEADS)
    shape: dict[str, object] = {"kind": kind, "dims": (576, 512) if latent else (64, 64)}
    shape |= {"index_topk": 16} if kind == "dsa" else {}
    for hq, hkv in sorted({(q, 1 if latent else kv) for q, kv in heads}):
        yield from _both(
            f"heads-{hq}-{hkv}", Case, heads=(hq, hkv), fixed=frozenset({"heads"}), **shape
        )


def page_cases(kind: Kind, rows: Sequence[Capabilities]) -> Iterator[tuple[Case, int]]:
    """Yield, per page size p, a prefill and a decode of lengths p - 1, p, p + 1 and 2 · p.

    And of a window that leaves whole pages behind.
    """
    latent: dict[str, object] = {"kind": kind, "heads": (4, 1), "dims": (576, 512)}
    shape = latent if kind in LATENT_KINDS else {}
    shape |= {"index_topk": 16} if kind == "dsa" else {}
    for p in page_sizes(rows):
        lens = tuple(n for n in (p - 1, p, p + 1, 2 * p) if n)
        edges = Case(feature="page-edges", query_lens=(1,) * len(lens), seq_lens=lens)
        edges = replace(edges, **shape)  # type: ignore[arg-type]  # names and types are Case's
        query_lens = tuple(max(1, n - p // 2) for n in lens)
        yield replace(edges, feature="page-edges-prefill", query_lens=query_lens), p
        yield replace(edges, feature="page-edges-decode", mode=ForwardMode.DECODE), p
        if kind == "mha":
            windowed = Case(
                feature="page-window", query_lens=(2, 1), seq_lens=(4 * p + 1, 5 * p), window=p + 2
            )
            yield replace(windowed, feature="page-window-prefill"), p
            decode = replace(windowed, query_lens=(1, 1), mode=ForwardMode.DECODE)
            yield replace(decode, feature="page-window-decode"), p


def _both(name: str, make: type[Case], **shape: object) -> Iterator[Case]:
    base = make(feature=name, query_lens=(18, 1), seq_lens=(33, 17), sweep=False)
    base = replace(base, **shape)  # type: ignore[arg-type]  # names and types are Case's
    yield base
    yield replace(base, feature=f"{name}-decode", query_lens=(1, 1), mode=ForwardMode.DECODE)


def page_sizes(rows: Sequence[Capabilities]) -> list[int]:
    """List the pages to ask for: every declared one, a multiple, and some where any will do."""
    sizes = {p for r in rows for p in r.page_sizes}
    sizes |= {2 * max(r.page_sizes) for r in rows if r.page_sizes}
    if any(not r.page_sizes for r in rows):
        sizes |= set(_PAGES)
    return [p for p in sorted(sizes) if any(takes_page(r, p) for r in rows)]


def dtypes(rows: Sequence[Capabilities]) -> list[str]:
    """List the dtypes that some row takes, the finest first."""
    return [d for d in FINEST_FIRST if any(d in r.dtypes for r in rows)]


def base_point(rows: Sequence[Capabilities]) -> Point:
    """Return where a case runs when it runs once: the coarsest dtype, pages of 16 if possible."""
    pages, layouts = page_sizes(rows), {x for r in rows for x in r.layouts}
    return Point(
        dtype=dtypes(rows)[-1],
        page_size=16 if 16 in pages else pages[len(pages) // 2],
        layout="NHD" if "NHD" in layouts else min(layouts),
    )


def points(case: Case, rows: Sequence[Capabilities]) -> list[Point]:
    """List where a case runs: dtypes on the base page; with `sweep` all pages, orders, layouts."""
    base, dtypes_served = base_point(rows), dtypes(rows)
    points = [
        replace(base, dtype=d)
        for d in (dtypes_served if case.all_dtypes else (dtypes_served[0], dtypes_served[-1]))
    ]
    if case.sweep:
        points += [replace(base, page_size=p) for p in page_sizes(rows)]
        points += [replace(base, order=o) for o in ORDERS]
        points += [replace(base, layout=x) for x in sorted({x for r in rows for x in r.layouts})]
    return list(dict.fromkeys(points))
