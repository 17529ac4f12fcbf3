"""MLA with vLLM's own layer, builder and passes on a CPU, against unfolded heads in float64."""

import pytest
import torch
import vllm_latents
from attn_core import UnsupportedError
from attn_core.integrations.vllm.latent import LatentBackend
from vllm_passes import Pass, builder, engine

PASSES = {
    "decode": (lambda: Pass((1, 1, 1), (16, 40, 0)), 0),
    "prefill": (lambda: Pass((21, 5), (0, 0)), 0),
    "chunk": (lambda: Pass((6, 19), (17, 33)), 0),
    "mixed": (lambda: Pass((1, 1, 18), (30, 15, 16)), 0),
    "chain": (lambda: Pass((4, 4), (16, 40)), 3),
    "short chains": (lambda: Pass((2, 2), (16, 33)), 3),
}


def build(drafts, monkeypatch):
    vllm_latents.put_on_cpu(monkeypatch)
    config = engine(drafts, use_mla=True)
    config.model_config.get_num_attention_heads = lambda parallel: vllm_latents.HEADS
    config.model_config.get_head_size = lambda: vllm_latents.LORA + vllm_latents.ROPE
    sizes = {
        "kv_lora_rank": vllm_latents.LORA, "qk_nope_head_dim": vllm_latents.NOPE,
        "qk_rope_head_dim": vllm_latents.ROPE, "v_head_dim": vllm_latents.VALUE,
        "q_lora_rank": None,
    }  # fmt: skip
    config.model_config.hf_text_config = type("Config", (), sizes)()
    module = vllm_latents.layer(config)
    return config, module, builder(config, module)


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_unfolded_attention(name, monkeypatch):
    torch.manual_seed(0)
    make, drafts = PASSES[name]
    config, module, plan = build(drafts, monkeypatch)
    assert vllm_latents.error(config, plan, make(), module) < 1e-4


def test_an_off_length_is_seen(monkeypatch):
    torch.manual_seed(0)
    config, module, plan = build(0, monkeypatch)
    made = PASSES["decode"][0]()
    right = made.common

    def common():
        found = right()
        found.seq_lens = (found.seq_lens - 1).clamp(min=1)
        found.seq_lens_cpu_upper_bound = found.seq_lens
        return found

    made.common = common
    assert vllm_latents.error(config, plan, made, module) > 1e-2


def test_one_name_stands_for_both_kinds_of_models():
    from attn_core.integrations import vllm as adapter
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(engine(use_mla=True)):
        assert adapter.Backend is LatentBackend
    with set_current_vllm_config(engine()):
        assert not adapter.Backend.is_mla()


def test_prefill_alone_is_refused(monkeypatch):
    _config, _module, plan = build(0, monkeypatch)
    plan._prefill_backend.passes = None
    with pytest.raises(UnsupportedError, match="mla_prefill_backend CUSTOM"):
        plan._prefill_backend.prepare_metadata(None)
