"""Measure vertical-slash sparse prefill of 256k tokens beside dense prefill, on a GPU.

Run: `python -m benchmarks.vertical_slash [--rounds N] [--tokens N]`. The shape is that of
Qwen2.5-7B-Instruct-1M. Lines are drawn by `draw_indexes` from a seed for each density; our kernel
and sglang-kernel's attend to the same lists of keys. Both are compared with float32 attention over
the listed keys. What it costs to choose lines and to list keys is timed apart. The file is written
after each density; the exit code is 1 where a result of ours is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import math
import pathlib
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from attn_core.ops.vertical_slash import (
    FIRST_KEYS,
    NEAREST,
    ROWS,
    KeyLists,
    Part,
    VerticalSlash,
    choose_vertical_slash,
    kernels_on,
    seen_keys,
)
from torch import Tensor

from benchmarks.attention import device_name, versions
from benchmarks.dual_chunk import rounded
from benchmarks.results import FOLDER, slug
from benchmarks.runner import TOLERANCE
from benchmarks.timing import Timer, measure_ceilings, timer_for

Record = dict[str, Any]
Call = Callable[[], Tensor]
DENSITIES = (0.05, 0.125, 0.25)
TOKENS, HEADS, KV_HEADS, DIM = 262144, 28, 4, 128
GROUP = HEADS // KV_HEADS
VERTICALS, LAST_QUERIES = 1000, 64
SCALE = DIM**-0.5
DENSE, OURS, LIBRARY = "fa3 dense", "triton sparse", "sglang-kernel sparse"


def draw_indexes(density: float, heads: int, tokens: int, seed: int) -> VerticalSlash:
    """Draw lines whose lists hold about this share of the causal pairs, the same for a seed.

    Verticals and slashes are uniform, beside the first keys and the nearest. With x windows' ends
    per ROWS keys, blocks cover x / (x + exp(-x)) of the keys.
    """
    verticals = min(VERTICALS, tokens)
    share = max(density - (verticals + NEAREST) / tokens, 1e-3)
    low, high = 0.0, 20.0
    for _ in range(60):
        x = (low + high) / 2
        low, high = (x, high) if x / (x + math.exp(-x)) < share else (low, x)
    slashes = min(round(low * tokens / ROWS), tokens - NEAREST)
    rng = random.Random(seed)
    vertical, slash = [], []
    for _ in range(heads):
        keys = rng.sample(range(FIRST_KEYS, tokens), verticals - FIRST_KEYS)
        vertical.append(sorted([*range(FIRST_KEYS), *keys]))
        slash.append(
            sorted([*range(NEAREST), *rng.sample(range(NEAREST, tokens), slashes)], reverse=True)
        )
    return VerticalSlash(
        torch.tensor(vertical, dtype=torch.int32), torch.tensor(slash, dtype=torch.int32)
    )


def density_of(lists: Sequence[KeyLists], tokens: int) -> float:
    """Return the listed pairs of queries and keys over the causal ones."""
    listed = sum(
        ROWS * int((ROWS * x.block_count.long() + x.column_count.long()).sum()) for x in lists
    )
    heads = sum(x.block_count.shape[0] for x in lists)
    return listed / (heads * tokens * (tokens + 1) / 2)


@dataclass(frozen=True, eq=False)
class Prompt:
    """q [n, Hq, D], k and v [n, Hkv, D] of one prompt, bf16."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def tokens(self) -> int:
        return self.q.shape[0]

    @property
    def part(self) -> Part:
        return Part(0, self.tokens, 0, self.tokens)

    def of(self, kv_head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of one KV head."""
        own = slice(kv_head * GROUP, (kv_head + 1) * GROUP)
        return self.q[:, own], self.k[:, kv_head], self.v[:, kv_head]


def draw_prompt(tokens: int, device: torch.device, seed: int = 0) -> Prompt:
    """Draw a prompt of normal numbers."""
    rng = torch.Generator(device).manual_seed(seed)
    return Prompt(
        *(
            torch.empty(tokens, heads, DIM, dtype=torch.bfloat16, device=device).normal_(
                generator=rng
            )
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
    )


def ours(prompt: Prompt, lists: Sequence[KeyLists]) -> Call:
    """Attend with our kernel: one launch for each KV head, as in a prefill."""

    attend = kernels_on(prompt.q.device).attend_lists

    def call() -> Tensor:
        outs = [attend(*prompt.of(h), x, prompt.part, SCALE)[0] for h, x in enumerate(lists)]
        return torch.cat(outs, 1)

    return call


def library(prompt: Prompt, lists: Sequence[KeyLists]) -> Call:
    """Attend with sglang-kernel's, in the same calls."""
    attend = importlib.import_module("sgl_kernel.sparse_flash_attn").sparse_attn_func

    def call() -> Tensor:
        outs = []
        for h, x in enumerate(lists):
            q, k, v = prompt.of(h)
            out = attend(
                q[None], k[None, :, None], v[None, :, None], *(y[None] for y in x), causal=True,
                softmax_scale=SCALE,
            )  # fmt: skip
            outs.append(out[0])
        return torch.cat(outs, 1)

    return call


def dense(prompt: Prompt) -> Call:
    """Attend to all keys with FlashAttention-3."""
    attend = importlib.import_module("sgl_kernel.flash_attn").flash_attn_varlen_func
    cu = torch.tensor([0, prompt.tokens], dtype=torch.int32, device=prompt.q.device)

    def call() -> Tensor:
        out: Tensor = attend(
            prompt.q, prompt.k, prompt.v, cu_seqlens_q=cu, cu_seqlens_k=cu,
            max_seqlen_q=prompt.tokens, max_seqlen_k=prompt.tokens, softmax_scale=SCALE,
            causal=True,
        )  # fmt: skip
        return out

    return call


def error_of(out: Tensor, prompt: Prompt, lists: Sequence[KeyLists] | None) -> float:
    """Return the largest relative error of a query among five blocks; None: of dense attention."""
    if not bool(out.isfinite().all()):
        return math.inf
    n, worst = prompt.tokens, 0.0
    blocks = -(-n // ROWS)
    for block in sorted({0, 1, blocks // 3, blocks // 2, blocks - 1}):
        rows = torch.arange(block * ROWS, min((block + 1) * ROWS, n), device=out.device)
        keys = torch.arange(n, device=out.device)
        for h in range(KV_HEADS):
            q, k, v = prompt.of(h)
            seen = (keys <= rows[:, None])[None]
            if lists is not None:
                seen = seen & seen_keys(lists[h], block, n)[:, None]
            scores = q[rows].float().transpose(0, 1) @ k.float().T * SCALE
            expected = scores.masked_fill_(~seen, -torch.inf).softmax(-1) @ v.float()  # [H, R, D]
            actual = out[rows, h * GROUP : (h + 1) * GROUP].float().transpose(0, 1)
            worst = max(
                worst, float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
            )
    return worst


def timed(
    calls: Mapping[str, Call], prompt: Prompt, lists: Sequence[KeyLists], timer: Timer, rounds: int
) -> list[Record]:
    """Check and time each; they take turns. What one raises is recorded."""
    records: dict[str, Record] = {name: {"name": name} for name in calls}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(rounds):
        for name, call in calls.items() if round_number % 2 == 0 else reversed([*calls.items()]):
            record = records[name]
            if "error" in record:
                continue
            try:
                if not round_number:
                    expected = None if name == DENSE else lists
                    record["rel_err"] = rounded(error_of(call(), prompt, expected))
                    record["wrong"] = not record["rel_err"] <= TOLERANCE
                times[name].append(timer.measure(call).us)
            except Exception as raised:  # another project's code may raise anything
                record["error"] = f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
    for name, us in times.items():
        if us and "error" not in records[name]:
            records[name]["us"] = rounded(statistics.median(us))
    return list(records.values())


def measure_density(
    density: float,
    prompt: Prompt,
    timer: Timer,
    rounds: int,
    *,
    peers: bool,
    known: Sequence[Record],
) -> Record:
    """Return the record of a density: dense, ours and the library's; the lists apart.

    known: the entry of dense attention, which depends on no list, once it is measured.
    """
    drawn = draw_indexes(density, HEADS, prompt.tokens, seed=round(density * 1000))
    lines = [
        VerticalSlash(*(x[h * GROUP : (h + 1) * GROUP].to(prompt.q.device) for x in drawn))
        for h in range(KV_HEADS)
    ]
    to_lists = kernels_on(prompt.q.device).to_lists
    lists = [to_lists(x, prompt.part) for x in lines]
    calls: dict[str, Call] = {OURS: ours(prompt, lists)}
    if peers:
        calls |= {LIBRARY: library(prompt, lists)}
        if not known:
            calls = {DENSE: dense(prompt), **calls}
    entries = [*known, *timed(calls, prompt, lists, timer, rounds)]
    sizes = [(drawn.vertical.shape[1], drawn.slash.shape[1])] * GROUP
    last = prompt.q[-LAST_QUERIES:, None].expand(-1, 3, -1, -1)

    def choose() -> None:
        for h in range(KV_HEADS):
            own = slice(h * GROUP, (h + 1) * GROUP)
            choose_vertical_slash(last[:, :, own], prompt.k[:, h], sizes, SCALE, prompt.tokens)

    def make_lists() -> None:
        for x in lines:
            to_lists(x, prompt.part)

    record: Record = {
        "name": f"density {density:g}",
        "seed": round(density * 1000),
        "density": rounded(density_of(lists, prompt.tokens)),
        "verticals": drawn.vertical.shape[1],
        "slashes": drawn.slash.shape[1],
        "choose_us": rounded(timer.measure(choose).us),
        "lists_us": rounded(timer.measure(make_lists).us),
        "entries": entries,
    }
    by_name = {x["name"]: x["us"] for x in entries if "us" in x and not x.get("wrong")}
    if OURS in by_name and DENSE in by_name:
        record["times_as_fast"] = rounded(by_name[DENSE] / by_name[OURS])
        spent = by_name[OURS] + record["choose_us"] + record["lists_us"]
        record["times_as_fast_with_choice"] = rounded(by_name[DENSE] / spent)
    return record


def break_even(cases: Sequence[Record]) -> float | None:
    """Return the density at which sparse prefill takes as long as dense, choice and lists included.

    A straight line through the times by density, by least squares; None of fewer than two.
    """
    points = []
    for case in cases:
        times = {x["name"]: x["us"] for x in case["entries"] if "us" in x}
        if OURS in times and DENSE in times:
            spent = times[OURS] + case["choose_us"] + case["lists_us"]
            points.append((case["density"], spent / times[DENSE]))
    if len(points) < 2:
        return None
    fit = statistics.linear_regression(*zip(*points, strict=True))
    return float(rounded((1 - fit.intercept) / fit.slope))


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vertical_slash", description=__doc__
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3)
    add("--tokens", type=int, default=TOKENS, help="another length needs --out")
    add("--device", default="cuda")
    add("--out", type=pathlib.Path, help="the JSON (default: results/vertical_slash.….json)")
    args = parser.parse_args(arguments)
    if args.tokens != TOKENS and args.out is None:
        parser.error(f"--tokens {args.tokens} needs --out: a record has prompts of {TOKENS}")
    device = torch.device(args.device)
    timer = timer_for(device)
    name = device_name(device)
    out: pathlib.Path = args.out or FOLDER / f"vertical_slash.{slug(name)}.json"
    report: Record = {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "versions": versions(["sglang-kernel", "attn-core"]),
        "ceilings": asdict(measure_ceilings(timer, device)),
        "rounds": args.rounds,
        "shape": {"tokens": args.tokens, "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM},
        "cases": [],
    }
    prompt = draw_prompt(args.tokens, device)
    peers = importlib.util.find_spec("sgl_kernel") is not None and device.type == "cuda"
    wrong = False
    known: list[Record] = []
    for density in DENSITIES:
        case = measure_density(density, prompt, timer, args.rounds, peers=peers, known=known)
        known = [x for x in case["entries"] if x["name"] == DENSE]
        report["cases"].append(case)
        report["break_even_density"] = break_even(report["cases"])
        wrong |= any(x.get("wrong") for x in case["entries"] if x["name"] == OURS)
        print(json.dumps(case), flush=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
