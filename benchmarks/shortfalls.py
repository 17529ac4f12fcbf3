"""Name the recorded cases that take longer than is wanted of them: a part of the performance page.

Torch-free. A case counts as it was measured last; a new record changes the table.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.plots import time
from benchmarks.results import FOLDER, Measured, Report

Record = dict[str, Any]
HOST_US = "30 µs"
_CHAIN, _DUAL_CHUNK, _SPARSE_PROMPTS = 1.1, 1.05, 2.0
_RAGGED_MEAN = 0.99  # of decode in all log-normal shapes
_PREFILL, _DECODE, _LATENT, _LATENT_16 = 1.02, 1.01, 1.05, 1.03
_NOT_MEASURED = "was not measured"


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """A case that takes longer than wanted. ours, other: times; factor: what was found."""

    name: str
    ours: str
    other: str
    factor: float
    wanted: str
    measured: str

    @property
    def cause(self) -> str:
        """The key of its cause in CAUSES."""
        return next(key for key, (pattern, _) in CAUSES.items() if re.search(pattern, self.name))


# key → what the names of its cases match, and why they take long; the first that matches counts
CAUSES: Mapping[str, tuple[str, str]] = {
    "copies": (
        r"^triton: .*chain fp8",
        "The selected FP8 latents are decoded to 16 bits by a launch of their own, and attention "
        "reads the copies. FlashMLA's kernel decodes while it copies; nsa calls it.",
    ),
    "chain": (
        r"^\S+: .*chain ",
        "Scores and attention each take a little longer than the fastest peer of the part.",
    ),
    "portable": (
        r"^triton: .*extend",
        "Chunks are known to the portable kernel alone, which has no warps that only copy. The "
        "documented row calls FA3.",
    ),
    "parts": (
        r"^dual_chunk_flash_attn: ",
        "Up to three calls of FA3, for each kind of chunk, and a launch that merges them. triton "
        "reads all keys in one launch.",
    ),
    "rotations": (r"^triton: ", "The portable kernel reads up to three rotations of each query."),
    "host": (
        r"^host, ",
        "A launch costs what the driver takes, so that a call's time is bounded by the number of "
        "its kernels; the rest is Python between the dispatcher and the launch. Sparse MLA calls "
        "the dispatcher twice a layer, with its model's indexer between.",
    ),
    "begin": (
        r"^mla\S* B\d+ L~?(\d{1,3}|1\d{3}|4096) ",
        "Few keys for each program: its queries and first keys come from memory before its first "
        "product, when nothing else is under way, and a second launch merges cut requests. With 16 "
        "or 32 heads and one query a tile of 64 rows is partly empty. Before these, the flush of "
        "the benchmark leaves lines in the L2 that have to be written back first. After a flush "
        "that reads, as --clean does, ours took less on an H100 and FlashMLA did not (seen by "
        "hand, not recorded). Its copies are marked to be evicted first; Gluon's lack that "
        "operand, .L2::cache_hint.",
    ),
    "sharing": (
        r"^mla",
        "The tiles of a request read its latents through the L2 cache, one beside the other. To "
        "share one copy, two programs need TMA multicast, which Gluon 3.6 does not have. It has no "
        "named barriers either, by which FlashMLA's warps meet.",
    ),
    "exponentials": (
        r"^(prefill|extend) .* D64 ",
        "With heads of 64 a score takes as long in the exponential unit as in the tensor cores, so "
        "that neither hides the other completely. Polynomials in place of a part of the "
        "exponentials were slower.",
    ),
    "blocks": (
        r"^(prefill|extend) .* D256 ",
        "Supposed, not traced: shared memory holds blocks of 64 keys with heads of 256, where FA3 "
        "has 80, so that sums are rescaled more often.",
    ),
    "gathered": (
        r"^(prefill|extend) .* p[1-4]( |$)",
        "Pages of fewer than 8 tokens are gathered by four warps, row by row.",
    ),
    "prompts": (
        r"^(prefill|extend) ",
        "Most were measured before the softmax ran beside a product (prompts.nvidia-h200.json has "
        "some that were measured since); short prompts have few tiles for the GPU's processors.",
    ),
    "rows": (
        r"^(verify|decode|fp[48]|stores\S*) ",
        "Not found: the keys are read at nearly the rate of the peer.",
    ),
}  # fmt: skip
_HEAD = """
## Where it falls short

The cases that take longer than is wanted of them, each as it was measured last. Wanted is at most

- {latent} times the fastest peer for latents, and {latent_16} with 16 heads;
- {prefill} times for prompts and appends, and {decode} for decode, verification and FP8 caches;
- {mean} times in the geometric mean of decode with log-normal lengths, which {means};
- {chain} times the sum of the fastest peers of each part for a chain of sparse MLA;
- {dual_chunk} times plain FlashAttention-3 over as many keys for dual chunk attention, and
  1 / {faster} of it for sparse prompts at density 0.125, which {sparse};
- {host} of the host for a call of triton's layers with its writes; sparse MLA has two a layer.

