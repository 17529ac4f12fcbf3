"""Measure sparse MLA (DSA) on a GPU: the chain of an indexer and attention, its parts, and peers.

Run: `python -m benchmarks.sparse [--only REGEX] [--parts REGEX] [--peers REGEX]
[--ways WARPSxREGISTERS ...] [--rounds N] [--seconds N] [--prepare-limit SECONDS] [--compile]`. The
shapes are DeepSeek-V3.2's. Every result is compared with float64 for some queries first, and our
selections with a sort, bit by bit. FlashInfer compiles its top-k at the first call, for more than a
minute: do it ahead with --compile, or leave it out with `--peers '^(?!flashinfer)'`.
Contestants take turns; a time is the median over the rounds of medians with a cold L2, of replayed
CUDA graphs where there is one. No library has the whole chain: beside ours stands the sum of the
fastest peer of each part, with our write of the index keys, for which no library has a call. The
file is written after each case. With --only the other cases of an earlier file stay, if device and
libraries are the same. The exit code is 1 where a result of ours is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.attention import device_name, versions
from benchmarks.linear import Entrant, captured, time_rounds
from benchmarks.linear_record import Record, best_us, describe, kept, rounded, text
from benchmarks.peers.selections import way
from benchmarks.peers.sparse import CONTESTANTS, Call, SparseContestant, compile_topk
from benchmarks.preparing import prepared, usable
from benchmarks.results import FOLDER, slug
from benchmarks.sparse_cases import CASES, STORES, SparseCase, SparseInputs, build
from benchmarks.sparse_check import check
from benchmarks.timing import Ceilings, CudaTimer, Timer, measure_ceilings, timer_for

Late = set[tuple[str, str]]  # parts and the libraries whose preparing was over the limit


def entrant(
    contestant: SparseContestant,
    inputs: SparseInputs,
    timer: Timer,
    limit_s: float | None,
    late: Late,
) -> tuple[Record, Entrant | None]:
    """Prepare and check one contestant: its record, and what can be timed if anything can.

    One of a library that was late in this part is not prepared again: it would compile as long.
    """
    record: Record = {"name": contestant.name, "part": contestant.label}
    own = contestant.label, contestant.module.partition(".")[0]
    if own in late:
        return record | {"error": "not prepared: its library was over --prepare-limit before"}, None

    def prepare() -> Call:
        call = contestant.prepare(inputs, contestant.load())
        check(record, inputs, contestant, call)
        return call

    start = time.perf_counter()
    try:
        call = prepared(f"{contestant.label} {contestant.name}", prepare, limit_s)
    except Exception as raised:  # another project's code may raise anything: record it, go on
        late.update({own} if isinstance(raised, TimeoutError) else ())
        return record | {"error": text(raised)}, None
    record["prepare_s"] = round(time.perf_counter() - start, 1)
    replay = captured(record, call) if isinstance(timer, CudaTimer) else None
    return record, Entrant(record, call, replay)


def measure(
    case: SparseCase,
    contestants: Sequence[SparseContestant],
    *,
    device: torch.device,
    timer: Timer,
    ceilings: Ceilings,
    rounds: int,
    deadline: float,
    prepare_limit_s: float | None = None,
    late: Late | None = None,
) -> Record:
    """Return the record of a case: an entry per contestant and part."""
    late = set() if late is None else late
    inputs = build(case, device)
    entries: list[Record] = []
    for label in dict.fromkeys(x.label for x in contestants):
        ready: list[Entrant] = []
        for contestant in contestants:
            if contestant.label != label or not contestant.takes(case):
                continue
            if time.monotonic() > deadline:
                record: Record = {"error": "not measured: --seconds is over"}
                entries.append({"name": contestant.name, "part": label} | record)
                continue
            record, made = entrant(contestant, inputs, timer, prepare_limit_s, late)
            entries.append(record)
            ready += [made] if made else []
        time_rounds(ready, timer, rounds)
        for x in entries:
            if x["part"] == label:
                print(f" {label:<16}{describe(x)}", flush=True)
        del ready
    result: Record = {"name": case.name, **asdict(case)}
    result["entries"] = [{k: rounded(v) for k, v in x.items()} for x in entries]
    result["parts"] = {
        label: summary(case, label, entries, ceilings)
        for label in dict.fromkeys(x["part"] for x in entries)
    }
    combine(result["parts"])
    return result


def summary(
    case: SparseCase, label: str, entries: Sequence[Record], ceilings: Ceilings
) -> dict[str, Any]:
    """Return a part's floor, and the fastest of ours and of the peers."""
    part, _, store = label.partition(" ")
    rates = (ceilings.copy_gbs, ceilings.matmul_tflops)
    result: Record = {"floor_us": rounded(case.floor_us(part, store or "bf16", *rates))}  # type: ignore[arg-type]
    peers = {x.name for x in CONTESTANTS if not x.ours}
    for side, ours in (("ours", True), ("peer", False)):
        times = {
            x["name"]: us for x in entries
            if x["part"] == label and (x["name"] not in peers) is ours and (us := best_us(x))
        }  # fmt: skip
        if times:
            name = min(times, key=lambda x: times[x])
            result |= {side: name, f"{side}_us": rounded(times[name])}
        if ours and "triton" in times:
            result["triton_us"] = rounded(times["triton"])
    return result


