"""What `shared_prefix` costs where nothing is shared: `python -m benchmarks.shared_cost`.

Every decode shape of the grid, and those of the suite of shared prefixes that share nothing, with
and without it, in turn; and the plan of a replay with and without it. `within` says whether a shape
keeps to the limits: 1 % of its time, and 1 µs of plan.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from attn_core.plugins.registry import load_plugins

from benchmarks.attention import device_name, versions
from benchmarks.cases import Case, Inputs, build
from benchmarks.compiling import Field, compile_kernels
from benchmarks.contestant import Contestant
from benchmarks.ours import our_backend, prepared_backend
from benchmarks.results import FOLDER, command_of, slug
from benchmarks.runner import tolerance
from benchmarks.suites import grid, shared
from benchmarks.timing import Call, Timer, timer_for

ROUNDS = 5  # of the two calls in turn: the clock of a GPU drifts
MOST_RATIO, MOST_PLAN_US = 1.01, 1.0


class Pair(NamedTuple):
    """Microseconds without shared_prefix and with it."""

    alone: float
    shared: float

    @property
    def ratio(self) -> float:
        return self.shared / self.alone


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one shape costs: its call and its plan; rel_err: of the call with shared_prefix."""

    case: str
    call: Pair
    plan: Pair
    rel_err: float
    wrong: bool

    @property
    def within(self) -> bool:
        """Whether the call and the plan keep to the limits."""
        longer = self.plan.shared - self.plan.alone
        return not self.wrong and self.call.ratio <= MOST_RATIO and longer <= MOST_PLAN_US

    def __str__(self) -> str:
        message = "" if self.within else "  OVER"
        return (
            f"{self.case:<38} {self.call.alone:9.2f} {self.call.shared:9.2f} "
            f"{self.call.ratio:6.3f}  plan {self.plan.alone:5.2f} {self.plan.shared:5.2f}{message}"
            + ("  WRONG" if self.wrong else "")
        )


def measured(inputs: Inputs, timer: Timer, device: torch.device) -> Cost:
    """Check and time one shape, the two calls in turn."""
    calls: list[Call] = []
    plans: list[Call] = []
    for sharing in (False, True):
        call, plan = calls_of(inputs, device, shared_prefix=sharing)
        calls.append(call)
        plans.append(plan)
    error = inputs.error(torch.as_tensor(calls[1]()))
    return Cost(
        case=inputs.case.name,
        call=in_turn(calls, timer),
        plan=in_turn(plans, timer),
        rel_err=error,
        wrong=not error <= tolerance(inputs.case),
    )


def in_turn(calls: Sequence[Call], timer: Timer) -> Pair:
    """Time two calls one after the other, in turn; return the median of each."""
    rounds = [[timer.measure(call).us for call in calls] for _ in range(ROUNDS)]
    alone, sharing = (statistics.median(x) for x in zip(*rounds, strict=True))
    return Pair(alone, sharing)


def calls_of(inputs: Inputs, device: torch.device, *, shared_prefix: bool) -> tuple[Call, Call]:
    """Return a layer's call, and the plan of a replay, which does nothing but plan."""
    backend = prepared_backend(
        "triton", load_plugins(), inputs, device, shared_prefix=shared_prefix
    )
    batch = inputs.batch
    backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
    metadata = backend.init_forward_metadata_capture_cuda_graph(batch)

    def call() -> object:
        return backend.forward(
            inputs.q, inputs.k, inputs.v, inputs.layer, inputs.cache, batch, metadata
        )

    def plan() -> None:
        backend.init_forward_metadata_replay_cuda_graph(batch, metadata)

    return call, plan


def contestants(device: str, shared_prefix: str) -> tuple[Contestant, ...]:
    """Return our backend alone, for whoever compiles it."""
    return (
        our_backend(
            "triton", load_plugins(), torch.device(device), shared_prefix=shared_prefix == "yes"
        ),
    )


def cases_of(pattern: str) -> list[Case]:
    """Return the decode shapes of the grid, and those of the suite, where nothing is shared."""
    cases = (*shared(), *grid())
    alone = [c for c in cases if c.phase == "decode" and not c.shared]
    return [c for c in alone if re.search(pattern, c.name)]


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """Time each shape; what was measured survives a time limit."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shared_cost", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--cases", default="", help="a pattern of the shapes' names")
    parser.add_argument("--out", type=pathlib.Path, help="the JSON")
    parser.add_argument("--compile", action="store_true", help="compile in parallel, and end")
    args = parser.parse_args(argv)
    device, cases = torch.device("cuda"), cases_of(args.cases)
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here")
    if args.compile:
        for sharing in ("no", "yes"):
            compile_kernels(cases, Field(contestants, ("cuda", sharing)), device, print)
        return 0
    timer = timer_for(device)
    path = args.out or FOLDER / f"shared-cost.{slug(device_name(device))}.json"
    result: list[dict[str, Any]] = []
    for case in cases:
        cost = measured(build(case, device), timer, device)
        print(cost, flush=True)
        result.append(asdict(cost) | {"ratio": cost.call.ratio, "within": cost.within})
        data = {
            "schema": 1,
            "suite": "shared-cost",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": device_name(device),
            "versions": versions(["attn-core"]),
            "command": command_of("benchmarks.shared_cost", argv),
            "limits": {"ratio": MOST_RATIO, "plan_us": MOST_PLAN_US},
            "found": result,
        }
        path.write_text(json.dumps(data, indent=1) + "\n")
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
