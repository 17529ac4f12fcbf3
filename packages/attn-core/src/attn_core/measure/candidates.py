"""What is worth measuring: the shapes of a model and its workload, the rows that take them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from attn_core.costs.model import CostModel
from attn_core.costs.profile import Profile
from attn_core.costs.shapes import Form, Pass, forms, row_key
from attn_core.costs.workload import Workload
from attn_core.errors import AttnError, UsageError
from attn_core.measure.spread import halton, spread, work
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


@dataclass(frozen=True)
class Candidate:
    """A backend and the row of it that serves a phase."""

    spec: BackendSpec
    row: Capabilities

    @cached_property
    def digest(self) -> str:
        return row_key(self.row)

    def rounds(self, form: Form) -> bool:
        """Say whether it rounds queries and probabilities to the FP8 of the cache."""
        return self.row.quantizes_q_to_fp8 and form.store.startswith("fp8")


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

    These are the passes of the workload, any first part of them evenly from the least work to the
    most, and then, with `grid`, others that lie evenly over what serving runs, phases and forms in
    turns: where the time ends, every form has had as much of it. Pages are those that the selection
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
    rank: dict[tuple[Form, Pass], float] = {}
    result: dict[tuple[Form, Pass], Job] = {}
    for phase in (Phase.PREFILL, Phase.DECODE):
        rows = _rows(s, phase)
        served = [size for size, _ in workload.passes(phase, needs.speculation)]
        for page in _pages(s, needs, rows):
            for form in forms(needs, page):
                sizes = dict.fromkeys((*served, *(_around(s, phase, form) if grid else ())))
                listed: Counter[str] = Counter()  # prompts and verification are in turns, too
                for size in sizes:
                    candidates = [c for c in rows if takes_page(c.row, page) and _runs(c.row, size)]
                    if candidates:
                        result[form, size] = Job(form, size, tuple(candidates))
                        rank[form, size] = listed[size.phase]
                        listed[size.phase] += 1
    served = [x for p in Phase for x, _ in workload.passes(p, needs.speculation)]
    first = next(iter(result))[0].page_size if result else None
    series: dict[tuple[Form, str], list[tuple[Form, Pass]]] = {}
    for form, size in result:
        if size in served:
            series.setdefault((form, size.phase), []).append((form, size))
    for own in series.values():
        for number, key in enumerate(sorted(own, key=lambda key: work(*key))):
            rank[key] = halton(number, 2)
    return sorted(
        result.values(),
        key=lambda job: (
            job.form.page_size != first,
            job.size not in served,
            rank[job.form, job.size],
        ),
    )


def _rows(s: RowJudge, phase: Phase) -> list[Candidate]:
    """Return the best row of every implemented backend that fits a phase, by priority."""
    verdicts = best_per_backend(s.weigh("softmax", phase), s)
    ordered = s.candidates(verdicts, "softmax")
    return [Candidate(v.spec, v.row) for v in ordered if _measurable(v)]


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


def _around(s: RowJudge, phase: Phase, form: Form) -> list[Pass]:
    """Return passes of a phase beside those of the workload."""
    speculation, device = s.needs.speculation, s.device.type
    verifies = speculation is not None and speculation.mode == phase.value
    sizes = []
    if phase is Phase.PREFILL:
        sizes += spread(form, "prefill", device)
    elif not verifies:
        sizes += spread(form, "decode", device)
    if verifies and speculation is not None:
        n, tree = speculation.num_draft_tokens, speculation.topk > 1
        sizes += spread(form, "verify", device, drafts=n, tree=tree)
    return sizes
