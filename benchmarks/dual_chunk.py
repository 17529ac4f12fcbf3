"""Measure dual chunk attention beside plain FlashAttention-3 over as many keys, on a GPU.

Run: `python -m benchmarks.dual_chunk [--only REGEX] [--rounds N] [--seconds N]`. The shape is that
of Qwen2.5-7B-Instruct-1M. Each result is compared with its definition in float32, the contestants
take turns, and a time is the median over the rounds of medians with a cold L2. What a contestant
raises is recorded, and the rest goes on. The file is written after each case. With --only the other
cases of an earlier file stay, if device and libraries are the same. The exit code is 1 where a
result of ours is wrong.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from attn_core.cache.page_table import slot_table
from attn_core.ops.kv import read_kv
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.dual_chunk import DualChunk
from torch import Tensor

from benchmarks.attention import device_name, versions
from benchmarks.cases import Case, Inputs, build
from benchmarks.contestant import Contestant
from benchmarks.ours import our_backend
from benchmarks.peers.flash_attention import FA3
from benchmarks.results import FOLDER, Entry, slug
from benchmarks.runner import describe, measure
from benchmarks.timing import Ceilings, Timer, measure_ceilings, timer_for

Record = dict[str, Any]
QWEN_1M = DualChunk(chunk_size=262144, local_size=8192, original_max_position_embeddings=262144)
HEADS: dict[str, Any] = {"q_heads": 28, "kv_heads": 4}  # of Qwen2.5-7B-Instruct-1M


def cases() -> Iterator[Case]:
    """Yield the cases: two chunks, a border among the new tokens, and three chunks."""
    for batch in (1, 4):
        yield Case(phase="extend", batch=batch, length=262144 + 4096, queries=4096, **HEADS)
        yield Case(phase="decode", batch=batch, length=266240, **HEADS)
    border = QWEN_1M.chunk_len + 2048
    yield Case(phase="extend", batch=1, length=border, queries=4096, **HEADS)
    yield Case(phase="extend", batch=1, length=2 * border, queries=4096, **HEADS)
    yield Case(phase="decode", batch=1, length=2 * border, **HEADS)


def in_chunks(inputs: Inputs, dual_chunk: DualChunk, seed: int = 1) -> Inputs:
    """Return the same inputs for a layer of dual chunk attention, with q [T, 3, Hq, D]."""
    case, device = inputs.case, inputs.q.device
    rng = torch.Generator(device).manual_seed(seed)
    others = (torch.empty_like(inputs.q).normal_(generator=rng) for _ in range(2))
    layer = replace_layer(inputs.layer, dual_chunk)
    dual = replace(inputs, layer=layer, q=torch.stack([inputs.q, *others], 1))
    starts = [0]
    for n in case.query_lens:
        starts.append(starts[-1] + n)
    outs = []
    for b, (s, n) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        rows = inputs.rows[(inputs.rows >= starts[b]) & (inputs.rows < starts[b + 1])]
        if not len(rows):
            continue
        slots = slot_table(inputs.page_table[b : b + 1], case.page_size, s)[0]
        k, v = read_kv(inputs.cache, slots, torch.float32)  # [s, Hkv, D]
        assert v is not None  # only a latent has none
        at = s - n + rows - starts[b]
        outs.append(reference(dual.q[rows], k, v, at, case.scale, dual_chunk.chunk_len))
    return replace(dual, wanted=torch.cat(outs))


def replace_layer(layer: AttentionLayer, dual_chunk: DualChunk) -> AttentionLayer:
    """Return a layer like this one, with dual chunk attention."""
    return replace(layer, dual_chunk=dual_chunk)


def reference(q: Tensor, k: Tensor, v: Tensor, at: Tensor, scale: float, length: int) -> Tensor:
    """Attend in float32 with q [N, 3, Hq, D] of the tokens `at` [N] over k, v [s, Hkv, D]."""
    n, _, heads, dim = q.shape
    j = torch.arange(k.shape[0], device=k.device)
    apart = at[:, None] // length - j // length  # [N, s]
    grouped = q.float().view(n, 3, k.shape[1], heads // k.shape[1], dim)
    scores = torch.einsum("nhgd,khd->hgnk", grouped[:, 0], k)
    for rotation in (1, 2):
        met = apart >= rotation
        if met.any():
            scores = torch.where(
                met, torch.einsum("nhgd,khd->hgnk", grouped[:, rotation], k), scores
            )
    scores = (scores * scale).masked_fill_(j > at[:, None], -torch.inf)
    return torch.einsum("hgnk,khd->nhgd", scores.softmax(-1), v).flatten(1, 2)


@dataclass(frozen=True, kw_only=True)
class Field:
    """The contestants of a run: ours take dual chunk attention, the baseline plain attention."""

    ours: Sequence[Contestant]
    baseline: Contestant
    dual_chunk: DualChunk


def measure_case(
    case: Case,
    field: Field,
    *,
    device: torch.device,
    timer: Timer,
    ceilings: Ceilings,
    rounds: int,
) -> Record:
    """Return the record of a case: one entry for each contestant, the baseline first."""
    plain = build(case, device)
    dual = in_chunks(plain, field.dual_chunk)
    floor = ceilings.floor_us(case.bytes, case.flops)
    runs: list[tuple[Contestant, Inputs]] = [(field.baseline, plain)]
    runs += [(x, dual) for x in field.ours]
    result: list[list[Entry]] = [[] for _ in runs]
    for round_number in range(rounds):
        at = round_number % len(runs)
        for i in (*range(at, len(runs)), *range(at)):
            contestant, inputs = runs[i]
            result[i].append(measure(contestant, inputs, timer, floor))
    entries: list[Record] = []
    for each in result:
        failed = next((x for x in each if x.us is None or x.wrong), None)
        us = [x.us for x in each if x.us is not None]
        entry = failed or replace(each[0], us=statistics.median(us))
        print("  " + describe(entry), flush=True)
        entries.append({k: rounded(v) for k, v in asdict(entry).items() if v not in (None, False)})
    times = [None if x.get("wrong") else x.get("us") for x in entries]
    for one, own in zip(entries[1:], times[1:], strict=True):
        if own is not None and times[0] is not None:
            one["ratio"] = rounded(own / times[0])
    return {"name": case.name, "tokens": case.tokens, "flops": case.flops, "entries": entries}


def rounded(value: Any) -> Any:
    """Keep four digits of a float."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def kept(path: pathlib.Path, report: Record, names: Sequence[str]) -> list[Record]:
    """Return the cases of an earlier record that are not measured now.

    Only where device and libraries are the same.
    """
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())

    def libraries(record: Record) -> Record:
        return {k: v for k, v in record["versions"].items() if k != "commit"}

    if earlier["device"] != report["device"] or libraries(earlier) != libraries(report):
        return []
    return [x for x in earlier["cases"] if x["name"] not in names]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dual_chunk", description=__doc__)
    add = parser.add_argument
    add("--only", default="", help="cases whose name matches this pattern")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=1e9, help="begin no case after this long")
    add("--device", default="cuda")
    add("--out", type=pathlib.Path, help="the JSON (default: benchmarks/results/dual_chunk.….json)")
    return parser.parse_args(arguments)


