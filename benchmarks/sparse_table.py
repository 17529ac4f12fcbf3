"""Turn the records of sparse MLA into a part of the performance page."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.plots import time
from benchmarks.results import FOLDER

Record = dict[str, Any]
_HEAD = """
## {device}: sparse MLA

{date}, {versions}. Copy {copy:.0f} GB/s, matmul {matmul:.0f} TFLOP/s. Recorded in `{file}` by
`python -m benchmarks.sparse`: DeepSeek-V3.2's shape, 128 heads, 64 index heads of 128, 2,048 keys a
query; replayed CUDA graphs with a cold L2, rounds: {rounds}. Some queries of every result are
compared with float64. No library has the whole chain: beside it stands the sum of the fastest peer
of each part and of our write of the index keys. Ratios are our time over the peers'; "floor" is the
least time by traffic and work, FP8 products at twice bf16's rate.
"""


def sparse_sections() -> str:
    """Write all records of sparse MLA, a table for each case."""
    return "".join(
        _section(path.name, json.loads(path.read_text()))
        for path in sorted(FOLDER.glob("sparse.*.json"))
    )


def _section(file: str, report: Record) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items() if v)
    head = _HEAD.format(
        device=report["device"], date=report["date"], versions=versions, file=file,
        copy=report["ceilings"]["copy_gbs"], matmul=report["ceilings"]["matmul_tflops"],
        rounds=report["rounds"],
    )  # fmt: skip
    return head + "".join(map(_case, report["cases"]))


def _case(case: Record) -> str:
    rows = [["part", "triton", "triton / peer", "fastest of ours", "peer", "floor"], ["---"] * 6]
    for part, x in case["parts"].items():
        ratio = f"{x['triton_ratio']:.2f}" if "triton_ratio" in x else "-"
        rows.append([part, _us(x, "triton"), ratio, _named(x, "ours"), _named(x, "peer")])
        rows[-1].append(time(x["floor_us"]))
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"\n### Sparse MLA: {case['name']}\n\nµs\n\n{table}\n{_failures(case)}"


def _us(part: Record, side: str) -> str:
    return time(part[f"{side}_us"]) if f"{side}_us" in part else "-"


def _named(part: Record, side: str) -> str:
    return f"{_us(part, side)} ({part[side]})" if side in part else "-"


def _failures(case: Record) -> str:
    """List what a contestant raised, and what was wrong."""
    lines = [
        f"- {x['part']}, {x['name']}: `{x.get('error', 'a wrong result')[:120]}`"
        for x in case["entries"]
        if "error" in x or x.get("wrong")
    ]
    return "\nNot measured, or wrong:\n\n" + "\n".join(lines) + "\n" if lines else ""
