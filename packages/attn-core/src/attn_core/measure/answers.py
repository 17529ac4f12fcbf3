"""What a measured pass has to return: some rows by the oracle, all others by each other."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_core.testing.oracle import yardstick
from attn_core.testing.tolerance import Measure, require

Rows = Mapping[int, Sequence[int]]  # request → its queries
Solve = Callable[[torch.dtype, int], tuple[Tensor, Tensor]]  # dtype, order → output and LSE
QUERIES = 4  # of each checked request
# A row is chosen among all others because it is the farthest off: chance alone makes that more
CHOSEN = 2.0


def sample(name: str, keys: Sequence[int], queries: Sequence[int], page_size: int) -> Rows:
    """Return which rows of a pass are compared with the oracle, the same for the same name.

    The requests are the first and the last, the shortest and the longest, the one whose last page
    is the fullest and the one whose last page is the emptiest, and one by lot. Of each the first
    query, the last, and others by lot.
    """
    lot, order = random.Random(name), range(len(keys))
    requests = {0, len(keys) - 1, lot.randrange(len(keys))}
    for what in (lambda b: keys[b], lambda b: (keys[b] - 1) % page_size):
        requests |= {min(order, key=what), max(order, key=what)}
    sampled = {}
    for b in sorted(requests):
        n = queries[b]
        sampled[b] = sorted({0, n - 1, *lot.sample(range(n), min(n, QUERIES - 2))})
    return sampled


@dataclass(frozen=True, eq=False)
class Answers:
    """Rows of the output, what is right there, and how far off each may be.

    truth [R, Hq, Dv] float64. allowed [2, R] float64: of the largest error of a row, and of the
    root mean square. The budget is tolerance.within_budget's, a row at a time: the first queries of
    a prompt have large outputs, and an error of theirs would hide in it what is wrong in the last.
    """

    names: Sequence[str]
    rows: Tensor
    truth: Tensor
    allowed: Tensor

    @classmethod
    def of(
        cls, rows: Rows, starts: Sequence[int], solver: Callable[[int, Sequence[int]], Solve],
        dtype: torch.dtype, *, times: float = 1.0,
    ) -> Answers:  # fmt: skip
        """Ask the oracle for rows; starts: of each request's queries among all of the pass."""
        names, positions, truths, plains = list[str](), list[int](), list[Tensor](), list[Tensor]()
        for b, queries in rows.items():
            solve = solver(b, queries)
            truth = solve(torch.float64, 0)
            plains.append(yardstick(solve, dtype, truth)[0].double())
            truths.append(truth[0])
            positions += [starts[b] + i for i in queries]
            names += [f"query {i} of request {b}" for i in queries]
        truth_, plain = torch.cat(truths), torch.cat(plains)
        allowed = 2 * _sizes(plain - truth_) + 2 * torch.finfo(dtype).eps * _sizes(truth_)
        return cls(names, torch.tensor(positions, device=truth_.device), truth_, times * allowed)

    def check(self, name: str, out: Tensor) -> Measure:
        """Compare an output [T, Hq, Dv]; raise CheckFailed where a row is beyond its budget."""
        errors = _sizes(out[self.rows].double() - self.truth)
        errors_and_limits = torch.stack([errors, self.allowed]).cpu().flatten(1)
        (error, budget), number = errors_and_limits, len(self.names)
        worst_index = int((error / budget).nan_to_num(nan=0.0).argmax())  # 0 / 0: nothing is off
        measure = Measure(error[worst_index].item(), budget[worst_index].item())
        criterion = "root mean square" if worst_index >= number else "largest"
        require(
            measure.ratio <= 1,
            f"{name}: {self.names[worst_index % number]}: {criterion} error {measure.error:.3e}, "
            f"allowed {measure.budget:.3e}",
        )
        return measure


def _sizes(x: Tensor) -> Tensor:
    """Return the largest absolute value and the root mean square of each row, [2, R]."""
    flat = x.flatten(1)
    return torch.stack([flat.abs().amax(1), flat.square().mean(1).sqrt()])


@dataclass(eq=False)
class Span:
    """The least and the greatest of each number that backends returned for one pass."""

    ends: list[Tensor] = field(default_factory=list)
    seen: int = 0

    def add(self, out: Tensor) -> None:
        """Note an output [T, Hq, Dv]."""
        self.seen += 1
        if not self.ends:
            self.ends = [out.clone(), out.clone()]
            return
        low, high = self.ends
        torch.minimum(low, out, out=low)
        torch.maximum(high, out, out=high)

    def disputed(self, starts: Sequence[int]) -> Rows:
        """Return the row in which outputs are the farthest apart, measured by its largest number.

        No row if all agree within what their dtype rounds.
        """
        if self.seen < 2:
            return {}
        low, high = self.ends
        difference = (high.float() - low.float()).flatten(1).amax(1)
        size = high.abs().maximum(low.abs()).flatten(1).amax(1).float()
        relative = difference / size.clamp(min=torch.finfo(torch.float32).tiny)
        largest, row = relative.max(0)
        if largest.item() <= 2 * torch.finfo(low.dtype).eps:
            return {}
        b = bisect_right(starts, int(row)) - 1
        return {b: [int(row) - starts[b]]}
