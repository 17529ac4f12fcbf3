"""The error budget: twice the error of a plain run in the same precision, plus rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class CheckFailed(AssertionError):  # noqa: N818  # a verdict, like pytest's Failed
    """A backend does not do what its row declares."""


@dataclass(frozen=True)
class Measure:
    """An error and what was allowed, in the units of the output."""

    error: float = 0.0
    budget: float = 0.0

    @property
    def ratio(self) -> float:
        """The share of the budget that is used; above 1 the check fails."""
        if self.budget > 0:
            return self.error / self.budget
        return 0.0 if self.error == 0 else float("inf")


def worst(measures: list[Measure]) -> Measure:
    """Return the measure that uses most of its budget."""
    return max(measures, key=lambda m: m.ratio, default=Measure())


def require(ok: bool, message: str) -> None:
    """Raise CheckFailed unless `ok`."""
    if not ok:
        raise CheckFailed(message)


def within_budget(
    name: str, actual: Tensor, truth: Tensor, yardstick: Tensor, rounding: torch.dtype
) -> Measure:
    """Compare with the float64 truth; raise CheckFailed beyond the budget.

    The allowed error is 2 · |yardstick - truth| plus two roundings in `rounding`, of a partial
    result and of the result, by the largest entries and by the root mean square: the second sees a
    small error that is made everywhere. Infinities must agree entry by entry; NaN never passes.
    """
    require(
        actual.shape == truth.shape,
        f"{name}: shape {tuple(actual.shape)}, not {tuple(truth.shape)}",
    )
    actual, yardstick, truth = actual.detach().cpu().double(), yardstick.cpu().double(), truth.cpu()
    finite = truth.isfinite()
    require(torch.equal(actual[~finite], truth[~finite]), f"{name}: infinities differ")
    num_invalid = int((~actual[finite].isfinite()).sum())
    require(num_invalid == 0, f"{name}: {num_invalid} of {actual.numel()} values are not finite")
    if not finite.any():
        return Measure()
    measures = errors(actual[finite], truth[finite], yardstick[finite], rounding)
    for criterion, measure in measures.items():
        require(
            measure.ratio <= 1,
            f"{name}: {criterion} error {measure.error:.3e}, allowed {measure.budget:.3e}",
        )
    return worst([*measures.values()])


def judged(actual: Tensor, truth: Tensor, yardstick: Tensor, rounding: torch.dtype) -> Measure:
    """Return what within_budget compares, without raising; an error is infinite where it is NaN.

    It is infinite too where a number is infinite, and the truth is another.
    """
    actual, yardstick, truth = actual.detach().cpu().double(), yardstick.cpu().double(), truth.cpu()
    finite = truth.isfinite()
    if not torch.equal(actual[~finite], truth[~finite]) or not bool(
        actual[finite].isfinite().all()
    ):
        return Measure(float("inf"), 0.0)
    if not finite.any():
        return Measure()
    return worst([*errors(actual[finite], truth[finite], yardstick[finite], rounding).values()])


def errors(
    actual: Tensor, truth: Tensor, yardstick: Tensor, rounding: torch.dtype
) -> dict[str, Measure]:
    """Return the largest and the root mean square error of finite numbers, with their budgets."""
    error, yardstick_error = (actual - truth).abs(), (yardstick - truth).abs()
    eps = torch.finfo(rounding).eps
    return {
        criterion: Measure(
            reduce(error).item(),
            2 * reduce(yardstick_error).item() + 2 * eps * reduce(truth.abs()).item(),
        )
        for criterion, reduce in (("largest", torch.max), ("root mean square", _rms))
    }


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
