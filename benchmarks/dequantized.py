"""Measure attention over an FP4 cache that is dequantised first, beside the same over bf16 pages.

Run: `python -m benchmarks.dequantized [--backends NAME,…] [--out FILE.json]`. For each shape: GPU
time with a cold L2 of the copies alone (the layer's pages of the pass, by `read_pages`, and by
PyTorch's own operations), of attention over a bf16 cache, and of the whole call over the FP4 cache.
Outputs are compared with a float32 softmax over the same numbers first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from attn_core.cache.paged_tensor import take_pages
from attn_core.errors import AttnError
from attn_core.ops import kv
from attn_core.plugins.registry import load_plugins

from benchmarks.attention import device_name, versions
from benchmarks.cases import LATENT, ROPE, Case, Inputs, build
from benchmarks.contestant import Contestant
from benchmarks.ours import our_backend
from benchmarks.results import FOLDER, slug
from benchmarks.runner import TOLERANCE
from benchmarks.timing import Timer, measure_ceilings, timer_for

STORE = "fp4_e2m1"
DISTRIBUTIONS = ("triton", "flashinfer-python", "sglang-kernel", "flash-attn-4")
_LATENT = partial(Case, phase="mla", kv_heads=1, head_dim=LATENT + ROPE, v_head_dim=LATENT)
_MLA = tuple(
    _LATENT(batch=batch, length=length, q_heads=heads)
    for heads, batch, length in ((128, 1, 4096), (128, 16, 4096), (128, 64, 8192), (16, 64, 8192))
)
_PROMPTS = (
    Case(phase="extend", batch=8, length=4608, queries=512, page_size=128),
    Case(phase="extend", batch=1, length=32768, queries=2048, page_size=128),
)
CASES = {"flashmla": _MLA, "flashinfer": _MLA, "fa4": _PROMPTS}


def token_bytes(case: Case, store: str) -> int:
    """Return the bytes of a KV token: in FP4 half a byte a number, and a scale for 16 of them."""
    numbers = case.kv_heads * (case.head_dim + (0 if case.kind == "mla" else case.v_head_dim))
    return numbers * 9 // 16 if store == STORE else 2 * numbers


def measure(name: str, case: Case, device: torch.device, timer: Timer) -> dict[str, object]:
    """Time a case over both caches; raises AssertionError for a wrong output."""
    contestant = our_backend(name, load_plugins(), device)
    attention = _timed(contestant, build(case, device), timer)
    inputs = build(replace(case, kv_dtype=STORE), device)
    full = _timed(contestant, inputs, timer)
    size, table = case.page_size, inputs.page_table
    used = torch.arange(table.shape[1], device=device) < -(-inputs.seq_lens[:, None] // size)
    pages, dtype = table[used], inputs.q.dtype
    read: Callable[..., object] = partial(kv.read_pages, inputs.cache, pages, dtype)
    plain: Callable[..., object] = partial(kv._read, inputs.cache, pages, dtype, take_pages)
    copies, torch_copies = timer.measure(read).us, timer.measure(plain).us
    tokens = pages.numel() * size
    stored, copied = token_bytes(case, STORE), token_bytes(case, case.dtype)
    row: dict[str, object] = {
        "backend": name,
        "case": case.name,
        "kv_tokens": tokens,
        "stored_bytes_a_token": stored,
        "copied_bytes_a_token": copied,
    }
    times = {
        "attention_us": attention,
        "copies_us": copies,
        "torch_copies_us": torch_copies,
        "whole_us": full,
        "copies_gbs": tokens * (stored + copied) / copies / 1e3,
        "copies_to_attention": copies / attention,
        "whole_to_attention": full / attention,
    }
    return row | {key: round(value, 3) for key, value in times.items()}


def _timed(contestant: Contestant, inputs: Inputs, timer: Timer) -> float:
    call = contestant.prepare(inputs)
    error = inputs.error(call())
    assert error <= TOLERANCE, f"{inputs.case.name}: relative error {error:.2g}"
    return timer.measure(call).us


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dequantized", description=__doc__)
    parser.add_argument("--backends", default=",".join(CASES), help="names with commas")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args(arguments)
    device = torch.device("cuda")
    name, timer = device_name(device), timer_for(device)
    rows: list[dict[str, object]] = []
    failed: dict[str, str] = {}
    record = {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "versions": versions(DISTRIBUTIONS),
        "copy_gbs": round(measure_ceilings(timer, device).copy_gbs, 1),
        "rows": rows,
        "failed": failed,
    }
    out = args.out or FOLDER / f"dequantized.{slug(name)}.json"
    for backend in args.backends.split(","):
        for case in CASES[backend]:
            try:
                row = measure(backend, case, device, timer)
            except (AttnError, AssertionError, ImportError, RuntimeError) as error:
                failed[f"{backend} {case.name}"] = f"{type(error).__name__}: {error}"
                print(backend, case.name, error, flush=True)
            else:
                rows.append(row)
                print(*(f"{key} {value}" for key, value in row.items()), flush=True)
            out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
