"""Latents of other sizes than 512 + 64: their values may be fewer than the keys' first tile."""

import pytest
import torch
from triton_passes import DEVICE, DTYPES, oracle

pytest.importorskip("triton")

from attn_core import AttentionLayer, ForwardBatch, ForwardMode, KVPool, read_kv, write_kv
from attn_core.cache.page_table import slot_table
from attn_core.plugins.registry import load_plugins
from attn_core.testing.harness import Bench

LENGTH, PAGE = 37, 4


def attend(layer, pool, dtype, store, new):
    """Attend with the last `new` tokens of one request; return the queries, out and LSE."""
    spec = load_plugins().get("triton")
    row = next(r for r in spec.capabilities if r.kind == "mla" and store in r.kv_dtypes)
    bench = Bench(spec=spec, row=row, torch_device=DEVICE, arch="sm90", multiprocessors=3)
    backend = bench.create((layer,), dtype=dtype, page_size=PAGE, kv_dtype=store)
    table = torch.arange(1, pool.layer(0).num_pages, dtype=torch.int32, device=DEVICE)[None]
    batch = ForwardBatch.build(
        ForwardMode.EXTEND, query_lens=[new], seq_lens=[LENGTH], page_table=table, page_size=PAGE
    )
    slots = slot_table(table, PAGE, LENGTH)[0]
    latents = torch.randn(LENGTH, 1, layer.head_dim, device=DEVICE).to(DTYPES[dtype])
    write_kv(pool.layer(0), latents, None, slots)
    q = torch.randn(new, layer.num_q_heads, layer.head_dim, device=DEVICE).to(DTYPES[dtype])
    plan = backend.init_forward_metadata(batch)
    tensors = (q, None, None, layer, pool.layer(0), batch, plan)
    return q, slots, backend.forward(*tensors, return_lse=True)


@pytest.mark.parametrize("new", [1, LENGTH])  # split-KV, and tiles of prompts
@pytest.mark.parametrize("store", ["bf16", "fp8_e4m3", "fp4_e2m1"])
@pytest.mark.parametrize(
    ("dim", "v_dim"),
    [(32, 16), (41, 33), (128, 64), (80, 64), (96, 72), (80, 21)],
    ids=lambda x: str(x),
)
def test_latents_of_any_size(dim, v_dim, store, new):
    """(80, 64) reads keys as values, as 576 and 512 do; the others load values of their own.

    Those of (96, 72) and (80, 21) end inside a block of 16, of which FP4 has one scale.
    """
    if store == "fp4_e2m1" and dim % 16:
        pytest.skip("FP4 has a scale per 16 values")
    torch.manual_seed(0)
    layer = AttentionLayer(
        layer_id=0, num_q_heads=3, num_kv_heads=1, head_dim=dim, v_head_dim=v_dim, scale=dim**-0.5
    )
    pool = KVPool(
        [layer],
        num_pages=1 + -(-LENGTH // PAGE),
        page_size=PAGE,
        kv_cache_dtype=store,
        kind="mla",
        device=DEVICE,
    )
    q, slots, (out, lse) = attend(layer, pool, "bf16", store, new)
    k, _ = read_kv(pool.layer(0), slots, torch.float32)
    i = torch.arange(LENGTH - new, LENGTH, device=DEVICE)[:, None]
    seen = torch.arange(LENGTH, device=DEVICE) <= i
    want, want_lse = oracle(layer, q, k, k[..., :v_dim], seen)
    assert (out.double() - want).norm() <= 6e-3 * want.norm()
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-3, rtol=1e-3)
