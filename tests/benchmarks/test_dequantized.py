"""The benchmark of FP4 caches counts its bytes, and times both caches on a CPU."""

import json
from dataclasses import replace

import pytest
import torch
from attn_core.cache.pool import KVPool
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.device import parse_device

from benchmarks import dequantized
from benchmarks.cases import Case
from benchmarks.ours import row_of
from benchmarks.timing import WallTimer

FOUND = {"flashinfer-python": "0.6.14", "sglang-kernel": "0.4.5", "flash-attn-4": "4.0.0b18"}
_MLA = {"kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
_MHA = {"kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
SMALL = {
    "mla": Case(phase="mla", batch=2, length=20, q_heads=2, **_MLA),
    "extend": Case(phase="extend", batch=2, length=20, queries=7, q_heads=4, **_MHA),
}


@pytest.mark.parametrize("phase", SMALL)
@pytest.mark.parametrize("store", ["bf16", dequantized.STORE])
def test_the_bytes_of_a_token_are_those_of_a_pool(phase, store):
    case = SMALL[phase]
    layer = AttentionLayer(
        layer_id=0, num_q_heads=case.q_heads, num_kv_heads=case.kv_heads, head_dim=case.head_dim,
        v_head_dim=case.v_head_dim, scale=1.0,
    )  # fmt: skip
    pool = KVPool([layer], num_pages=2, page_size=16, kv_cache_dtype=store, kind=case.kind)
    nbytes = sum(part.nbytes for part, _ in pool.layer(0).parts())
    assert dequantized.token_bytes(case, store) * 2 * 16 == nbytes


@pytest.mark.parametrize("phase", SMALL)
def test_both_caches_are_timed(phase):
    row = dequantized.measure("torch_native", SMALL[phase], torch.device("cpu"), WallTimer())
    assert row["kv_tokens"] == 2 * 64, "whole pages are copied"
    assert row["copies_us"] > 0
    assert row["whole_us"] > 0
    json.dumps(row)


@pytest.mark.parametrize("name", dequantized.CASES)
def test_the_cases_run_over_copies(name, monkeypatch):
    registry = load_plugins()
    monkeypatch.setattr(type(registry), "installed_libraries", lambda self: FOUND)
    device = parse_device("cuda:sm90", "13.0")
    for case in dequantized.CASES[name]:
        row = row_of(name, replace(case, kv_dtype=dequantized.STORE), registry, device)
        assert row.create.startswith("attn_nvidia.dequantized:")
        assert row_of(name, case, registry, device).create != row.create