@torch.no_grad()
def main(
    arguments: Sequence[str] | None = None,
    *,
    all_cases: Sequence[Case] | None = None,
    field: Field | None = None,
) -> int:
    args, start = parse(arguments), time.monotonic()
    device = torch.device(args.device)
    every = list(cases()) if all_cases is None else list(all_cases)
    chosen = [case for case in every if re.search(args.only, case.name)]
    registry = load_plugins()
    field = field or Field(
        ours=[
            our_backend(name, registry, device, QWEN_1M)
            for name in ("dual_chunk_flash_attn", "triton")
        ],
        baseline=FA3,
        dual_chunk=QWEN_1M,
    )
    timer = timer_for(device)
    ceilings = measure_ceilings(timer, device)
    name = device_name(device)
    out: pathlib.Path = args.out or FOLDER / f"dual_chunk.{slug(name)}.json"
    report: Record = {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "versions": versions(x.distribution for x in (field.baseline, *field.ours)),
        "ceilings": asdict(ceilings),
        "rounds": args.rounds,
        "baseline": field.baseline.name,
        "cases": [],
    }
    report["cases"] = kept(out, report, [x.name for x in chosen]) if args.only else []
    wrong = False
    order: dict[str, int] = {case.name: i for i, case in enumerate(every)}
    work: list[tuple[str, Callable[[], Record]]] = [
        (
            case.name,
            lambda case=case: measure_case(  # type: ignore[misc]  # the case of its own turn
                case, field, device=device, timer=timer, ceilings=ceilings, rounds=args.rounds
            ),
        )
        for case in chosen
    ]
    for number, (title, run) in enumerate(work, 1):
        if time.monotonic() - start > args.seconds:
            print(f"--seconds is over: {len(work) - number + 1} cases are left out")
            break
        print(f"[{number}/{len(work)}] {title}", flush=True)
        actual = run()
        actual["commit"] = report["versions"].get("commit")
        wrong |= any(x.get("wrong", False) for x in actual["entries"][1:])
        report["cases"].append(actual)
        report["cases"].sort(key=lambda x: order.get(x["name"], len(order)))
        out.write_text(json.dumps(report, indent=1) + "\n")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
