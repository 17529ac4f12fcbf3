"""The questions to the rows of linear attention (GDN, KDA), and what a row lacks for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from attn_core.runtime.batch import ForwardMode
from attn_core.spec.capabilities import Capabilities
from attn_core.spec.kinds import Kind
from attn_core.testing.checks import Check, Flaw, Template
from attn_core.testing.harness import Bench
from attn_core.testing.linear_cases import LinearCase, LinearPoint
from attn_core.testing.linear_catalog import CASES, FAR, GRAPHS, TWICE, adapted, points, shape_cases
from attn_core.testing.linear_passes import run_linear_case
from attn_core.testing.linear_related import far_slots, replayed, twice
from attn_core.testing.linear_session import random_passes
from attn_core.testing.tolerance import Measure

Relation = Callable[[Bench, LinearCase, LinearPoint], Measure]


def linear_templates(
    kind: Kind, rows: Sequence[Capabilities], *, passes: int, reduced: bool
) -> Iterator[Template]:
    """Yield the questions to the rows of one linear kind; the arguments are those of plan()."""
    for case in (*(replace(c, kind=kind) for c in CASES), *shape_cases(kind, rows)):
        options = points(case, rows)
        for point in options[:1] if reduced else options:
            yield partial(_check, case, point, run_linear_case)
    plain = LinearCase(feature="", kind=kind, passes=())
    finest, coarsest = (points(plain, rows)[i] for i in (0, -1))
    for run, prefix, cases in (
        (twice, "twice", TWICE), (replayed, "graph", GRAPHS), (far_slots, "far-slots", FAR)
    ):  # fmt: skip
        for name, pass_ in cases.items():
            case = replace(plain, feature=f"{prefix}-{name}", passes=(pass_,), num_layers=2)
            yield partial(_check, case, coarsest, run)
    for point in dict.fromkeys((finest, coarsest)):
        yield partial(_session, plain, point, passes // 4)


def _check(case: LinearCase, point: LinearPoint, run: Relation, row: Capabilities) -> Check:
    case = adapted(case, row)
    flaws = [_states(point.state_dtype)]
    if any(p.slots_out is not None for p in case.passes):
        flaws.append(_separate_write_slots)
    if any(p.checkpoint_slots is not None for p in case.passes):
        flaws.append(_checkpoints)
    if any(p.device_lengths for p in case.passes):
        flaws.append(_device_lengths)
    if run is replayed:
        flaws.append(_graphs("decode" if ForwardMode.DECODE in case.modes else "uniform"))
    if run is twice:
        flaws.append(_deterministic)
    return Check(
        id=f"{case.feature}-{point}",
        feature=case.feature,
        cells=case.cells,
        needs=case.needs(point.dtype, deterministic=run is twice),
        phases=case.phases,
        run=lambda bench: run(bench, case, point),
        every=case.every_phase,
        flaw=lambda row: next((reason for flaw in flaws if (reason := flaw(row))), None),
        alone=run is far_slots,
    )


def _session(case: LinearCase, point: LinearPoint, passes: int, row: Capabilities) -> Check:
    """Ask for a random session of whatever the row declares."""
    generated = random_passes(row, passes=passes)
    session = replace(case, feature="session", passes=generated, num_layers=2, num_slots=12)
    session = replace(session, gate="softplus", qk_norm=True)
    return _check(session, point, run_linear_case, row)


def _states(dtype: str) -> Flaw:
    def flaw(row: Capabilities) -> str | None:
        supported = ", ".join(sorted(row.kv_dtypes))
        return None if dtype in row.kv_dtypes else f"states in {dtype} (supports {supported})"

    return flaw


def _separate_write_slots(row: Capabilities) -> str | None:
    return None if row.separate_write_slots else "separate_write_slots (not supported)"


def _checkpoints(row: Capabilities) -> str | None:
    return None if row.checkpoints else "checkpoints (not supported)"


def _device_lengths(row: Capabilities) -> str | None:
    return "lengths on the device alone (needs_host_lengths)" if row.needs_host_lengths else None


def _deterministic(row: Capabilities) -> str | None:
    return None if row.deterministic else "deterministic (not supported)"


def _graphs(level: str) -> Flaw:
    def flaw(row: Capabilities) -> str | None:
        if row.cuda_graph in (level, "uniform", "always"):
            return None
        return f"cuda_graph {level} (supports {row.cuda_graph})"

    return flaw
