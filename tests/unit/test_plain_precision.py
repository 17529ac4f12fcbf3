"""torch.autocast around a pass changes no bit of it."""

import pytest
import torch
from attn_core import AttentionLayer, ForwardBatch, ForwardMode, LayerCache, SpecInfo, load_plugins
from attn_core.backends.torch_native.linear import TorchNativeLinear
from attn_core.testing.harness import Bench
from linear_passes import LAYERS, config, inputs, make_batch, make_pool, run

M = ForwardMode


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def softmax_pass(name, kind, **changes):
    """Return what runs one pass of two requests."""
    latent = kind != "mha"
    layer = AttentionLayer(
        layer_id=0, num_q_heads=4, num_kv_heads=1 if latent else 2, head_dim=48 if latent else 32,
        v_head_dim=32, scale=0.2, **changes,
    )  # fmt: skip
    spec = load_plugins().get(name)
    row = next(x for x in spec.capabilities if x.kind == kind and x.device in ("any", "cpu"))
    bench = Bench(spec=spec, row=row, torch_device=torch.device("cpu"))
    backend = bench.create((layer,), dtype="fp32", page_size=16)
    heads = layer.num_kv_heads
    k, v = torch.randn(6, 16, heads, layer.head_dim), torch.randn(6, 16, heads, 32)
    cache = LayerCache(k=k, v=None if latent else v)
    batch = ForwardBatch.build(
        M.EXTEND,
        query_lens=[3, 20],
        seq_lens=[33, 20],
        page_table=torch.tensor([[1, 5, 2], [4, 3, 0]], dtype=torch.int32),
        page_size=16,
    )
    q, lse = torch.randn(23, 4, layer.head_dim), row.lse

    def attend():
        plan = backend.init_forward_metadata(batch)
        got = backend.forward(q, None, None, layer, cache, batch, plan, return_lse=lse)
        return got if lse else (got,)

    return attend


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("torch_native", "mha", {}),
        ("torch_native", "mha", {"logit_cap": 5.0}),
        ("torch_native", "mla", {"logit_cap": 5.0}),
        pytest.param("flex_attention", "mha", {}, marks=pytest.mark.long),  # it compiles
    ],
)
def test_softmax_attention(name, kind, changes):
    attend = softmax_pass(name, kind, **changes)
    want = attend()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attend()
    assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("mode", [M.EXTEND, M.DECODE, M.TARGET_VERIFY])
def test_linear_attention(mode, kind):
    """Its products failed: the states are added to in float32."""
    layer, lens = LAYERS[kind], {M.EXTEND: (70, 2), M.DECODE: (1, 1)}.get(mode, (3, 3))
    pool, tensors = make_pool(layer, num_drafts=3), inputs(layer, sum(lens))
    before = pool.states.map(torch.clone)
    spec = SpecInfo(topk=1, num_draft_tokens=3) if mode is M.TARGET_VERIFY else None
    backend, batch = TorchNativeLinear(config(layer)), make_batch(mode, lens, (4, 2), spec=spec)

    def one_pass():
        pool.states.state.copy_(before.state)
        out, plan = run(backend, batch, layer, pool, tensors)
        if spec is not None:
            backend.commit(pool, batch, plan, torch.tensor([2, 0]))
        return out, pool.states.state.clone()

    want = one_pass()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = one_pass()
    assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))
