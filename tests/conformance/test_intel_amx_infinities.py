"""intel_amx over values that are infinite or NaN: they reach queries that see them alone."""

import math
from dataclasses import replace

import pytest
import torch
from amx_kernels import at_level, compiled, spec
from attn_core import ForwardBatch, ForwardMode, LayerCache, SpecInfo
from attn_core.runtime.layer import AttentionLayer
from attn_core.testing.harness import Bench
from attn_intel.cpu.library import LEVELS

PLAIN = AttentionLayer(
    layer_id=0, num_q_heads=2, num_kv_heads=2, head_dim=32, v_head_dim=32, scale=0.2
)


def bench(kind="mha"):
    compiled()
    row = next(r for r in spec().capabilities if r.kind == kind)
    return Bench(spec=spec(), row=row, torch_device=torch.device("cpu"))


def by_key(q, k, v, layer, seen):
    """Attend in float64, adding up the values that each query sees and no other."""
    group = layer.num_q_heads // layer.num_kv_heads
    out = torch.zeros(q.shape[0], layer.num_q_heads, layer.v_head_dim, dtype=torch.float64)
    for i, keys in enumerate(seen):
        for h in range(layer.num_q_heads):
            scores = k[keys, h // group].double() @ q[i, h].double() * layer.scale
            out[i, h] = (scores.softmax(0)[:, None] * v[keys, h // group].double()).sum(0)
    return out


def agree(got, want, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("group", [1, 5, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_later_values_do_not_reach_earlier_queries(dtype, group, level, monkeypatch):
    """The tiles of few, of some and of many rows; keys in one tile, and in several that merge."""
    layer = replace(PLAIN, num_q_heads=2 * group)
    name = str(dtype).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")
    with at_level(monkeypatch, level):
        backend = bench().create((layer,), dtype=name)
    for queries, keys in ((3, 3), (3, 9), (2, 1300)):
        torch.manual_seed(0)
        q = torch.randn(queries, 2 * group, 32).to(dtype)
        k, v = torch.randn(2, keys, 2, 32).to(dtype).unbind(0)
        v[-1, 0, 3], v[-1, 0, 8], v[-2, 1] = math.inf, math.nan, -math.inf
        cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (queries, keys))
        got, lse = backend.forward_ragged(
            q, k, v, layer, cu_q, cu_k, queries, keys, causal=True, return_lse=True
        )
        seen = [range(keys - queries + i + 1) for i in range(queries)]
        agree(got, by_key(q, k, v, layer, [list(x) for x in seen]), dtype)
        assert lse.isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_window_and_the_drafts_of_a_tree_hide_infinities(level, monkeypatch):
    layer = replace(PLAIN, sliding_window=4)
    with at_level(monkeypatch, level):
        backend = bench().create((layer,), dtype="bf16", page_size=4)
    torch.manual_seed(0)
    tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]).bool()
    batch = ForwardBatch.build(
        ForwardMode.TARGET_VERIFY,
        query_lens=[3],
        seq_lens=[10],
        page_table=torch.tensor([[2, 0, 1]], dtype=torch.int32),
        page_size=4,
        spec=SpecInfo(topk=2, num_draft_tokens=3, tree_mask=tree),
    )
    q = torch.randn(3, 2, 32).bfloat16()
    cache = LayerCache(k=torch.randn(3, 4, 2, 32).bfloat16(), v=torch.randn(3, 4, 2, 32).bfloat16())
    k, v = (x[[2, 0, 1]].flatten(0, 1) for x in (cache.k, cache.v))
    # draft 2, at the position of 0, is a sibling of both others; key 4 is too old for draft 1 alone
    for slot, token in ((1 * 4 + 1, 9), (0 * 4 + 0, 4)):
        cache.v[slot // 4, slot % 4] = v[token] = math.inf
    plan = backend.init_forward_metadata(batch)
    got = backend.forward(q, None, None, layer, cache, batch, plan)
    seen = [[4, 5, 6, 7], [5, 6, 7, 8], [4, 5, 6, 9]]
    agree(got, by_key(q, k, v, layer, seen), torch.bfloat16)
    assert got.isfinite().all((1, 2)).tolist() == [False, True, False]


@pytest.mark.parametrize("level", LEVELS)
def test_latents_whose_last_key_is_infinite(level, monkeypatch):
    """An odd number of keys: the pair of the last one has no second."""
    layer = replace(PLAIN, num_kv_heads=1, head_dim=48, v_head_dim=32)
    with at_level(monkeypatch, level):
        backend = bench("mla").create((layer,), dtype="bf16")
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 48).bfloat16(), torch.randn(7, 1, 1, 48).bfloat16()
    k[6, ..., 0] = k[6, ..., 5] = 3e38  # its score stays finite: as a value it overflows nothing
    q[..., 0], q[..., 5] = 0, 0
    cache = LayerCache(k=k, v=None)
    batch = ForwardBatch.build(
        ForwardMode.EXTEND,
        query_lens=[2],
        seq_lens=[7],
        page_table=torch.arange(7, dtype=torch.int32)[None],
        page_size=1,
    )
    plan = backend.init_forward_metadata(batch)
    got = backend.forward(q, None, None, layer, cache, batch, plan)
    rows = k[:, 0]
    want = by_key(q, rows, rows[..., :32], layer, [list(range(6)), list(range(7))])
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02)
