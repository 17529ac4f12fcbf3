"""Measure linear attention (GDN, KDA), our Triton kernels beside every installed peer, on a GPU.

Run: `python -m benchmarks.linear [--only REGEX] [--peers NAMES] [--rounds N] [--seconds N]
[--prepare-limit SECONDS] [--turns FILE]`. Each result is compared with the recurrence in float64
first. Contestants take turns; a time is the median over the rounds of medians with a cold L2, of
plain calls and of replayed CUDA graphs. What a contestant raises is recorded, and the rest goes on.
The file is written after each case. With --only the other cases of an earlier file stay, if device
and libraries are the same. With --turns several runs share a device: they compile side by side, and
take turns to check and to time. The exit code is 1 where a result of ours is wrong.
`--sweep NAME` times candidates of our own kernels instead, beside the peers that --peers names; it
writes a file only with --out.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from benchmarks.attention import device_name, versions
from benchmarks.linear_cases import CASES, LinearCase, LinearInputs, build
from benchmarks.linear_record import Record, best_us, describe, in_order, kept, rounded, text
from benchmarks.peers.linear import LINEAR_PEERS, OURS, Call, LinearContestant, States
from benchmarks.preparing import prepared, turn, usable
from benchmarks.results import FOLDER, slug
from benchmarks.sweep import SWEEPS, candidates
from benchmarks.timing import Ceilings, CudaTimer, Timer, host_us, measure_ceilings, timer_for

TOLERANCE = 1e-2  # of the root mean square, bf16 inputs


@dataclass(eq=False)
class Entrant:
    """A contestant that is ready to be timed, its record, and the times of the rounds so far."""

    record: Record
    call: Call
    replay: Callable[[], object] | None
    plain_us: list[float] = field(default_factory=list)
    graph_us: list[float] = field(default_factory=list)
    states: States | None = None


def rms_error(got: Tensor, want: Tensor) -> float:
    """Return the root mean square of the difference over that of the right result."""
    difference = got.reshape(want.shape).double() - want
    return float(difference.square().mean().sqrt() / want.square().mean().sqrt())


def check(record: Record, inputs: LinearInputs, call: Call, states: States | None) -> None:
    """Call once, and record how far outputs and states are from the reference."""
    out, last = inputs.reference
    got = call()
    if inputs.case.op != "commit":
        record["out_error"] = rms_error(got, out)
    if states is not None:
        record["state_error"] = rms_error(states(), last)
    errors = [record[name] for name in ("out_error", "state_error") if name in record]
    record["wrong"] = not all(error <= TOLERANCE for error in errors)


def captured(record: Record, call: Call) -> Callable[[], object] | None:
    """Return the replay of a CUDA graph of a call; what capture raises is recorded."""
    try:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no annotation here
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()
    except Exception as raised:  # not everything can be captured, and that is a finding too
        record["graph_error"] = text(raised)
        return None
    return graph.replay


def entrant(
    contestant: LinearContestant, inputs: LinearInputs, limit_s: float | None
) -> Entrant | Record:
    """Prepare one contestant; return its record alone if it cannot be called."""
    record: Record = {"name": contestant.name}

    def prepare() -> tuple[Call, States | None]:
        module = contestant.load()
        contestant.prepare(inputs, module)[0]()  # compiles; its states are left alone from here on
        return contestant.prepare(inputs, module)

    start = time.perf_counter()
    try:
        call, states = prepared(contestant.name, prepare, limit_s)
    except Exception as raised:  # another project's code may raise anything: record it, go on
        return record | {"error": text(raised)}
    record["prepare_s"] = round(time.perf_counter() - start, 1)
    return Entrant(record, call, None, states=states)


def check_and_capture(x: Entrant, inputs: LinearInputs, timer: Timer) -> None:
    """Check a contestant, and capture its call for a GPU."""
    try:
        check(x.record, inputs, x.call, x.states)
        x.replay = captured(x.record, x.call) if isinstance(timer, CudaTimer) else None
    except Exception as raised:
        x.record["error"] = text(raised)


def time_rounds(ready: Sequence[Entrant], timer: Timer, rounds: int) -> None:
    """Time all in turn, the order turned by one each round, and record the medians."""
    for lap in range(rounds):
        at = lap % max(1, len(ready))
        for x in (*ready[at:], *ready[:at]):
            if "error" in x.record:
                continue
            try:
                x.plain_us.append(timer.measure(x.call).us)
                if x.replay is not None:
                    x.graph_us.append(timer.measure(x.replay).us)
                if not lap:
                    x.record["host_us"] = host_us(x.call)
            except Exception as raised:
                x.record["error"] = text(raised)
    for x in ready:
        for name, times in (("us", x.plain_us), ("graph_us", x.graph_us)):
            if times:
                x.record[name] = statistics.median(times)


def measure(
    case: LinearCase,
    contestants: Iterable[LinearContestant],
    *,
    device: torch.device,
    timer: Timer,
    ceilings: Ceilings,
    rounds: int,
    deadline: float,
    prepare_limit_s: float | None = None,
    turns: pathlib.Path | None = None,
) -> Record:
    """Return the record of a case: one entry per contestant that takes it, ours first."""
    inputs = build(case, device)
    entries: list[Record] = []
    ready: list[Entrant] = []
    for contestant in contestants:
        if not contestant.takes(case):
            continue
        if time.monotonic() > deadline:
            entries.append({"name": contestant.name, "error": "not measured: --seconds is over"})
            continue
        got = entrant(contestant, inputs, prepare_limit_s)
        entries.append(got.record if isinstance(got, Entrant) else got)
        if isinstance(got, Entrant):
            ready.append(got)
    with turn(turns):
        for x in ready:
            check_and_capture(x, inputs, timer)
        time_rounds(ready, timer, rounds)
    floor = ceilings.floor_us(case.bytes, case.flops)
    for record in entries:
        if (spent := best_us(record)) is not None:
            record |= {"gbs": case.bytes / spent / 1e3, "roofline": floor / spent}
    times = {x["name"]: best_us(x) for x in entries}
    own = times.pop(OURS.name, None)
    peers = {name: spent for name, spent in times.items() if spent is not None}
    result: Record = {"name": case.name, **asdict(case), "bytes": case.bytes, "floor_us": floor}
    result["entries"] = [{k: rounded(v) for k, v in x.items()} for x in entries]
    if peers:
        result["best_peer"] = min(peers, key=lambda name: peers[name])
        if own is not None:
            result["ratio"] = rounded(own / min(peers.values()))
    return result


def ratios(result: Record) -> dict[str, float]:
    """Return the times of candidates over that of the best peer, where a sweep has peers."""
    known = {x.name for x in LINEAR_PEERS}
    times = {x["name"]: spent for x in result["entries"] if (spent := best_us(x)) is not None}
    best = min(known & {*times}, key=lambda name: times[name], default=None)
    others = [name for name in times if name not in known]
    if best is None:
        return {}
    return {f"{x} / {best}": rounded(times[x] / times[best]) for x in others}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=__doc__)
    add = parser.add_argument
    add("--only", default="", help="cases whose name matches this pattern")
    add("--peers", default="all", help="names with commas, or none; needs --out")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=1e9, help="begin nothing new after this long")
    add("--prepare-limit", type=float, metavar="SECONDS", help="of one contestant (default: none)")
    add("--turns", type=pathlib.Path, metavar="FILE", help="hold its lock to check and to time")
    add("--device", default="cuda")
    default = "benchmarks/results/linear.….json; of a sweep none"
    add("--out", type=pathlib.Path, help=f"the JSON (default: {default})")
    add("--sweep", choices=SWEEPS, help="candidates of a kernel of ours")
    args = parser.parse_args(arguments)
    if args.peers != "all" and args.out is None and args.sweep is None:
        parser.error("--peers needs --out: a record has all peers")
    if args.prepare_limit is not None and args.out is None and args.sweep is None:
        parser.error("--prepare-limit needs --out: a record has all peers")
    known = [x.name for x in LINEAR_PEERS]
    if unknown := {*args.peers.split(",")} - {*known, "all", "none"}:
        parser.error(f"--peers {', '.join(sorted(unknown))} (there are {', '.join(known)})")
    return args


def chosen(args: argparse.Namespace) -> tuple[LinearContestant, ...]:
    """Return the contestants of a run."""
    names = args.peers.split(",")
    peers = (x for x in LINEAR_PEERS if args.peers == "all" or x.name in names)
    if args.sweep:
        return (*candidates(args.sweep), *(peers if args.peers != "all" else ()))
    return (OURS, *(x for x in peers if args.peers != "all" or x.available()))


@torch.no_grad()
def main(
    arguments: Sequence[str] | None = None,
    *,
    cases: Sequence[LinearCase] = CASES,
    contestants: Sequence[LinearContestant] | None = None,
) -> int:
    args = parse(arguments)
    device, deadline = torch.device(args.device), time.monotonic() + args.seconds
    cases = [case for case in cases if re.search(args.only, case.name)]
    contestants = chosen(args) if contestants is None else contestants
    with turn(args.turns):
        timer = timer_for(device)
        ceilings = measure_ceilings(timer, device)
    name = device_name(device)
    out: pathlib.Path = args.out or FOLDER / f"linear.{slug(name)}.json"
    report: Record = {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "versions": versions(x.distribution for x in contestants),
        "ceilings": asdict(ceilings),
        "rounds": args.rounds,
        "cases": [],
    }
    if args.sweep:
        report["sweep"] = args.sweep
    others = kept(out, report, cases) if args.only and not args.sweep else []
    for number, case in enumerate(cases, 1):
        if time.monotonic() > deadline:
            print(f"--seconds is over: {len(cases) - number + 1} cases are left out")
            break
        print(f"[{number}/{len(cases)}] {case.name}", flush=True)
        try:
            got = measure(
                case, contestants, device=device, timer=timer, ceilings=ceilings,
                rounds=args.rounds, deadline=deadline, prepare_limit_s=args.prepare_limit,
                turns=args.turns,
            )  # fmt: skip
        except RuntimeError as raised:  # out of memory, before any contestant
            got = {"name": case.name, "entries": [{"name": "inputs", "error": text(raised)}]}
        got["commit"] = report["versions"].get("commit")
        if args.sweep:
            got.pop("best_peer", None)  # it may be a candidate
            got["ratios"] = ratios(got)
        report["cases"].append(got)
        for record in got["entries"]:
            print(describe(record), flush=True)
        for pair, ratio in ratios(got).items():
            print(f"  {pair}: {ratio:.3f}", flush=True)
        if args.out is not None or not args.sweep:
            merged = report | {"cases": in_order(others + report["cases"])}
            out.write_text(json.dumps(merged, indent=1) + "\n")
        if not usable(device):
            print("the device is unusable: run the rest without the last contestant", flush=True)
            return 1
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    wrong = [x["name"] for x in report["cases"] if x["entries"][0].get("wrong")]
    if wrong:
        print(f"ours is wrong: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
