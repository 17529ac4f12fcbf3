"""Measure the one launch that writes new K and V beside PyTorch's own operations.

Run: `python -m benchmarks.write_kv [--out FILE.json]`. For each format of the cache and number of
new tokens: GPU time with a cold L2, and the host's time to queue the call. Both sides are compared
bit by bit first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import time
from functools import partial

import torch
from attn_core.cache.layer_cache import LayerCache
from attn_core.cache.pool import KVPool
from attn_core.ops import kv
from attn_core.runtime.layer import AttentionLayer
from torch import Tensor

from benchmarks.attention import device_name, versions
from benchmarks.results import FOLDER, slug
from benchmarks.timing import Call, timer_for

FORMATS = ("bf16", "fp8_e4m3", "fp4_e2m1")
TOKENS = (1, 64, 2048, 16384)
PAGE_SIZE = 64
DISTRIBUTIONS = ("triton",)


def make_cache(
    kv_cache_dtype: str, *, latent: bool, tokens: int, device: torch.device
) -> LayerCache:
    """Return a cache of Llama-3's heads, or of DeepSeek's latents, for `tokens` tokens."""
    heads, dim, v_dim = (1, 576, 512) if latent else (8, 128, 128)
    layer = AttentionLayer(
        layer_id=0, num_q_heads=32, num_kv_heads=heads, head_dim=dim, v_head_dim=v_dim, scale=1.0
    )
    scales = None if kv_cache_dtype == "bf16" else {0: (0.5, 1.0 if latent else 2.0)}
    pool = KVPool(
        [layer],
        num_pages=tokens // PAGE_SIZE + 2,
        page_size=PAGE_SIZE,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        kind="mla" if latent else "mha",
        scales=scales,
    )
    return pool.layer(0)


def stores(cache: LayerCache) -> list[Tensor]:
    """Return all memory of a cache."""
    parts = [cache.k, cache.v, *(cache.block_scales or ())]
    return [x for x in parts if x is not None]


def host_us(call: Call, *, calls: int = 50, rounds: int = 7) -> float:
    """Return the median microseconds of the host to queue one call."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def measure(
    kv_cache_dtype: str, *, latent: bool, tokens: int, device: torch.device
) -> dict[str, object]:
    """Time both sides on the same tokens; raises where they store other bits."""
    caches = [make_cache(kv_cache_dtype, latent=latent, tokens=tokens, device=device) for _ in "ab"]
    heads, dim = caches[0].k.shape[2], 576 if latent else 128
    k = torch.randn(tokens, heads, dim, device=device).bfloat16()
    v = None if latent else torch.randn(tokens, heads, dim, device=device).bfloat16()
    slots = torch.randperm(tokens, device=device) + PAGE_SIZE
    ours, theirs = caches
    one: Call = partial(kv.write_kv, ours, k, v, slots)
    plain: Call = partial(kv._write, theirs, k, v, slots)
    one()
    plain()
    for a, b in zip(stores(ours), stores(theirs), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), "other bits"
    timer = timer_for(device)
    times = {
        "us": timer.measure(one).us,
        "torch_us": timer.measure(plain).us,
        "host_us": host_us(one),
        "torch_host_us": host_us(plain),
    }
    times["ratio"] = times["us"] / times["torch_us"]
    times["host_ratio"] = times["host_us"] / times["torch_host_us"]
    case = {
        "kv_cache_dtype": kv_cache_dtype,
        "kind": "mla" if latent else "mha",
        "tokens": tokens,
    }
    return case | {name: round(value, 3) for name, value in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    name = device_name(device)
    rows = []
    for kv_cache_dtype in FORMATS:
        for latent in (False, True):
            if latent and kv_cache_dtype == "fp4_e2m1":
                continue
            for tokens in TOKENS:
                row = measure(kv_cache_dtype, latent=latent, tokens=tokens, device=device)
                rows.append(row)
                print(*(f"{key} {value}" for key, value in row.items()), flush=True)
    record = {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "versions": versions(DISTRIBUTIONS),
        "page_size": PAGE_SIZE,
        "rows": rows,
    }
    out = args.out or FOLDER / f"write_kv.{slug(name)}.json"
    out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
