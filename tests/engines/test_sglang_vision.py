"""SGLang's VisionAttention on a CPU with attn_core as its backend, beside SGLang's own."""

import argparse
from types import SimpleNamespace

import pytest
import torch
from attn_core import LayerRequirements, NoBackendError, Requirements, UnsupportedError
from attn_core.integrations.sglang.selection import choose
from attn_core.integrations.sglang.vision import Shape, VisionAttnCore, tower
from engine_passes import dense
from sglang.srt.layers.attention import vision
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

HEADS, KV_HEADS, D = 4, 2, 40


@pytest.fixture(scope="module", autouse=True)
def _plugins():
    load_plugins()


def attend(q, k, v, cu_seqlens, **changed):
    layer = VisionAttnCore(head_dim=D, num_heads=HEADS, num_kv_heads=KV_HEADS, flatten_batch=True)
    return layer(q=q, k=k, v=v, cu_seqlens=cu_seqlens, bsz=1, seq_len=len(q), **changed)


def expected(q, k, v, lengths):
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    outs = [
        dense(*part, torch.ones(len(part[0]), len(part[0]), dtype=torch.bool), D**-0.5)
        for part in parts
    ]
    return torch.cat(outs).float()


def tensors(tokens):
    torch.manual_seed(0)
    return torch.randn(tokens, HEADS, D), *torch.randn(2, tokens, KV_HEADS, D)


def test_images_attend_to_themselves():
    q, k, v = tensors(30)
    lengths = [7, 1, 22]
    right = expected(q, k, v, lengths)
    cu_seqlens = torch.tensor([0, 7, 8, 30])  # int64 comes too
    singleton = vision.SingletonCache()
    singleton.set_data(cu_seqlens)
    resolved = vision.prepare_vision_attention_metadata(cu_seqlens, torch.device("cpu"))
    for out in (
        attend(q, k, v, cu_seqlens),
        attend(q, k, v, singleton, max_seqlen=22),
        attend(q, k, v, None, forward_metadata=resolved),
    ):
        torch.testing.assert_close(out, right, atol=1e-5, rtol=0)
    assert (attend(q, k, v, None) - right).abs().max() > 1e-2  # one image of all tokens


REFUSED = {
    "attention mask": {"attention_mask": torch.ones(1)},
    "window": {"window_size": (4, 4)},
    "sinks": {"s_aux": torch.ones(4)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_tower_cannot_have_is_named(name):
    with pytest.raises(UnsupportedError, match=name):
        attend(*tensors(3), None, **REFUSED[name])
    with pytest.raises(UnsupportedError, match="SGLANG_VIT_ENABLE_CUDA_GRAPH"):
        attend(*tensors(3), [torch.tensor([0, 3]), 3])


def test_the_layers_of_a_tower_share_a_backend(monkeypatch):
    tower.cache_clear()
    made = [VisionAttnCore(head_dim=D, num_heads=4, num_kv_heads=4) for _ in range(3)]
    assert tower.cache_info().misses == 1
    assert made[0].shape == made[2].shape
    tower.cache_clear()
    monkeypatch.setenv("ATTN_MM_ATTENTION_BACKEND", "triton")
    with pytest.raises(NoBackendError, match="triton"):  # when the model is built
        VisionAttnCore(head_dim=D, num_heads=4, num_kv_heads=4)
    tower.cache_clear()


def test_sglang_creates_it_for_the_flag(monkeypatch):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = ["--model-path", "x", "--mm-attention-backend", "attn_core"]
    args = parser.parse_args(flags)
    assert args.mm_attention_backend == "attn_core"
    named = SimpleNamespace(mm_attention_backend="attn_core")
    for name in ("get_server_args", "get_global_server_args", "get_mm"):  # by release
        monkeypatch.setattr(vision, name, lambda: named, raising=False)
    name = vision.VisionAttention._determine_attention_backend(SimpleNamespace(), None)
    assert vision.QKV_BACKEND_IMPL[name] is VisionAttnCore
    named.mm_attention_backend = None
    assert vision.VisionAttention._determine_attention_backend(SimpleNamespace(), None) == "sdpa"


def test_the_variables_of_text_and_vision_do_not_meet(monkeypatch):
    monkeypatch.setenv("ATTN_ATTENTION_BACKEND", "flex_attention")
    monkeypatch.setenv("ATTN_MM_ATTENTION_BACKEND", "torch_native")
    text = Requirements(layers=(LayerRequirements(head_dim=64),), dtype="fp32")
    assert choose(text, torch.device("cpu"))[0].roles["decode"].backend == "flex_attention"
    tower.cache_clear()
    _layer, backend = tower(Shape(4, 4, 64, 0.125), torch.float32, torch.device("cpu"))
    tower.cache_clear()
    assert backend.config.name == "torch_native"
