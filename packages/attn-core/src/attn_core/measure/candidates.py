"""What is worth measuring: the shapes of a model and its workload, the rows that take them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from attn_core.costs.model import CostModel
from attn_core.costs.profile import Profile
from attn_core.costs.shapes import Form, Pass, PassPhase, forms, row_key
from attn_core.costs.workload import Workload
from attn_core.errors import AttnError, UsageError
from attn_core.plugins.dependencies import Libraries
from attn_core.plugins.registry import Registry
from attn_core.selection.expected import Costs
from attn_core.selection.ranking import RowJudge, best_per_backend
from attn_core.selection.result import Overrides, Verdict
from attn_core.selection.solver import select
from attn_core.spec.capabilities import BackendSpec, Capabilities
from attn_core.spec.device import Device
from attn_core.spec.kinds import Phase
from attn_core.spec.page_size import page_limit, smallest_page, takes_page
from attn_core.spec.requirements import Requirements

MOST_PAGES = 3
BATCHES, LENGTHS, CHUNK, SHORT = (1, 8, 64, 256), (128, 1024, 8192, 32768), 512, 32
UNEVEN = 6  # the longest request over the mean, of passes of unequal requests


@dataclass(frozen=True)
class Candidate:
    """A backend and the row of it that serves a phase."""

    spec: BackendSpec
    row: Capabilities

    @property
    def digest(self) -> str:
        return row_key(self.row)


@dataclass(frozen=True)
class Job:
    """One shape: all candidates that take it are measured in turns."""

    form: Form
    size: Pass
    candidates: tuple[Candidate, ...]


def jobs(
    needs: Requirements,
    device: Device,
    registry: Registry,
    libraries: Libraries,
    overrides: Overrides,
    workload: Workload,
    *,
    grid: bool = True,
) -> list[Job]:
    """List every shape that is worth measuring for these requirements, the most useful first.

    These are the passes of the workload, the least work first, and then, with `grid`, corners
    around them, so that other passes lie between measured ones. Pages are those that the selection
    has today, and the smallest that other candidates take. Raises UsageError where nothing can be
    measured: unknown heads, no plain attention over a cache.
    """
    layers = forms(needs, None)
    if not layers:
        raise UsageError(
            "nothing to tune: the model has no layers of kind mha or mla over a cache, or others "
            "beside them that no profile holds (encoders, cross, dual chunk, sparse); the "
            "priorities of the rows decide"
        )
    for form in layers:
        if form.head_dim is None or form.q_heads is None or form.kv_heads is None:
            raise UsageError(
                f"head_dim {form.head_dim}, num_q_heads {form.q_heads}, num_kv_heads "
                f"{form.kv_heads}: kernels must know all three; name a model, or give --head-dim, "
                "--num-q-heads and --num-kv-heads"
            )
    costs = Costs(CostModel(Profile()), workload, needs)
    s = RowJudge(needs, device, registry, libraries, overrides, costs, simulated=False)
    found = []
    for phase in (Phase.PREFILL, Phase.DECODE):
        rows = _rows(s, phase)
        for page in _pages(s, needs, rows):
            for form, size in itertools.product(forms(needs, page), _sizes(s, phase, grid)):
                able = [c for c in rows if takes_page(c.row, page) and _runs(c.row, size)]
                if able:
                    found.append(Job(form, size, tuple(able)))
    unique = {(job.form, job.size): job for job in found}
    usual = {x for p in Phase for x, _ in workload.passes(p, needs.speculation)}
    first = found[0].form.page_size if found else None
    return sorted(
        unique.values(),
        key=lambda job: (
            job.form.page_size != first,
            job.size not in usual,
            work(job.form, job.size),
        ),
    )


def work(form: Form, size: Pass) -> float:
    """Return the products of queries and keys, with a floor that stands for launching."""
    queries, keys = size.queries / size.requests, size.kv_tokens / size.requests
    seen = keys - (queries - 1) / 2
    if form.window is not None:
        seen = min(seen, form.window)
    return size.requests * queries * seen * (form.q_heads or 1) * (form.head_dim or 1) + 1e6


def _rows(s: RowJudge, phase: Phase) -> list[Candidate]:
    """Return the best row of every implemented backend that fits a phase, by priority."""
    verdicts = best_per_backend(s.weigh("softmax", phase), s)
    named = s.candidates(verdicts, "softmax")
    return [Candidate(v.spec, v.row) for v in named if _measurable(v)]


def _measurable(verdict: Verdict) -> bool:
    """Say whether a row is implemented and runs passes over the cache."""
    return verdict.spec.creator(verdict.row) is not None and verdict.row.absorbed


def _runs(row: Capabilities, size: Pass) -> bool:
    return size.phase != "verify" or row.max_verify_topk >= (2 if size.tree else 1)


def _pages(s: RowJudge, needs: Requirements, rows: Iterable[Candidate]) -> list[int]:
    if needs.page_size is not None:
        return [needs.page_size]
    limit, pages = page_limit(needs), []
    try:
        chosen = select(
            needs, s.device, s.registry, s.libraries, s.overrides, Profile(), advise=False
        )
        pages.append(chosen.page_size)
    except AttnError:  # no pair serves both phases: each is measured for itself
        pass
    pages += [smallest_page((c.row,), limit) for c in rows]
    pages += [c.row.preferred_page_size for c in rows]
    return list(dict.fromkeys(p for p in pages if p))[:MOST_PAGES]


def _sizes(s: RowJudge, phase: Phase, grid: bool) -> list[Pass]:
    """Return the passes of the workload, then a coarse grid around them."""
    speculation = s.needs.speculation
    sizes = [size for size, _ in s.costs.workload.passes(phase, speculation)]
    longest = max(size.longest for size in sizes) if sizes else 0
    if grid and phase is Phase.PREFILL:
        sizes += [Pass.even("prefill", 1, n, n) for n in LENGTHS]
        sizes += [Pass.even("prefill", b, CHUNK + n, CHUNK) for b in (1, 8) for n in LENGTHS]
        sizes += [Pass.even("prefill", 8, n, n) for n in LENGTHS[:2]]
        sizes += [Pass.even("prefill", 1, SHORT + n, SHORT) for n in LENGTHS]
        sizes += [_uneven("prefill", b, n, SHORT) for b in (4, 16) for n in LENGTHS[1:3]]
    verifies = speculation is not None and speculation.mode == phase.value
    if grid and (phase is Phase.DECODE or verifies):
        n = speculation.num_draft_tokens if verifies and speculation else 1
        tree = verifies and speculation is not None and speculation.topk > 1
        kind: PassPhase = "verify" if verifies else "decode"
        even = functools.partial(Pass.even, kind, queries=n, tree=tree)
        sizes += [even(b, n + x) for b in BATCHES for x in LENGTHS]
        lengths = (LENGTHS[0], LENGTHS[1], LENGTHS[2] // 2)
        sizes += [_uneven(kind, b, n + x, n, tree) for b in (16, 128) for x in lengths]
    return [x for x in dict.fromkeys(sizes) if x.longest <= max(longest, LENGTHS[-1]) + CHUNK]


def _uneven(phase: PassPhase, requests: int, mean: int, queries: int, tree: bool = False) -> Pass:
    """Return a pass of which one request is far longer than the mean."""
    longest = min(UNEVEN * mean, requests * (mean - queries) // 2 + queries)
    return replace(Pass.even(phase, requests, mean, queries, tree=tree), longest=longest)
