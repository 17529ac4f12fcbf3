"""Run the suite's cases on two backends and compare them with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_core.cache.layer_cache import TORCH_DTYPES
from attn_core.spec.capabilities import BackendSpec
from attn_core.spec.kinds import Kind
from attn_core.testing.answers import expected
from attn_core.testing.cases import Case, RaggedCase
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point, clone_cache, make_layer, to_device
from attn_core.testing.passes import attend, create, indptr, ragged_inputs, returned
from attn_core.testing.plan import PlannedCheck
from attn_core.testing.tolerance import CheckFailed, Measure, errors, worst

Value = tuple[Tensor, Tensor | None]  # out, LSE


@dataclass(frozen=True)
class Compared:
    """One case on two backends; detail: how they differ, or why they were not compared."""

    id: str
    feature: str
    kind: Kind
    measure: Measure = field(default_factory=Measure)
    detail: str = ""
    ran: bool = True

    @property
    def differs(self) -> bool:
        """Whether they differ by more than the suite allows both together."""
        return self.ran and bool(self.detail)


@dataclass(frozen=True)
class Pair:
    """A question that the rows of two backends take, or why they do not."""

    first: PlannedCheck
    second: PlannedCheck | None
    reason: str = ""


def pairs(first: Sequence[PlannedCheck], second: Sequence[PlannedCheck]) -> Iterator[Pair]:
    """Match the checks of two plans that ask for one pass over the cache, or without a cache."""
    by_id = {(p.kind, p.check.id): p for p in second}
    for checked in first:
        if checked.check.asks is None:
            continue
        match = by_id.get((checked.kind, checked.check.id))
        if checked.row is None:
            yield Pair(checked, None, checked.reason)
        elif match is None:
            yield Pair(checked, None, "the other backend's plan has no such case")
        elif match.row is None:
            yield Pair(checked, None, f"the other backend: {match.reason}")
        elif match.check.asks != checked.check.asks:
            yield Pair(checked, None, "their rows take other shapes")
        else:
            yield Pair(checked, match)


def compare_all(
    matched: Sequence[Pair],
    specs: tuple[BackendSpec, BackendSpec],
    device: torch.device,
    step: Callable[[str], None] = lambda name: None,
    *,
    arch: str | None = None,
) -> list[Compared]:
    """Run every pair on a device; `step` is called before each.

    An error of a backend is a difference too: it declares the case.
    """
    results = []
    for pair in matched:
        check, second = pair.first.check, pair.second
        about = (check.id, check.feature, pair.first.kind)
        if second is None:
            results.append(Compared(*about, detail=pair.reason, ran=False))
            continue
        step(check.id)
        benches = [
            Bench(spec=spec, row=p.row, torch_device=device, arch=arch)
            for spec, p in zip(specs, (pair.first, second), strict=True)
            if p.row is not None
        ]
        try:
            with torch.no_grad():
                measure = compare(benches[0], benches[1], *check.asks or ())
        except CheckFailed as failure:
            results.append(Compared(*about, detail=f"{check.id}: {failure}"))
        except Exception as error:  # foreign code: whatever it raises is the finding
            message = f"{check.id}: {type(error).__name__}: {error}"
            results.append(Compared(*about, detail=message))
        else:
            differs = measure.ratio > 1
            message = f"{check.id}: differ by {measure.error:.3e}, allowed {measure.budget:.3e}"
            results.append(Compared(*about, measure=measure, detail=message if differs else ""))
    return results


def compare(first: Bench, second: Bench, case: Case | RaggedCase, point: Point | str) -> Measure:
    """Run one case on both, and return how far they are apart and how far both may be.

    Each may be as far from the truth as the suite allows, so together twice as far.
    """
    benches = (first, second)
    if isinstance(case, RaggedCase):
        assert isinstance(point, str)  # its dtype
        values = [_ragged(bench, case, point) for bench in benches]
        _, reference = ragged_inputs(case, point)
        truth, baselines, dtype = reference[0], [reference[1]] * 2, TORCH_DTYPES[point]
        tokens = sum(case.query_lens)
    else:
        assert isinstance(point, Point)
        finite = any(bench.row.requires_finite_padding for bench in benches)
        fused = any(bench.row.fused_kv_write for bench in benches)
        values, baselines = [], []
        for bench in benches:
            rounds = bench.rounds(case.kv_dtype)
            inputs, (truth, baseline) = expected(case, point, finite, fused, rounds)
            inputs = to_device(inputs, bench.torch_device)
            backend = create(bench, case, inputs, point)
            written = fused and not bench.row.fused_kv_write
            cache = clone_cache(inputs.after) if written else None
            lse = first.row.lse and second.row.lse
            values.append(attend(backend, inputs, cache=cache, return_lse=lse))
            baselines.append(baseline)
        tokens, dtype = inputs.real_tokens, TORCH_DTYPES[point.dtype]
    measures = []
    for i, rounding in enumerate((dtype, torch.float32)):
        a, b = (value[i] for value in values)
        if a is not None and b is not None:
            baseline = baselines[0][i], baselines[1][i]
            measures.append(_apart(a[:tokens], b[:tokens], truth[i], baseline, rounding))
    return worst(measures)


def _ragged(bench: Bench, case: RaggedCase, dtype: str) -> Value:
    (q, k, v), _ = ragged_inputs(case, dtype)
    layer = make_layer(case, torch.Generator().manual_seed(1))
    q, k, v, layer = to_device((q, k, v, layer), bench.torch_device)
    actual = bench.create((layer,), dtype=dtype).forward_ragged(
        q, k, v, layer, indptr(case.query_lens, q.device), indptr(case.key_lens, q.device),
        max(case.query_lens), max(case.key_lens), causal=case.causal,
    )  # fmt: skip
    shape = (q.shape[0], q.shape[1], v.shape[2])
    return returned(actual, shape, q.dtype, out=None, return_lse=False)


def _apart(
    a: Tensor, b: Tensor, truth: Tensor, baselines: tuple[Tensor, Tensor], rounding: torch.dtype
) -> Measure:
    a, b, truth = a.detach().cpu().double(), b.detach().cpu().double(), truth.cpu()
    finite = truth.isfinite()
    same = torch.equal(a[~finite], b[~finite])
    if not same or not bool(a[finite].isfinite().all() & b[finite].isfinite().all()):
        raise CheckFailed("one of them returns NaN or an infinity that the other does not")
    if not finite.any():
        return Measure()
    a, b, truth = a[finite], b[finite], truth[finite]
    budgets = [
        errors(truth, truth, baseline.cpu().double()[finite], rounding) for baseline in baselines
    ]
    return worst(
        [
            Measure(measure.error, budgets[0][criterion].budget + budgets[1][criterion].budget)
            for criterion, measure in errors(a, b, b, rounding).items()
        ]
    )
