"""Torch's kernels for CUDA by name: what they are given is what torch_native means."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from attn_core import AttentionLayer, load_plugins
from attn_core.backends.torch_native import kernels
from attn_core.testing.harness import Bench


def flash(q, k, v, dropout, causal, debug, *, scale):
    assert (dropout, debug) == (0.0, False)
    return (
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True),
    )


def efficient(q, k, v, bias, lse, *, scale):
    assert q.shape[1] == k.shape[1] == v.shape[1]
    assert bias.shape == (*q.shape[:3], k.shape[2])
    assert bias.stride(-1) == 1
    assert bias.stride(-2) % 8 == 0
    return (F.scaled_dot_product_attention(q, k, v, bias, scale=scale),)


@pytest.mark.parametrize("keys", [64, 61])
@pytest.mark.parametrize("how", ["whole", "causal", "masked", "masks"])
def test_kernels_by_name_compute_what_torch_would_choose_for(how, keys, monkeypatch):
    monkeypatch.setattr(kernels, "_FLASH", flash)
    monkeypatch.setattr(kernels, "_EFFICIENT", efficient)
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 8, keys, 32, generator=draw)
    k, v = (torch.randn(2, 2, keys, 32, generator=draw) for _ in range(2))
    mask = None
    if how.startswith("mask"):
        shape = (1 if how == "masked" else 2, 1, keys, keys)
        mask = torch.zeros(shape).masked_fill_(torch.rand(shape, generator=draw) < 0.3, -torch.inf)
        mask[..., 0] = 0.0
    found = kernels._cuda(q, k, v, mask, how == "causal", 0.2)
    right = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=how == "causal", scale=0.2, enable_gqa=True
    )
    torch.testing.assert_close(found, right)


def test_on_other_devices_torch_chooses():
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    assert not kernels._prefers_cudnn(q, q)


@pytest.mark.parametrize("causal", [False, True])
def test_torch_2_8_is_not_asked_for_its_kernel_of_cpus(causal, monkeypatch):
    """It gave wrong numbers there; `nox -s ipex` compares the real one with the suite."""
    monkeypatch.setattr(kernels, "_FLASH_CPU_WRONG", True)
    monkeypatch.setattr(kernels, "_FLASH_CPU", None)
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 8, 33, 32, generator=draw)
    k, v = (torch.randn(2, 2, 33, 32, generator=draw) for _ in range(2))
    tile = SimpleNamespace(mask=None, causal=causal, dead=None)
    rest = {"v_dim": 32, "scale": 0.2, "logit_cap": None, "need_lse": False}
    out, _ = kernels.attend(q, k, v, tile, **rest)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(out, right)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("queries", [1, 17, 100])
def test_queries_of_spread_columns(queries, kv_heads):
    """The heads of one KV head are rows of one product, which torch's kernel read as if dense."""
    layer = AttentionLayer(
        layer_id=0, num_q_heads=4, num_kv_heads=kv_heads, head_dim=32, v_head_dim=32, scale=0.2
    )
    spec = load_plugins().get("torch_native")
    row = next(x for x in spec.capabilities if x.kind == "mha" and x.device == "cpu")
    bench = Bench(spec=spec, row=row, torch_device=torch.device("cpu"))
    backend = bench.create((layer,), dtype="fp32")
    torch.manual_seed(0)
    q, k, v = torch.randn(queries, 4, 32), *torch.randn(2, 9, kv_heads, 32)
    lens = [torch.tensor([0, n], dtype=torch.int32) for n in (queries, 9)]
    spread = torch.stack((q, torch.full_like(q, torch.nan)), -1)[..., 0]
    got, want = (
        backend.forward_ragged(x, k, v, layer, *lens, queries, 9, causal=False) for x in (spread, q)
    )
    assert torch.equal(got, want)
