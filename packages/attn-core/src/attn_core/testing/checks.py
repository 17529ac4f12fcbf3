"""One question to a backend: what its row must declare for it, and how it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from attn_core.runtime.batch import ForwardMode
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.kinds import LATENT_KINDS, Kind, Phase
from attn_core.spec.requirements import Requirements
from attn_core.testing import case_catalog, metamorphic, neighbours, sharing, sparse_catalog
from attn_core.testing.cases import Case, RaggedCase
from attn_core.testing.dual_chunk_cases import DUAL_CHUNK, SPARSE_PROMPTS
from attn_core.testing.far import far_pages
from attn_core.testing.fuzz_session import run_session, run_two_sessions, session_cells
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.passes import run_case, run_ragged
from attn_core.testing.replay import replayed
from attn_core.testing.shapes import adapted, base_point, dtypes, page_cases, points, shape_cases
from attn_core.testing.sparse_passes import run_sparse, selection_beside_nan
from attn_core.testing.sparse_session import run_sparse_session
from attn_core.testing.tolerance import Measure

RELATED = {**case_catalog.RELATED, "dsa": sparse_catalog.RELATED}
GRAPHS = {**case_catalog.GRAPHS, "dsa": sparse_catalog.GRAPHS}

Flaw = Callable[[Capabilities], str | None]  # what a row lacks that Requirements do not say


def _none(row: Capabilities) -> str | None:
    return None


def _no_cache(row: Capabilities) -> str | None:
    return None if row.absorbed else "a pass over the latent cache (absorbed: not supported)"


def _first(*flaws: Flaw) -> Flaw:
    """Return the first flaw that a row has."""
    return lambda row: next((reason for flaw in flaws if (reason := flaw(row))), None)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question to a backend.

    phases: any of them will do or, with `every`, all of them. cells: the cells of the support
    matrix that it is evidence for. run raises CheckFailed, or says how much of the budget is used.
    alone: it takes much of a device's memory, so no other of its kind may run at the same time.
    asks: the one pass that it runs, and where, for a comparison of two backends.
    """

    id: str
    feature: str
    cells: frozenset[str]
    needs: Requirements
    phases: tuple[Phase, ...]
    run: Callable[[Bench], Measure]
    every: bool = False
    layout: str | None = None  # of the cache, None where there is none
    flaw: Flaw = _none
    alone: bool = False
    asks: tuple[Case | RaggedCase, Point | str] | None = None


Template = Callable[[Capabilities], Check]  # a row may have to be asked with its own shapes