"""


def shortfalls_section(reports: Mapping[str, Report]) -> str:
    """Write the table of all cases that fall short, and their causes; "" without records."""
    result = [*_attention(reports), *_chains(), *_dual_chunk(), *_host()]
    if not reports:
        return ""
    head = _HEAD.format(
        latent=_LATENT, latent_16=_LATENT_16, prefill=_PREFILL, decode=_DECODE, chain=_CHAIN,
        mean=_RAGGED_MEAN, means=_means(reports), dual_chunk=_DUAL_CHUNK,
        faster=f"{_SPARSE_PROMPTS:g}", sparse=_sparse_prompts(), host=HOST_US,
    )  # fmt: skip
    if not result:
        return head + "None does.\n"
    result.sort(key=lambda x: (list(CAUSES).index(x.cause), -x.factor))
    rows = [["case", "ours, µs", "other, µs", "factor", "wanted", "measured", "cause"]]
    rows += [["---", "---:", "---:", "---:", "---:", "---", "---"]]
    rows += [
        [x.name, x.ours, x.other, f"{x.factor:.3f}", x.wanted, x.measured, x.cause] for x in result
    ]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    causes = "\n".join(f"- **{k}**: {CAUSES[k][1]}" for k in dict.fromkeys(x.cause for x in result))
    return f"{head}{table}\n\n{causes}\n"


def limit_of(case: Measured) -> float:
    """Return how many times as long as the fastest peer a case may take."""
    if case.phase.startswith("mla"):
        return _LATENT_16 if case.shape.get("q_heads") == 16 else _LATENT
    return _PREFILL if case.phase in ("prefill", "extend") else _DECODE


def newest(reports: Mapping[str, Report]) -> Iterator[tuple[Report, Measured]]:
    """Yield each case of the reports as it was measured last."""
    last: dict[str, tuple[Report, Measured]] = {}
    for report in sorted(reports.values(), key=lambda r: r.date):
        last |= {m.name: (report, m) for m in report.cases if m.ratio is not None}
    yield from last.values()


def _attention(reports: Mapping[str, Report]) -> Iterator[Shortfall]:
    for report, m in newest(reports):
        limit, best = limit_of(m), m.best_peer
        if m.ratio is not None and best is not None and m.ratio > limit:
            yield Shortfall(
                name=m.name, ours=time(m.ours.us), other=f"{time(best.us)} ({best.name})",
                factor=m.ratio, wanted=f"{limit:g}", measured=_when(report.device, report.date),
            )  # fmt: skip


def _means(reports: Mapping[str, Report]) -> str:
    """Say the geometric mean of decode in the last log-normal record, and whether it is met."""
    ragged = [r for r in reports.values() if r.suite == "ragged"]
    for report in sorted(ragged, key=lambda r: r.date, reverse=True):
        ratios = [m.ratio for m in report.cases if m.phase == "decode" and m.ratio is not None]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            return _said(f"is {mean:.3f}", report.device, mean <= _RAGGED_MEAN)
    return _NOT_MEASURED


def _said(what: str, device: str, met: bool) -> str:
    return f"{what} ({device}): {'met' if met else '**not met**'}"


def _chains() -> Iterator[Shortfall]:
    for report, case in _newest_cases("sparse"):
        for part, x in case["parts"].items():
            if not part.startswith("chain") or "peer_us" not in x:
                continue
            of = {"triton": x.get("triton_us"), x.get("ours", ""): x.get("ours_us")}
            for name, us in of.items():
                if us is not None and us > _CHAIN * x["peer_us"]:
                    yield Shortfall(
                        name=f"{name}: {case['name']}, {part}", ours=time(us),
                        other=f"{time(x['peer_us'])} ({x['peer']})", factor=us / x["peer_us"],
                        wanted=f"{_CHAIN:g}", measured=_when(report["device"], report["date"]),
                    )  # fmt: skip


def _dual_chunk() -> Iterator[Shortfall]:
    for report, case in _newest_cases("dual_chunk"):
        base, *ours = case["entries"]
        for x in ours:
            if x.get("ratio", 0) > _DUAL_CHUNK and not x.get("wrong"):
                yield Shortfall(
                    name=f"{x['name']}: {case['name']}", ours=time(x["us"]),
                    other=f"{time(base['us'])} ({base['name']})", factor=x["ratio"],
                    wanted=f"{_DUAL_CHUNK:g}", measured=_when(report["device"], report["date"]),
                )  # fmt: skip


def _host() -> Iterator[Shortfall]:
    """Yield calls of triton's layers that are over the limit of their record."""
    for report, call in _newest_cases("layer_calls", "calls"):
        own = re.match(r"(triton |mla|dsa|gdn|kda)\b", call["name"])
        if own and call["us"] > report["limit_us"]:
            yield Shortfall(
                name=f"host, {call['name']}", ours=time(call["us"]), other="-",
                factor=call["us"] / report["limit_us"], wanted=HOST_US,
                measured=_when(report["device"], report["date"]),
            )  # fmt: skip


def _sparse_prompts() -> str:
    """Say how much faster sparse prompts are at density 1/8, and whether that is enough."""
    for report, case in _newest_cases("vertical_slash"):
        if case["name"] == "density 0.125" and "times_as_fast" in case:
            times = case["times_as_fast"]
            message = f"are {times:.2f} times as fast"
            return _said(message, report["device"], times >= _SPARSE_PROMPTS)
    return _NOT_MEASURED


def _newest_cases(suite: str, key: str = "cases") -> Iterator[tuple[Record, Record]]:
    """Yield each case of a suite's records as it was measured last, with its record."""
    reports: Sequence[Record] = [json.loads(p.read_text()) for p in FOLDER.glob(f"{suite}.*.json")]
    last: dict[str, tuple[Record, Record]] = {}
    for report in sorted(reports, key=lambda r: str(r["date"])):
        last |= {case["name"]: (report, case) for case in _layers(report[key])}
    yield from last.values()


def _layers(cases: Sequence[Record]) -> Iterator[Record]:
    """Yield cases; of a sparse layer's calls both together, and no plan, which is made once."""
    times = {case["name"]: case.get("us") for case in cases}
    for case in cases:
        name, _, call = case["name"].partition(": ")
        if call == "index_topk":
            both = case["us"] + times[f"{name}: attend"]
            yield {"name": f"{name}: index_topk and attend", "us": both}
        elif not call:
            yield case


def _when(device: str, date: str) -> str:
    return f"{device}, {date[:10]}"
