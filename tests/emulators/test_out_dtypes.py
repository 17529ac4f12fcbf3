"""An `out` of another dtype than the queries.

Most kernels write the queries' dtype, and the dispatcher converts. triton and torch_native round
once, to the dtype of `out`.
"""

import pytest
import torch
from attn_core import (
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
    HybridDispatcher,
    KVPool,
    LayerRequirements,
    Overrides,
    Requirements,
    load_plugins,
    parse_device,
    select,
)
from attn_core.plugins.dependencies import alternatives
from interpreted import interpreted

LAYER = AttentionLayer(
    layer_id=0, num_q_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125
)


@pytest.mark.parametrize(
    ("device", "prefill", "decode", "store"),
    [
        ("cuda:sm90", "fa3", "fa3", "bf16"),
        ("cuda:sm90", "flashinfer", "trtllm_mha", "bf16"),
        ("cuda:sm90", "flashinfer", "trtllm_mha", "fp8_e4m3"),
        ("cuda:sm100", "trtllm_mha", "trtllm_mha", "bf16"),
        ("rocm:gfx942", "aiter", "aiter", "bf16"),
        ("rocm:gfx942", "wave", "wave", "bf16"),
        ("npu:910b", "ascend", "ascend", "bf16"),
        ("xpu:bmg", "intel_xpu", "intel_xpu", "bf16"),
    ],
)
def test_out_of_another_dtype_holds_the_numbers_of_the_queries(device, prefill, decode, store):
    for right, out in passes(device, prefill, decode, store):
        assert torch.equal(out, right.float())


@pytest.mark.parametrize("name", ["torch_native", "triton"])
def test_these_round_once(name):
    if name == "triton":
        pytest.importorskip("triton")
    for right, out in passes("cpu", name, name, "bf16", registry=interpreted()):
        assert torch.equal(out.bfloat16(), right)
        assert name == "torch_native" or not torch.equal(out, right.float())


def passes(device, prefill, decode, store, registry=None):
    """Return the outputs of a prompt and of decode in bf16, and each in an `out` of float32."""
    registry = registry or load_plugins()
    needs = Requirements(layers=(LayerRequirements.of(LAYER),), kv_cache_dtype=store)
    libraries = {w.name: None for g in registry.requires() for w in alternatives(g)}
    named = Overrides(prefill_attention_backend=prefill, decode_attention_backend=decode)
    chosen = select(
        needs, parse_device(device), registry, libraries, named, simulated=True, advise=False
    )
    size = chosen.page_size
    pool = KVPool([LAYER], num_pages=3, page_size=size, kv_cache_dtype=store, layout=chosen.layout)
    dispatcher = HybridDispatcher.from_selection(chosen, registry, [LAYER], pool)
    for mode, new, length in ((ForwardMode.EXTEND, 5, 5), (ForwardMode.DECODE, 1, 6)):
        pages = torch.arange(1, 1 + -(-length // size), dtype=torch.int32)[None] % 3
        batch = ForwardBatch.build(
            mode, query_lens=[new], seq_lens=[length], page_table=pages, page_size=size
        )
        q = torch.randn(new, 4, 64).bfloat16()
        k, v = torch.randn(2, new, 2, 64).bfloat16()
        metadata = dispatcher.init_forward_metadata(batch)
        right = dispatcher.forward(q, k, v, LAYER, batch, metadata)
        out = torch.full(right.shape, torch.nan)
        assert dispatcher.forward(q, k, v, LAYER, batch, metadata, out=out) is out
        yield right, out