def templates(
    kind: Kind, rows: Sequence[Capabilities], *, passes: int, reduced: bool
) -> Iterator[Template]:
    """Yield the questions to the rows of one kind; the arguments are those of plan()."""
    serving = [r for r in rows if r.phases != {Phase.ENCODE}]
    if serving:
        base = base_point(serving)
        for case in (*_PAGED[kind], *shape_cases(kind, serving)):
            options = points(case, serving)
            for point in _one(options, case, serving) if reduced else options:
                yield partial(_paged, case, point)
        for case, page_size in page_cases(kind, serving):
            yield partial(_paged, case, replace(base, page_size=page_size))
        finest = replace(base, dtype=dtypes(serving)[0])
        yield from _related_cases(kind, base, finest)
        for name, point in (("whole", base), ("decode", base)) if kind == "dsa" else ():
            case = sparse_catalog.BESIDE_NAN[name]
            yield partial(_related, f"index-beside-nan-{name}", case, point, selection_beside_nan)
        if kind == "dsa":
            for name, case in sparse_catalog.SESSIONS.items():
                yield partial(_sparse_session, name, case, base, passes // 4)
        else:
            yield from _sessions(kind, base, finest, passes)
    ragged = [_of_kind(case, kind) for case in case_catalog.RAGGED]
    for ragged_case in (c for c in ragged if c.kind == kind):
        for dtype in dict.fromkeys((dtypes(rows)[0], dtypes(rows)[-1])):
            yield partial(_ragged, ragged_case, dtype, run_ragged)
    ragged_cases = [_of_kind(case, kind) for case in case_catalog.RAGGED_BESIDE_NAN]
    for ragged_case in (c for c in ragged_cases if c.kind == kind):
        yield partial(_ragged, ragged_case, dtypes(rows)[-1], neighbours.ragged_beside_nan)
    if kind in LATENT_KINDS:
        prefix = _of_kind(case_catalog.PREFIX, kind)
        yield partial(_ragged, prefix, dtypes(rows)[-1], metamorphic.prefix_in_chunks)


_PAGED = {
    "mha": (*case_catalog.PAGED, *DUAL_CHUNK, *SPARSE_PROMPTS),
    "mla": case_catalog.LATENT,
    "dsa": sparse_catalog.SPARSE,
}


def _of_kind(case: RaggedCase, kind: Kind) -> RaggedCase:
    """Give a ragged case of MLA to sparse MLA too: without a cache they are the same."""
    return replace(case, kind=kind) if kind == "dsa" and case.kind == "mla" else case


def _sessions(kind: Kind, base: Point, finest: Point, passes: int) -> Iterator[Template]:
    yield partial(_session, kind, finest, "auto", passes)
    for store in ("auto", "fp8_e4m3"):
        yield partial(_session, kind, base, store, passes // 3)
    yield partial(_session, kind, base, "auto", passes // 10, run=run_two_sessions)


def _one(options: Sequence[Point], case: Case, rows: Sequence[Capabilities]) -> list[Point]:
    """Choose the first point whose dtype goes with the case's store on some row."""
    auto = case.kv_dtype == "auto"
    served = {d for r in rows if auto or case.kv_dtype in r.kv_dtypes for d in r.dtypes}
    return [point for point in options if point.dtype in served][:1] or [*options[:1]]


def _paged(case: Case, point: Point, row: Capabilities) -> Check:
    case = adapted(case, row)
    return Check(
        id=f"{case.feature}-{point}",
        feature=case.feature,
        cells=case.cells | ({"lse"} if row.lse else set()),
        needs=case.needs(point.dtype, point.page_size),
        phases=case.phases,
        run=lambda bench: (run_sparse if case.kind == "dsa" else run_case)(bench, case, point),
        layout=point.layout,
        flaw=_first(_no_cache, _needs_host_lengths if case.device_lengths else _none),
        asks=None if case.kind == "dsa" else (case, point),
    )


def _needs_host_lengths(row: Capabilities) -> str | None:
    return "lengths on the device alone (needs_host_lengths)" if row.needs_host_lengths else None


def _ragged(
    case: RaggedCase,
    dtype: str,
    run: Callable[[Bench, RaggedCase, str], Measure],
    row: Capabilities,
) -> Check:
    case = adapted(case, row)
    return Check(
        id=f"{case.feature}-{dtype}",
        feature=case.feature,
        cells=case.cells | ({"lse"} if row.lse else set()),
        needs=replace(case.needs(dtype), lse=run is metamorphic.prefix_in_chunks),
        phases=(case.phase,),
        run=lambda bench: run(bench, case, dtype),
        flaw=_no_chunks if case.kind in LATENT_KINDS else _none,
        asks=(case, dtype) if run is run_ragged and case.kind != "dsa" else None,
    )


def _no_chunks(row: Capabilities) -> str | None:
    return None if row.chunked_prefix else "chunked_prefix (not supported)"


def _related_cases(kind: Kind, base: Point, finest: Point) -> Iterator[Template]:
    """Yield the checks that put one pass beside another, and those of a row's flags."""
    cases = RELATED[kind]
    for name in ("whole", "whole-window-sinks", "whole-dual-chunk"):
        for point in (base, finest) if name in cases else ():
            yield partial(_related, f"chunks-{name}", cases[name], point, metamorphic.in_chunks)
            yield partial(
                _related, f"then-decode-{name}", cases[name], point, metamorphic.then_decode
            )
    chunked = [name for name in ("whole-dual-chunk",) if name in cases]
    for name in ("whole", "decode", *chunked):
        yield partial(_related, f"pages-moved-{name}", cases[name], base, metamorphic.pages_moved)
        yield partial(_related, f"lse-{name}", cases[name], base, run_case)
    for name in ("whole", "decode", *chunked, *(n for n in cases if n == "decode-fp8")):
        yield partial(_related, f"far-pages-{name}", cases[name], base, far_pages)
        yield partial(_related, f"beside-nan-{name}", cases[name], base, neighbours.beside_nan)
    for name, case in GRAPHS[kind].items():
        yield partial(_related, f"graph-{name}", case, base, replayed)
    passes = ("whole", "decode", "decode-equal", "chain", "tree", "whole-dual-chunk")
    for name in (n for n in passes if n in cases and n != "decode-equal"):
        yield partial(_related, f"twice-{name}", cases[name], base, metamorphic.twice)
    for name in (n for n in passes if n in cases):
        yield partial(_related, f"same-bits-{name}", cases[name], finest, neighbours.same_bits)
    for name, case in case_catalog.SHARED[kind].items():
        for point in (base, finest) if name == "decode" else (base,):
            yield partial(_related, f"shared-prefix-{name}", case, point, sharing.shared)
    quantised = () if kind == "dsa" else ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
    for store in ("auto", *quantised):
        case, name = replace(cases["decode"], kv_dtype=store), f"layers-{store}"
        yield partial(_related, name, case, base, neighbours.layers_of_one_plan)
    for name, store in product(("whole", "decode"), quantised):
        case = replace(cases[name], kv_dtype=store, k_scale=0.37, tensor_scales=True)
        case = replace(case, v_scale=1.7) if kind == "mha" else case
        name = f"tensor-scales-{name}-{store}"
        yield partial(_related, name, case, base, neighbours.scales_on_the_device)


Relation = Callable[[Bench, Case, Point], Measure]
_PROVES: dict[Relation, str] = {
    metamorphic.twice: "deterministic",
    neighbours.same_bits: "deterministic",
    run_case: "lse",
    replayed: "cuda_graph",
    sharing.shared: "shared_prefix",
}


def _related(name: str, case: Case, point: Point, run: Relation, row: Capabilities) -> Check:
    case = adapted(case, row)
    cell = _PROVES.get(run)
    needs = replace(
        case.needs(point.dtype, point.page_size),
        lse=cell == "lse",
        deterministic=cell == "deterministic",
        shared_prefix=cell == "shared_prefix",
    )
    level = "decode" if case.mode is ForwardMode.DECODE else "uniform"
    decodes_too = run is metamorphic.then_decode
    return Check(
        id=f"{name}-{point}",
        feature=name,
        cells=case.cells | ({cell} if cell else set()),
        needs=needs,
        phases=(Phase.PREFILL, Phase.DECODE) if decodes_too else case.phases,
        every=decodes_too,
        run=lambda bench: run(bench, case, point),
        layout=point.layout,
        flaw=_first(
            _no_cache,
            partial(_no_graph, level) if cell == "cuda_graph" else _none,
            _takes_numbers if case.tensor_scales else _none,
        ),
        alone=run is far_pages,
    )


def _takes_numbers(row: Capabilities) -> str | None:
    return None if row.tensor_scales else "scales in tensors (tensor_scales is not declared)"


def _no_graph(level: str, row: Capabilities) -> str | None:
    if row.cuda_graph in (level, "uniform", "always"):
        return None
    return f"cuda_graph {level} (supports {row.cuda_graph})"


def _sparse_session(name: str, case: Case, point: Point, passes: int, row: Capabilities) -> Check:
    case = adapted(case, row)
    return Check(
        id=f"session-{name}-{point}",
        feature="session",
        cells=session_cells(row, case.kv_dtype),
        needs=case.needs(point.dtype, point.page_size),
        phases=(Phase.PREFILL, Phase.DECODE),
        every=True,
        run=lambda bench: run_sparse_session(bench, case, point, passes=passes),
        layout=point.layout,
        flaw=_no_cache,
    )


def _session(
    kind: Kind,
    point: Point,
    store: str,
    passes: int,
    row: Capabilities,
    *,
    run: Callable[..., Measure] = run_session,
) -> Check:
    case = adapted(RELATED[kind]["decode"], row)
    phases = tuple(p for p in (Phase.PREFILL, Phase.DECODE) if p in row.phases)
    name = "session" if run is run_session else "threads"
    return Check(
        id=f"{name}-{store}-{point}" if store != "auto" else f"{name}-{point}",
        feature=name,
        cells=session_cells(row, store),
        needs=replace(case.needs(point.dtype, point.page_size), kv_cache_dtype=store),
        phases=phases or (Phase.PREFILL,),
        run=lambda bench: run(bench, case, point, store, passes=passes),
        layout=point.layout,
        flaw=_no_cache,
    )
