"""Ranks of one model: heads split over them, and the keys of each request split over them.

An engine does the communication. Its backends have to give partial results that fit together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from interpreted import interpreted
from ranks import on_ranks

from benchmarks import rank_passes
from benchmarks.rank_passes import GRAPHS, PASSES
from benchmarks.ranks import PROBLEMS, Row, attend, choices, judge, judge_choices, main

PROBLEM = PROBLEMS["cpu"]
BACKENDS = ("torch_native", "intel_amx")
# what a graph would replay runs again here; kernels are interpreted
SMALL = replace(
    PROBLEM, heads=4, kv_heads=4, lengths=((1, 3, 21), (9, 1, 2)), new=(1, 1, 1), dim=16, page=16
)


def every_pass(rank: int, size: int) -> dict[Any, Any]:
    """Run all passes on one rank, without the exchange of a graph."""
    return attend(rank, size, PROBLEM, BACKENDS, PASSES)


def captured(rank: int, size: int) -> dict[Any, Any]:
    """Run the passes of a graph, whose second replay has other lengths than the first."""
    with mock.patch.object(rank_passes, "load_plugins", interpreted):
        return attend(rank, size, SMALL, ("triton",), GRAPHS)


def of_all(size: int) -> list[Row]:
    return list(judge(PROBLEM, size, on_ranks(size, every_pass)))


@pytest.fixture(scope="module", params=[2, 4])
def rows(request: pytest.FixtureRequest) -> list[Row]:
    """What two and what four ranks have in the end, beside one device."""
    return of_all(request.param)


@pytest.mark.parametrize("what", PASSES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_together_give_the_attention_of_one_device(
    rows: list[Row], backend: str, what: str
) -> None:
    [row] = [r for r in rows if (r["backend"], r["pass"]) == (backend, what)]
    assert row["passed"], row
    assert row["largest_difference_from_one_device"] < 4e-6


def test_all_ranks_hold_the_same_bits(rows: list[Row]) -> None:
    """They sample from what they hold: one bit that differs lets them drift apart."""
    assert all(row["same_bits"] for row in rows)


def test_captured_passes_of_two_ranks_replay_other_lengths() -> None:
    result = list(judge(SMALL, 2, on_ranks(2, captured)))
    assert [row["pass"] for row in result] == list(GRAPHS)
    for row in result:
        assert row["passed"], row


def test_ranks_choose_alike() -> None:
    for row in judge_choices(2, on_ranks(2, choices, "cpu")):
        assert row["passed"], row


def test_ranks_without_a_gpu_each_do_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("sys.argv", ["ranks", "--ranks", "4"])
    with pytest.raises(SystemExit):
        main()
    assert "4 ranks need a GPU each, here are 2" in capsys.readouterr().err


def wrong_merge(rank: int, size: int) -> dict[Any, Any]:
    """Add what the ranks have, as if each had all keys."""

    def added(outs: Any, lses: Any) -> Any:
        return outs.mean(0), lses[0]

    with mock.patch.object(rank_passes, "merge_states", added):
        return attend(rank, size, PROBLEM, ("torch_native",), ("keys decode",))


def own_bits(rank: int, size: int) -> dict[Any, Any]:
    """Let one rank hold another bit."""
    result = attend(rank, size, PROBLEM, ("torch_native",), ("heads",))
    result["torch_native", "heads"][0][0][0, 0, 0] += rank * 1e-7
    return result


@pytest.mark.parametrize(("fault", "same"), [(wrong_merge, True), (own_bits, False)])
def test_the_comparison_sees_planted_faults(fault: Any, same: bool) -> None:
    [row] = judge(PROBLEM, 2, on_ranks(2, fault))
    assert not row["passed"]
    assert row["same_bits"] is same
