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
    others = {(p.kind, p.check.id): p for p in second}
    for one in first:
        if one.check.asks is None:
            continue
        other = others.get((one.kind, one.check.id))
        if one.row is None:
            yield Pair(one, None, one.reason)
        elif other is None:
            yield Pair(one, None, "the other backend's plan has no such case")
        elif other.row is None:
            yield Pair(one, None, f"the other backend: {other.reason}")
        elif other.check.asks != one.check.asks:
            yield Pair(one, None, "their rows take other shapes")
        else:
            yield Pair(one, other)


def compare_all(
    matched: Sequence[Pair],
    specs: tuple[BackendSpec, BackendSpec],
    on: torch.device,
    step: Callable[[str], None] = lambda name: None,
    *,
    arch: str | None = None,
) -> list[Compared]:
    """Run every pair on a device; `step` is called before each.

    An error of a backend is a difference too: it declares the case.
    """
    done = []
    for pair in matched:
        check, other = pair.first.check, pair.second
        about = (check.id, check.feature, pair.first.kind)
        if other is None:
            done.append(Compared(*about, detail=pair.reason, ran=False))
            continue
        step(check.id)
        benches = [
            Bench(spec=spec, row=p.row, torch_device=on, arch=arch)
            for spec, p in zip(specs, (pair.first, other), strict=True)
            if p.row is not None
        ]
        try:
            with torch.no_grad():
                measure = compare(benches[0], benches[1], *check.asks or ())
        except CheckFailed as failure:
            done.append(Compared(*about, detail=f"{check.id}: {failure}"))
        except Exception as error:  # foreign code: whatever it raises is the finding
            said = f"{check.id}: {type(error).__name__}: {error}"
            done.append(Compared(*about, detail=said))
        else:
            beyond = measure.ratio > 1
            said = f"{check.id}: differ by {measure.error:.3e}, allowed {measure.budget:.3e}"
            done.append(Compared(*about, measure=measure, detail=said if beyond else ""))
    return done


def compare(first: Bench, second: Bench, case: Case | RaggedCase, at: Point | str) -> Measure:
    """Run one case on both, and return how far they are apart and how far both may be.

    Each may be as far from the truth as the suite allows, so together twice as far.
    """
    benches = (first, second)
    if isinstance(case, RaggedCase):
        assert isinstance(at, str)  # its dtype
        values = [_ragged(bench, case, at) for bench in benches]
        _, right = ragged_inputs(case, at)
        truth, nears, dtype = right[0], [right[1]] * 2, TORCH_DTYPES[at]
        tokens = sum(case.query_lens)
    else:
        assert isinstance(at, Point)
        finite = any(bench.row.requires_finite_padding for bench in benches)
        fused = any(bench.row.fused_kv_write for bench in benches)
        values, nears = [], []
        for bench in benches:
            rounds = bench.rounds(case.kv_dtype)
            inputs, (truth, near) = expected(case, at, finite, fused, rounds)
            inputs = to_device(inputs, bench.torch_device)
            backend = create(bench, case, inputs, at)
            written = fused and not bench.row.fused_kv_write
            cache = clone_cache(inputs.after) if written else None
            lse = first.row.lse and second.row.lse
            values.append(attend(backend, inputs, cache=cache, return_lse=lse))
            nears.append(near)
        tokens, dtype = inputs.real_tokens, TORCH_DTYPES[at.dtype]
    found = []
    for i, rounding in enumerate((dtype, torch.float32)):
        a, b = (value[i] for value in values)
        if a is not None and b is not None:
            near = nears[0][i], nears[1][i]
            found.append(_apart(a[:tokens], b[:tokens], truth[i], near, rounding))
    return worst(found)


def _ragged(bench: Bench, case: RaggedCase, dtype: str) -> Value:
    (q, k, v), _ = ragged_inputs(case, dtype)
    layer = make_layer(case, torch.Generator().manual_seed(1))
    q, k, v, layer = to_device((q, k, v, layer), bench.torch_device)
    got = bench.create((layer,), dtype=dtype).forward_ragged(
        q, k, v, layer, indptr(case.query_lens, q.device), indptr(case.key_lens, q.device),
        max(case.query_lens), max(case.key_lens), causal=case.causal,
    )  # fmt: skip
    shape = (q.shape[0], q.shape[1], v.shape[2])
    return returned(got, shape, q.dtype, out=None, return_lse=False)


def _apart(
    a: Tensor, b: Tensor, truth: Tensor, nears: tuple[Tensor, Tensor], rounding: torch.dtype
) -> Measure:
    a, b, truth = a.detach().cpu().double(), b.detach().cpu().double(), truth.cpu()
    finite = truth.isfinite()
    same = torch.equal(a[~finite], b[~finite])
    if not same or not bool(a[finite].isfinite().all() & b[finite].isfinite().all()):
        raise CheckFailed("one of them returns NaN or an infinity that the other does not")
    if not finite.any():
        return Measure()
    a, b, truth = a[finite], b[finite], truth[finite]
    budgets = [errors(truth, truth, near.cpu().double()[finite], rounding) for near in nears]
    return worst(
        [
            Measure(measure.error, budgets[0][how].budget + budgets[1][how].budget)
            for how, measure in errors(a, b, b, rounding).items()
        ]
    )
