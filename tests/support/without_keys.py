"""What a backend gives queries that see no key: zeros, and the sink or -inf as their LSE."""

from dataclasses import replace

import pytest
import torch
from attn_core.cache.layer_cache import LayerCache
from attn_core.plugins.registry import load_plugins
from attn_core.runtime.backend import BackendConfig, create_backend
from attn_core.runtime.batch import CacheView, ForwardBatch, ForwardMode
from attn_core.runtime.layer import AttentionLayer
from attn_core.spec.kinds import Phase

# query lengths, key lengths, causal: a request without keys, none with any, and keys for few
RAGGED = {
    "one-request": ((64, 6), (0, 5), False),
    "every-request": ((64,), (0,), False),
    "more-queries-than-keys": ((300, 6), (3, 9), True),
}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def make_layer(*, sinks, causal, device, **more):
    """Return a layer of four heads over two, with sinks or without."""
    return AttentionLayer(
        layer_id=0,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        scale=0.125,
        sinks=SINKS.to(device) if sinks else None,
        is_causal=causal,
        **more,
    )


def make_backend(name, layer, arch, device):
    """Create a backend by the first row that takes the layer; skips where none does."""
    spec = load_plugins().get(name)
    for row in spec.capabilities:
        has = row.kind == "mha" and arch in row.archs and Phase.PREFILL in row.phases
        if has and row.sinks == (layer.sinks is not None) and row.cross_attention >= layer.is_cross:
            break
    else:
        pytest.skip(f"no row of {name} on {arch} takes this layer")
    config = BackendConfig(
        name=name,
        row=row,
        layers=(layer,),
        page_size=max(row.page_sizes, default=16),
        dtype="bf16",
        kv_cache_dtype="bf16",
        device=torch.device(device),
        arch=arch,
    )
    return create_backend(spec, config)


def check(out, lse, blind, layer):
    """Compare what queries without keys (bool [T]) got; the others have seen some."""
    assert not out[blind].any()
    empty = torch.full_like(lse, -torch.inf) if layer.sinks is None else layer.sinks.expand_as(lse)
    # FA3 rounds once in a causal tile that has keys: 1.2e-7 of a sink of -1.0 on an H200
    torch.testing.assert_close(lse[blind], empty[blind], rtol=1e-6, atol=1e-6)
    assert lse[~blind].isfinite().all()
    assert out.isfinite().all()


def check_ragged(name, case, *, sinks, arch, device):
    """Ask a backend without its cache."""
    queries, keys, causal = RAGGED[case]
    layer = make_layer(sinks=sinks, causal=causal, device=device)
    backend = make_backend(name, layer, arch, device)
    q, k, v = (
        torch.randn(sum(lens), heads, 64).bfloat16().to(device)
        for lens, heads in ((queries, 4), (keys, 2), (keys, 2))
    )
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (queries, keys))
    out, lse = backend.forward_ragged(
        q, k, v, layer, cu_q, cu_k, max(queries), max(keys), causal=causal, return_lse=True
    )
    blind = []
    for n, s in zip(queries, keys, strict=True):
        first = max(n - s, 0) if causal else n * (not s)  # the first query that sees a key
        blind += [True] * first + [False] * (n - first)
    check(out, lse, torch.tensor(blind, device=device), layer)


def check_cross(name, mode, *, sinks, arch, device, columns=2):
    """Ask a cross layer of a backend, one request of which has no encoder tokens.

    columns: of the encoder's page table; with 0 no request has encoder tokens.
    """
    layer = make_layer(sinks=sinks, causal=True, device=device, view="cross", is_cross=True)
    backend = make_backend(name, layer, arch, device)
    size = backend.config.page_size
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=device)
    new = 1 if mode is ForwardMode.DECODE else 3
    own = ForwardBatch.build(
        mode, query_lens=[new, new], seq_lens=[5, 6], page_table=table, page_size=size
    )
    lens = [9 if columns else 0, 0]
    cross = CacheView.build(
        page_table=table[:, :columns].contiguous(), page_size=size, seq_lens=lens, new_lens=[0, 0]
    )
    batch = replace(own, views={**own.views, "cross": cross})
    k, v = torch.randn(2, 5, size, 2, 64).bfloat16().to(device)
    q = torch.randn(2 * new, 4, 64).bfloat16().to(device)
    out, lse = backend.forward(
        q, None, None, layer, LayerCache(k=k, v=v), batch, backend.init_forward_metadata(batch),
        return_lse=True,
    )  # fmt: skip
    blind = torch.arange(2 * new, device=device) >= (new if columns else 0)
    check(out, lse, blind, layer)