def combine(parts: dict[str, Record]) -> None:
    """Give chains and selections the sum of the fastest peers of their parts."""

    def total(*labels: str) -> float | None:
        times = [parts.get(x, {}).get("triton_us" if x == "write" else "peer_us") for x in labels]
        return None if None in times else rounded(sum(t for t in times if t is not None))

    sums = {"index_topk": total("score", "select")}
    sums |= {f"chain {s}": total("write", "score", "select", f"attend {s}") for s in STORES}
    for label, us in sums.items():
        if us is not None and label in parts:
            parts[label] |= {"peer": "best of each part", "peer_us": us}
    for x in parts.values():
        for name in ("triton", "ours"):
            if f"{name}_us" in x and "peer_us" in x:
                x[f"{name}_ratio"] = rounded(x[f"{name}_us"] / x["peer_us"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse", description=__doc__)
    add = parser.add_argument
    add("--only", default="", help="cases whose name matches this pattern")
    add("--parts", default="", help="parts that match this pattern; needs --out")
    add("--peers", default="", help="peers whose name matches this pattern; needs --out")
    add(
        "--ways", nargs="+", type=way, default=[],
        metavar="WARPSxREGISTERS", help="select in these ways besides, as in 4x128; needs --out",
    )  # fmt: skip
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=1e9, help="begin nothing new after this long")
    add("--prepare-limit", type=float, metavar="SECONDS", help="of one contestant (default: none)")
    add("--device", default="cuda")
    add("--compile", action="store_true", help="compile FlashInfer's top-k ahead, and end")
    add("--out", type=pathlib.Path, help="the JSON (default: benchmarks/results/sparse.….json)")
    args = parser.parse_args(arguments)
    for name, is_set, has in (
        ("parts", args.parts, "all parts"),
        ("peers", args.peers, "all peers"),
        ("ways", args.ways, "one way of each"),
        ("prepare-limit", args.prepare_limit is not None, "all peers"),
    ):
        if is_set and args.out is None:
            parser.error(f"--{name} needs --out: a record has {has}")
    return args


def requested(
    args: argparse.Namespace, contestants: Sequence[SparseContestant]
) -> list[SparseContestant]:
    """Return the contestants that the command line asks for."""
    result = [x for x in contestants if x.ours or re.search(args.peers, x.name)]
    return [x for x in (*result, *args.ways) if re.search(args.parts, x.label)]


@torch.no_grad()
def main(
    arguments: Sequence[str] | None = None,
    *,
    cases: Sequence[SparseCase] = CASES,
    contestants: Sequence[SparseContestant] = CONTESTANTS,
) -> int:
    args = parse(arguments)
    if args.compile:
        prepared("select flashinfer", compile_topk, args.prepare_limit)
        return 0
    device, deadline = torch.device(args.device), time.monotonic() + args.seconds
    names = [case.name for case in cases]
    cases = [case for case in cases if re.search(args.only, case.name)]
    contestants = requested(args, contestants)
    taken = [x for x in contestants if x.available()]
    timer = timer_for(device)
    ceilings = measure_ceilings(timer, device)
    name = device_name(device)
    out: pathlib.Path = args.out or FOLDER / f"sparse.{slug(name)}.json"
    report: Record = {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "versions": versions(x.distribution for x in taken if not x.ours),
        "ceilings": asdict(ceilings),
        "rounds": args.rounds,
        "cases": [],
    }
    others, late = kept(out, report, cases) if args.only else [], Late()
    for number, case in enumerate(cases, 1):
        if time.monotonic() > deadline:
            print(f"--seconds is over: {len(cases) - number + 1} cases are left out")
            break
        print(f"[{number}/{len(cases)}] {case.name}", flush=True)
        actual = measure(
            case, taken, device=device, timer=timer, ceilings=ceilings,
            rounds=args.rounds, deadline=deadline, prepare_limit_s=args.prepare_limit, late=late,
        )  # fmt: skip
        actual["commit"] = report["versions"].get("commit")
        report["cases"].append(actual)
        for label, part in actual["parts"].items():
            print(f"  {label}: {part}", flush=True)
        ordered = sorted(others + report["cases"], key=lambda x: names.index(x["name"]))
        out.write_text(json.dumps(report | {"cases": ordered}, indent=1) + "\n")
        if not usable(device):
            print("the device is unusable: run the rest without the last contestant", flush=True)
            return 1
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    own = {x.name for x in contestants if x.ours}
    wrong = [
        f"{case['name']} {x['part']} {x['name']}" for case in report["cases"]
        for x in case["entries"] if x["name"] in own and x.get("wrong")
    ]  # fmt: skip
    if wrong:
        print(f"ours is wrong: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
