"""What shared prefixes cost where nothing is shared: the shapes, the turns and the limits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks import shared_cost
from benchmarks.shared_cost import Cost, Pair, cases_of, in_turn
from benchmarks.suites import grid
from benchmarks.timing import Timing


def cost(call=(100.0, 100.9), plan=(3.0, 3.9), **more):
    values = {"case": "c", "rel_err": 0.0, "wrong": False} | more
    return Cost(call=Pair(*call), plan=Pair(*plan), **values)


@pytest.mark.parametrize(
    ("found", "within"),
    [
        (cost(), True),
        (cost(call=(100.0, 101.1)), False),
        (cost(plan=(3.0, 4.1)), False),
        (cost(wrong=True), False),
        (cost(call=(100.0, 90.0), plan=(5.0, 3.0)), True),
    ],
)
def test_the_limits(found, within):
    assert found.within == within
    assert ("OVER" in str(found)) != within


def test_every_decode_shape_of_the_grid_is_measured_and_none_shares():
    cases = cases_of("")
    assert {c.name for c in grid() if c.phase == "decode"} <= {c.name for c in cases}
    assert not any(c.shared for c in cases)
    assert {c.name for c in cases_of("B16 L1024 H28/4")} == {
        "decode B16 L1024 H28/4 D128 p64",
        "decode B16 L1024 H28/4 D128 p16",
    }


def test_calls_are_timed_in_turn_and_their_medians_compared():
    order = []

    class Clock:
        def measure(self, call):
            call()
            us = float(len(order)) if order[-1] == "alone" else 7.0
            return Timing(us=us, p20=us, p80=us, reps=1)

    pair = in_turn((lambda: order.append("alone"), lambda: order.append("shared")), Clock())
    assert order == ["alone", "shared"] * shared_cost.ROUNDS
    assert pair == (5.0, 7.0)


def test_what_shares_is_checked(monkeypatch):
    """A wrong result of the call with shared_prefix is said, and within no limit."""
    clock = SimpleNamespace(measure=lambda call: Timing(us=1.0, p20=1.0, p80=1.0, reps=1))
    results = {False: torch.zeros(1), True: torch.ones(1)}

    def calls_of(inputs, device, *, shared_prefix):
        return lambda: results[shared_prefix], lambda: None

    monkeypatch.setattr(shared_cost, "calls_of", calls_of)
    case = cases_of("B16 L1024 H28/4 D128 p64")[0]
    inputs = SimpleNamespace(case=case, error=float)
    result = shared_cost.measured(inputs, clock, torch.device("cpu"))
    assert (result.rel_err, result.wrong, result.within) == (1.0, True, False)
