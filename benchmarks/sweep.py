"""Candidates of our kernels of linear attention, each a contestant of its own.

Launch parameters, and prefill by one kernel or by two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from torch import Tensor

from benchmarks.linear_cases import LinearCase, LinearInputs
from benchmarks.peers.linear import OURS, Call, LinearContestant, States

_PREFILL = "attn_core.backends.triton.linear.prefill"
_LAUNCH = "attn_core.backends.triton.linear.launch"
# name → the function that is replaced, the cases, and (rows, warps, stages) or what it returns
SWEEPS: dict[str, tuple[str, str, tuple[tuple[int, int, int] | bool, ...]]] = {
    "fused": (f"{_PREFILL}.fuses", "prefill", (True, False)),
    "decode": (
        f"{_LAUNCH}.decode_launch",
        "decode",
        ((8, 1, 1), (16, 1, 1), (32, 1, 1), (16, 2, 1), (32, 2, 1)),
    ),
    "verify": (
        f"{_LAUNCH}.verify_launch",
        "verify",
        ((32, 4, 1), (64, 4, 1), (64, 8, 1), (128, 4, 1), (128, 8, 1)),
    ),
    "commit": (
        f"{_LAUNCH}.commit_launch",
        "commit",
        ((8, 1, 1), (16, 1, 1), (16, 2, 1), (32, 2, 1), (32, 4, 1)),
    ),
    "scan": (
        f"{_PREFILL}.scan_launch",
        "prefill",
        ((64, 4, 2), (64, 4, 3), (64, 4, 1), (128, 8, 2), (64, 8, 2), (32, 4, 2), (32, 4, 3)),
    ),
    "prepare": (
        f"{_PREFILL}.prepare_launch",
        "prefill",
        ((64, 4, 1), (64, 8, 1), (32, 4, 1), (32, 8, 1), (128, 8, 1)),
    ),
}


def candidates(name: str) -> tuple[LinearContestant, ...]:
    """Return one contestant per candidate of a kernel."""
    target, op, launches = SWEEPS[name]
    return tuple(_candidate(target, op, x) for x in launches)


def _candidate(target: str, op: str, chosen: tuple[int, int, int] | bool) -> LinearContestant:
    if isinstance(chosen, bool):
        name = "one kernel" if chosen else "two kernels"
    else:
        name = "rows {} warps {} stages {}".format(*chosen)

    def patched() -> Any:
        from attn_core.backends.triton.linear.tuning import Launch

        if isinstance(chosen, bool):
            return mock.patch(target, return_value=chosen)
        rows, warps, stages = chosen
        return mock.patch(target, return_value=Launch(rows=rows, warps=warps, stages=stages))

    def prepare(inputs: LinearInputs, module: Any) -> tuple[Call, States | None]:
        with patched():
            call, states = OURS.prepare(inputs, module)
        return _within(patched, call), states

    def takes(case: LinearCase) -> bool:
        return case.op == op

    return LinearContestant(
        name=name, distribution=OURS.distribution, modules=OURS.modules, takes=takes,
        prepare=prepare,
    )  # fmt: skip


def _within(patched: Callable[[], Any], call: Call) -> Call:
    def run() -> Tensor:
        with patched():
            return call()

    return run
