"""nsa in graphs: random passes are captured once and replayed with other requests and lengths."""

import dataclasses
import random

import pytest
import torch
from attn_core.plugins.registry import load_plugins
from attn_core.testing.harness import Bench
from attn_core.testing.inputs import Point
from attn_core.testing.replay import replayed
from attn_core.testing.sparse_catalog import SPARSE
from attn_core.testing.tolerance import CheckFailed
from attn_nvidia import nsa
from mla_passes import put_in

CASES = {case.feature: case for case in SPARSE}
GRAPHED = [r for r in load_plugins().get("nsa").capabilities if r.cuda_graph != "never"]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))]
V32 = {"index_dtype": "fp8_e4m3", "fp8_queries": True, "index_shape": (32, 128)}


@pytest.fixture(autouse=True)
def _emulated(vendor):
    """Each replay puts the GPU in that its row is for."""


def named(row):
    return (
        f"{row.sub_backend}-{'sinks' if row.sinks else 'plain'}-{'-'.join(sorted(row.kv_dtypes))}"
    )


def drawn(row, seed):
    """Draw a pass of a row: requests on both sides of what a query attends to."""
    rng = random.Random(f"{named(row)} {seed}")
    n = rng.choice([1, 4]) if row.max_verify_topk else 1
    topk = rng.choice([5, 16, 70])
    lengths = [
        rng.choice([rng.randint(n, n + 3), rng.randint(topk, topk + 4), rng.randint(65, 200)])
        for _ in range(rng.choice([2, 4, 6]))
    ]
    changes = {
        "query_lens": (n,) * len(lengths),
        "seq_lens": tuple(lengths),
        "index_topk": topk,
        "heads": (rng.choice([4, 16, 64]), 1),
        "sinks": row.sinks,
        "kv_dtype": "auto" if "bf16" in row.kv_dtypes else "fp8_e4m3",
        "exact_index": True,
        **(V32 if rng.random() < 0.5 else {}),
    }
    page_size = rng.choice([64, 128])
    case = CASES["dsa-decode" if n == 1 else "dsa-verify-chain"]
    return dataclasses.replace(case, **changes), Point(dtype="bf16", page_size=page_size)


def replay(row, seed):
    spec = load_plugins().get("nsa")
    arch = "sm90" if "sm90" in row.archs else "sm100"
    put_in(arch)
    bench = Bench(spec=spec, row=row, torch_device=torch.device("cpu"), arch=arch)
    replayed(bench, *drawn(row, seed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("row", GRAPHED, ids=named)
def test_random_passes_are_replayed(row, seed):
    replay(row, seed)


def test_a_selection_of_the_capture_is_seen(monkeypatch):
    real = nsa.NSA.index_topk

    def stale(self, *args):
        return args[-1].scored.setdefault("stale", real(self, *args))

    monkeypatch.setattr(nsa.NSA, "index_topk", stale)
    with pytest.raises(CheckFailed):
        replay(GRAPHED[0], 0)
