"""Try launch parameters of the triton backend on fixed shapes: `python -m benchmarks.tune`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from attn_core.backends.triton import scheduler
from attn_core.backends.triton.portable import launch as portable
from attn_core.backends.triton.tuning import Launch
from attn_core.plugins.registry import load_plugins

from benchmarks.cases import Case, Inputs, build
from benchmarks.ours import our_backend
from benchmarks.runner import tolerance
from benchmarks.suites import FIXED, cases_of
from benchmarks.timing import timer_for

_DECODES = [(64, 4, 5), (128, 4, 3), (128, 8, 5)]
_BYTES = [(128, 4, 2), (128, 4, 3), (128, 4, 4), (64, 4, 4), (64, 4, 6)]
_BYTES += [(64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 3), (32, 2, 6), (32, 1, 4)]
_HOPPER = [(64, 4, 2), (64, 4, 3)]
_LATENTS = [(64, 4, 2), (32, 4, 2)]
_EXTENDS = [(64, 8, 2), (64, 8, 3), (64, 8, 4), (128, 8, 2), (128, 8, 3), (64, 4, 3), (32, 4, 3)]


def candidates(case: Case) -> Iterator[Launch]:
    """Yield the launch parameters that are worth a try for a case."""
    rows = (case.queries or case.length) * case.q_heads // case.kv_heads
    if case.phase in ("prefill", "extend"):
        for (bn, warps, stages), bm in itertools.product(_EXTENDS, (64, 128)):
            if (bm == 64) == (warps == 4):
                yield Launch(block_m=bm, block_n=bn, warps=warps, stages=stages)
        return
    block_m = max(16, min(64, 1 << (rows - 1).bit_length()))
    tried = _LATENTS if case.kind == "mla" else _DECODES
    small = case.kv_dtype.startswith("fp8")
    grid = [(block_m, *shape) for shape in (_BYTES if small else tried)]
    grid += [] if small else [(64, *shape) for shape in _HOPPER]
    blocks = (1, 2, 4) if case.batch == 1 else (1,)
    together = (2, 3, 4, 5, 6) if small else (1, 2, 3, 4)
    for (bm, bn, warps, stages), ctas_per_sm, min_blocks in itertools.product(
        grid, together, blocks
    ):
        if small:
            stored = ctas_per_sm * stages * bn * case.head_dim
            if not 6 <= ctas_per_sm * warps <= 20 or stored > 111_000:
                continue
        elif ctas_per_sm > (
            1 if (bm, bn) == (64, 64) and case.kind == "mla" else 2 if bm == 64 else 4
        ):
            continue
        yield Launch(
            block_m=bm,
            block_n=bn,
            warps=warps,
            stages=stages,
            ctas_per_sm=ctas_per_sm,
            min_blocks=min_blocks,
            ptx=torch.version.hip is None,
        )


def _prepared(inputs: Inputs, launch: Launch) -> Any:
    with (
        mock.patch.object(scheduler, "decode_launch", return_value=launch),
        mock.patch.object(portable, "extend_launch", return_value=launch),
    ):
        return our_backend("triton", load_plugins(), inputs.q.device).prepare(inputs)


def _compile(work: tuple[Case, list[Launch]]) -> None:
    case, launches = work
    small = dataclasses.replace(case, batch=1, length=max(256, (case.queries or 0)))
    inputs = build(small, "cuda")
    for launch in launches:
        try:
            _prepared(inputs, launch)()
            torch.cuda.synchronize()
        except Exception:  # the timed run says what is wrong
            continue


def tune(case: Case) -> list[dict[str, Any]]:
    """Time every candidate of a case; a wrong or failing one is recorded as such."""
    inputs, timer = build(case, "cuda"), timer_for(torch.device("cuda"))
    rows = []
    for launch in candidates(case):
        row: dict[str, Any] = {"case": case.name, **dataclasses.asdict(launch)}
        try:
            call = _prepared(inputs, launch)
            row["rel_err"] = inputs.error(call())
            row["us"] = timer.measure(call).us if row["rel_err"] < tolerance(case) else None
        except Exception as error:  # one launch that does not fit ends nothing
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        rows.append(row)
    return rows


def main() -> None:
    """Compile in parallel, then time one by one; print the best five of each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", nargs="+", default=list(FIXED))
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    cases = [c for p in args.phase for c in cases_of(p) if args.only in c.name]
    kinds: dict[tuple[Any, ...], tuple[Case, list[Launch]]] = {}
    for c in cases:
        key = (c.phase, c.q_heads, c.kv_heads, c.head_dim, c.page_size, c.queries, c.tree)
        unlike = {(x.block_m, x.block_n, x.warps, x.stages, x.min_blocks): x for x in candidates(c)}
        kinds.setdefault(key, (c, list(unlike.values())))
    work = [(c, part[i::3]) for c, part in kinds.values() for i in range(3)]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        pool.map(_compile, work, chunksize=1)
    results = []
    for case in cases:
        rows = tune(case)
        results += rows
        good = sorted((r for r in rows if r.get("us")), key=lambda r: r["us"])
        print(case.name, f"({len(good)} of {len(rows)})")
        for r in good[:5]:
            keys = ("block_m", "block_n", "warps", "stages", "ctas_per_sm", "min_blocks")
            shape = tuple(r[k] for k in keys)
            print(f"   {r['us']:9.1f} us {shape} err {r['rel_err']:.1e}")
        for text in sorted({r["failed"] for r in rows if "failed" in r})[:2]:
            print("   failed:", text)
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
