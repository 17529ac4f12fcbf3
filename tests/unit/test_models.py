"""Requirements read from the configs of named models, errors, tensor-parallel rules."""

import contextlib
import json
import os
import pathlib
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
from attn_core.errors import ModelConfigError, UsageError
from attn_core.model_config import (
    context_length,
    is_encoder_decoder,
    read_config,
    requirements_from_config,
)
from attn_core.spec.dual_chunk import DualChunk
from attn_core.spec.requirements import LayerRequirements, Speculation

CONFIGS = pathlib.Path(__file__).parent.parent / "data" / "configs"


def mha(q, kv, d, **features):
    return LayerRequirements(head_dim=d, v_head_dim=d, num_q_heads=q, num_kv_heads=kv, **features)


def mla(q, latent=512, rope=64, **features):
    return LayerRequirements(
        head_dim=latent + rope,
        v_head_dim=latent,
        num_q_heads=q,
        num_kv_heads=1,
        **{"kind": "mla", **features},
    )


def dsa(q, latent=512, rope=64, *, topk=2048, heads=64, dim=128):
    index = {"index_topk": topk, "index_heads": heads, "index_dim": dim}
    return mla(q, latent, rope, kind="dsa", **index)


def sharing(layer):
    return replace(layer, index_heads=None, index_dim=None, shares_topk=True)


def linear(kind, k_heads, v_heads, k, v, *, conv_width=4):
    return LayerRequirements(
        kind=kind, head_dim=k, v_head_dim=v, num_q_heads=k_heads, num_kv_heads=v_heads,
        conv_width=conv_width,
    )  # fmt: skip


def tower(heads, d):
    return mha(heads, heads, d, encoder=True)


def with_encoder(q, d):
    return [tower(q, d), mha(q, q, d), mha(q, q, d, cross=True)]


QWEN_1M = DualChunk(chunk_size=262144, local_size=8192, original_max_position_embeddings=262144)
# model → layers, vision tower, dtype, context
MODELS = {
    "llama-3.1-8b": ([mha(32, 8, 128)], None, "bf16", 131072),
    "mistral-7b-v0.1": ([mha(32, 8, 128, sliding_window=4096)], None, "bf16", 32768),
    "mixtral-8x7b": ([mha(32, 8, 128)], None, "bf16", 32768),
    "qwen2.5-7b-instruct": ([mha(28, 4, 128)], None, "bf16", 32768),
    "qwen2.5-7b-instruct-1m": ([mha(28, 4, 128, dual_chunk=QWEN_1M)], None, "bf16", 1010000),
    "qwen2.5-14b-instruct-1m": ([mha(40, 8, 128, dual_chunk=QWEN_1M)], None, "bf16", 1010000),
    "qwen3-8b": ([mha(32, 8, 128)], None, "bf16", 40960),
    "qwen3-30b-a3b": ([mha(32, 4, 128)], None, "bf16", 40960),
    "gemma-2-9b": (
        [mha(16, 8, 256, logit_cap=50.0, sliding_window=4096), mha(16, 8, 256, logit_cap=50.0)],
        None,
        "fp32",
        8192,
    ),
    "gemma-3-1b": ([mha(4, 1, 256, sliding_window=512), mha(4, 1, 256)], None, "bf16", 32768),
    "gemma-3-4b": (  # its text_config leaves out heads, head_dim and context
        [mha(8, 4, 256, sliding_window=1024), mha(8, 4, 256)],
        tower(16, 72),
        "bf16",
        131072,
    ),
    "gpt-oss-20b": (
        [mha(64, 8, 64, sinks=True, sliding_window=128), mha(64, 8, 64, sinks=True)],
        None,
        "bf16",
        131072,
    ),
    "deepseek-v2-lite": ([mla(16)], None, "bf16", 163840),
    "deepseek-v3": ([mla(128)], None, "bf16", 163840),
    "deepseek-v3.2": ([dsa(128)], None, "bf16", 163840),
    "glm-5": ([dsa(64, heads=32)], None, "bf16", 202752),
    "minicpm3-4b": ([mla(40, latent=256, rope=32)], None, "bf16", 32768),
    "qwen3-next-80b-a3b": (
        [linear("gdn", 16, 32, 128, 128), mha(16, 2, 256)],
        None,
        "bf16",
        262144,
    ),
    "qwen3.5-27b": (
        [linear("gdn", 16, 48, 128, 128), mha(24, 4, 256)],
        tower(16, 72),
        "bf16",
        262144,
    ),
    "jet-nemotron-2b": (
        [
            linear("gdn", 12, 12, 96, 256, conv_width=None),
            mha(12, 2, 128),
            mha(12, 2, 128, sliding_window=1152),
        ],
        None,
        "bf16",
        131072,
    ),
    "kimi-linear-48b-a3b": ([linear("kda", 32, 32, 128, 128), mla(32)], None, "bf16", 1048576),
    "t5-base": (with_encoder(12, 64), None, "bf16", 512),
    "whisper-large-v3": (with_encoder(20, 64), None, "fp16", 448),
    "bart-large": (with_encoder(16, 64), None, "bf16", 1024),
    "bert-base": ([tower(12, 64)], None, "bf16", 512),
    "qwen2-vl-7b": ([mha(28, 4, 128)], tower(16, 80), "bf16", 32768),
    "qwen2.5-vl-7b": ([mha(28, 4, 128)], tower(16, 80), "bf16", 128000),
    "qwen3-vl-8b": ([mha(32, 8, 128)], tower(16, 72), "bf16", 262144),
    "llama-4-scout": ([mha(40, 8, 128)], tower(16, 88), "bf16", 10485760),
    "llava-1.5-7b": ([mha(32, 32, 128)], tower(16, 64), "fp16", 4096),
    "llama-3.2-11b-vision": (
        [mha(32, 8, 128), mha(32, 8, 128, cross=True)],
        tower(16, 80),
        "bf16",
        131072,
    ),
    "phi-3.5-mini": ([mha(32, 32, 96)], None, "bf16", 131072),
    "olmo-2-7b": ([mha(32, 32, 128)], None, "fp32", 4096),
    "granite-3.1-8b": ([mha(32, 8, 128)], None, "bf16", 131072),
    "command-r7b": ([mha(32, 8, 128, sliding_window=4096), mha(32, 8, 128)], None, "bf16", None),
    "falcon-7b": ([mha(71, 1, 64)], None, "bf16", None),
    "gpt2": ([mha(12, 12, 64)], None, "bf16", 1024),
}


def config_of(name):
    return read_config(CONFIGS / f"{name}.json")


def said(needs):
    return "\n".join(needs.assumptions)


def test_every_fixture_is_tested():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_named_model_needs_exactly_these_layers(name):
    layers, vision, dtype, context = MODELS[name]
    needs = requirements_from_config(config_of(name))
    assert needs.layers == tuple(layers)
    assert (needs.vision, needs.dtype) == (vision, dtype)
    assert context_length(config_of(name)) == context
    assert is_encoder_decoder(config_of(name)) == any(x.cross for x in layers if not vision)
    assert "not an architecture" not in said(needs)


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        ("llama-3.1-8b", []),
        ("deepseek-v3", ["auto_map"]),
        ("phi-3.5-mini", ["sliding_window 262144 is not below the context of 131072", "auto_map"]),
        ("llama-4-scout", ["chunk of 8192"]),
        ("jet-nemotron-2b", ["auto_map", "jet layers are gated delta rule layers (gdn)"]),
        ("t5-base", ["no dtype: bf16", "relative position bias"]),
        ("llava-1.5-7b", ["defaults of llama: num_attention_heads 32, hidden_size 4096"]),
    ],
)
def test_what_was_assumed_is_said_and_nothing_else(name, sentences):
    notes = requirements_from_config(config_of(name)).assumptions
    assert len(notes) == len(sentences)
    assert all(sentence in note for sentence, note in zip(sentences, notes, strict=True))


def test_jet_vlm_nests_jet_nemotron_beside_a_siglip_tower():
    config = {
        "architectures": ["JetVLMForConditionalGeneration"],
        "model_type": "jet_vlm",
        "text_config": config_of("jet-nemotron-2b"),
        "vision_config": config_of("gemma-3-4b")["vision_config"],
    }
    needs = requirements_from_config(config)
    assert needs.layers == tuple(MODELS["jet-nemotron-2b"][0])
    assert needs.vision == tower(16, 72)


def test_workload_is_handed_through():
    spec = Speculation(topk=4)
    needs = requirements_from_config(
        config_of("llama-3.1-8b"),
        dtype="float16",
        kv_cache_dtype="fp8_e4m3",
        page_size=64,
        speculation=spec,
        lse=True,
        deterministic=True,
        graphs=True,
    )
    assert (needs.dtype, needs.kv_cache_dtype, needs.page_size) == ("fp16", "fp8_e4m3", 64)
    assert needs.speculation is spec
    assert (needs.lse, needs.deterministic, needs.graphs) == (True, True, True)


# --- tensor parallelism


def test_tp_splits_heads_and_replicates_what_cannot_be_split():
    config = config_of("llama-3.1-8b")
    split = requirements_from_config(config, tp=4)
    assert split.layers == (mha(8, 2, 128),)
    assert split.assumptions == ()
    replicated = requirements_from_config(config, tp=16)
    assert replicated.layers == (mha(2, 1, 128),)
    assert "tp 16 is above the 8 KV heads" in said(replicated)


def test_tp_leaves_the_latent_whole_and_splits_linear_heads():
    assert requirements_from_config(config_of("deepseek-v3"), tp=16).layers == (mla(8),)
    qwen = requirements_from_config(config_of("qwen3.5-27b"), tp=8)
    assert qwen.layers == (linear("gdn", 2, 6, 128, 128), mha(3, 1, 256))
    assert qwen.vision == tower(2, 72)
    whisper = requirements_from_config(config_of("whisper-large-v3"), tp=4)
    assert whisper.layers == tuple(with_encoder(5, 64))


def test_a_vision_tower_that_does_not_divide_is_replicated():
    needs = requirements_from_config(config_of("qwen2-vl-7b"), tp=28)
    assert needs.vision == tower(16, 80)
    assert "16 heads do not divide by tp 28: replicated" in said(needs)


@pytest.mark.parametrize(
    ("name", "tp", "text"),
    [
        ("llama-3.1-8b", 5, r"32 query and 8 KV heads .* tp 5 \(possible: 1, 2, 4, 8, 16, 32\)"),
        ("llama-4-scout", 5, r"40 query and 8 KV heads .* tp 5 \(possible: 1, 2, 4, 8, 40\)"),
        ("deepseek-v2-lite", 3, r"16 query heads .* \(possible: 1, 2, 4, 8, 16\)"),
        ("qwen3.5-27b", 3, r"16 linear key heads do not divide over tp 3"),
    ],
)
def test_a_tp_that_does_not_divide_is_refused_with_those_that_do(name, tp, text):
    with pytest.raises(ModelConfigError, match=text):
        requirements_from_config(config_of(name), tp=tp)


def test_tp_and_dtype_that_do_not_exist():
    with pytest.raises(UsageError, match="tp 0"):
        requirements_from_config(config_of("gpt2"), tp=0)
    with pytest.raises(UsageError, match=r"dtype 'bfloat': known: .*bfloat16"):
        requirements_from_config(config_of("gpt2"), dtype="bfloat")


# --- windows


def test_qwen2_window_holds_from_max_window_layers_on():
    config = {
        **config_of("qwen2.5-7b-instruct"),
        "use_sliding_window": True,
        "sliding_window": 4096,
    }
    assert requirements_from_config(config).layers == (mha(28, 4, 128),)  # 28 of 28 are full
    config["max_window_layers"] = 21
    assert requirements_from_config(config).layers == (
        mha(28, 4, 128),
        mha(28, 4, 128, sliding_window=4096),
    )
    config["max_window_layers"] = 0
    assert requirements_from_config(config).layers == (mha(28, 4, 128, sliding_window=4096),)


def test_a_llama_ignores_a_stray_window_and_a_null_is_not_a_default():
    config = {**config_of("llama-3.1-8b"), "sliding_window": 4096}
    assert requirements_from_config(config).layers == (mha(32, 8, 128),)
    for off in (0, -1):
        config = {**config_of("mistral-7b-v0.1"), "sliding_window": off}
        assert requirements_from_config(config).layers == (mha(32, 8, 128),)
    config = {**config_of("mistral-7b-v0.1"), "sliding_window": None}
    assert requirements_from_config(config).layers == (mha(32, 8, 128),)


def test_gemma3_pattern_comes_from_its_key_then_its_list():
    config = config_of("gemma-3-1b")
    full, windowed = mha(4, 1, 256), mha(4, 1, 256, sliding_window=512)
    assert requirements_from_config({**config, "num_hidden_layers": 5}).layers == (windowed,)
    assert requirements_from_config({**config, "sliding_window_pattern": 1}).layers == (full,)
    types = ["full_attention", "sliding_attention"]
    assert requirements_from_config({**config, "layer_types": types}).layers == (full, windowed)


def test_gemma3_embedding_models_are_encoders():
    config = {**config_of("gemma-3-1b"), "use_bidirectional_attention": True}
    needs = requirements_from_config(config)
    assert needs.layers == (mha(4, 1, 256, encoder=True),)
    assert "bidirectional" in said(needs)


# --- other shapes and what is not followed


def test_shapes_that_some_layers_do_not_share():
    gemma4 = {
        **config_of("gemma-3-1b"),
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
    }
    assert requirements_from_config(gemma4).layers == (
        mha(4, 1, 256, sliding_window=512),
        mha(4, 2, 512),
    )
    unequal = {**config_of("llama-3.1-8b"), "head_dim": 192, "v_head_dim": 128}
    (layer,) = requirements_from_config(unequal).layers
    assert (layer.head_dim, layer.v_head_dim) == (192, 128)


def test_falcon_new_decoder_has_its_own_kv_heads():
    config = {**config_of("falcon-7b"), "num_attention_heads": 128, "hidden_size": 8192}
    config |= {"new_decoder_architecture": True, "num_kv_heads": 8}
    assert requirements_from_config(config).layers == (mha(128, 8, 64),)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("alibi", True, "ALiBi"),
        ("quantization_config", {"kv_cache_scheme": {"num_bits": 8}}, "not applied"),
        ("audio_config", {"d_model": 1280}, "audio tower"),
        ("block_configs", [{"attention": {"n_heads_in_group": 8}}], "block_configs"),
    ],
)
def test_keys_that_are_not_followed_are_named(key, value, text):
    needs = requirements_from_config({**config_of("qwen2.5-7b-instruct"), key: value})
    assert text in said(needs)
    assert replace(needs, assumptions=()) == replace(
        requirements_from_config(config_of("qwen2.5-7b-instruct")), assumptions=()
    )


def test_sizes_of_dual_chunk_attention_that_are_left_out_are_the_codes():
    config = {**config_of("qwen2.5-7b-instruct"), "dual_chunk_attention_config": {}}
    (layer,) = requirements_from_config(config).layers
    assert layer.dual_chunk == DualChunk(chunk_size=8192, local_size=1024)


def test_a_tower_without_heads_is_left_out_and_said():
    config = {**config_of("gemma-3-4b"), "vision_config": {"model_type": "gemma3n_vision"}}
    needs = requirements_from_config(config)
    assert needs.vision is None
    assert "gemma3n_vision" in said(needs)


# --- keys of single families, and keys that nobody knows

MINIMAX = {
    "model_type": "minimax_m1",
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 6144,
    "num_hidden_layers": 8,
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1],
}
MIMO = {
    "model_type": "mimo_v2_flash",
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "swa_rope_theta": 10000,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}
CHATGLM = {
    "model_type": "chatglm",
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "num_layers": 28,
    "kv_channels": 128,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "seq_length": 32768,
}


@pytest.mark.parametrize("model_type", [None, "foo"])  # the keys count, whatever the family
def test_minimax_writes_its_layers_as_numbers(model_type):
    config = {**MINIMAX, **({"model_type": model_type} if model_type else {})}
    needs = requirements_from_config(config)
    assert needs.layers == (mha(64, 8, 128),)
    assert "linear layers of an unknown recurrence" in said(needs)
    assert "though" not in said(needs)
    needs = requirements_from_config({**config, "attn_type_list": [1] * 8})
    assert "linear" not in said(needs)
    for wrong in ([0, 2], "01", [True, None], ["full"]):
        with pytest.raises(ModelConfigError, match="attn_type_list"):
            requirements_from_config({**config, "attn_type_list": wrong})


@pytest.mark.parametrize("model_type", [None, "foo"])
def test_mimo_has_other_shapes_and_sinks_in_layers_with_a_window(model_type):
    config = {**MIMO, **({"model_type": model_type} if model_type else {})}
    full = replace(mha(64, 4, 192), v_head_dim=128)
    window = replace(mha(64, 8, 192), v_head_dim=128, sliding_window=128, sinks=True)
    assert requirements_from_config(config).layers == (full, window)
    assert "though" not in said(requirements_from_config(config))
    flipped = {"add_swa_attention_sink_bias": False, "add_full_attention_sink_bias": True}
    assert requirements_from_config({**config, **flipped}).layers == (
        replace(full, sinks=True),
        replace(window, sinks=False),
    )
    narrow = {"swa_num_attention_heads": 32, "swa_head_dim": 64, "swa_v_head_dim": None}
    assert requirements_from_config({**config, **narrow}).layers == (
        full,
        mha(32, 8, 64, sliding_window=128, sinks=True),
    )
    lost = {key: value for key, value in config.items() if "sliding" not in key}
    assert "no sliding_window that says how wide" in said(requirements_from_config(lost))
    with pytest.raises(ModelConfigError, match="hybrid_layer_pattern of other values than 0 full"):
        requirements_from_config({**config, "hybrid_layer_pattern": [0, 3]})


@pytest.mark.parametrize("model_type", [None, "foo"])
def test_chatglm_counts_its_kv_heads_as_groups(model_type):
    config = {**CHATGLM, **({"model_type": model_type} if model_type else {})}
    assert requirements_from_config(config).layers == (mha(32, 2, 128),)
    assert context_length(config) == 32768
    assert "though" not in said(requirements_from_config(config))
    off = {**config, "multi_query_attention": False}
    assert requirements_from_config(off).layers == (mha(32, 32, 128),)


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "bloom", "n_head": 32},
        {"model_type": "mpt", "attn_config": {"alibi": True, "attn_type": "multihead_attention"}},
        {"model_type": "mpt"},  # the default of its config class
        {"model_type": "falcon", "alibi": True},
        {"model_type": "jais", "position_embedding_type": "alibi"},
        {"model_type": "baichuan", "hidden_size": 5120, "num_attention_heads": 40},
        {"model_type": "foo", "use_alibi": True},
    ],
)
def test_alibi_is_named_as_what_no_backend_does(keys):
    needs = requirements_from_config({"hidden_size": 4096, "num_attention_heads": 32, **keys})
    assert "ALiBi adds a bias to the scores, and no backend does that" in said(needs)
    assert "though" not in said(needs)


def test_keys_about_attention_that_were_not_applied_are_named():
    config = config_of("llama-3.1-8b")
    plain = said(requirements_from_config(config))
    for key, value in [
        ("window_attn_skip_freq", 4),
        ("add_swa_attention_sink_bias", True),
        ("swa_num_key_value_heads", 4),
        ("sparse_attention_config", {"block_size": 64}),
        ("global_attn_every_n_layers", 4),
        ("sliding_window", 4096),  # of a family that has none
    ]:
        notes = said(requirements_from_config({**config, key: value}))
        assert f"not applied, though the names are about attention: {key} = " in notes
        assert "compare the layers that were read" in notes
    for key, value in [
        ("window_attn_skip_freq", None),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("qk_norm", True),
        ("rope_theta", 1e6),
        ("swa_rope_theta", 1e4),
        ("moe_layer_pattern", [1]),
    ]:
        assert said(requirements_from_config({**config, key: value})) == plain, key
    many = {f"attn_knob_{i}\x1b": i + 1 for i in range(1000)}
    notes = said(requirements_from_config({**config, **many}))
    assert "and 992 more" in notes
    assert "\x1b" not in notes


@pytest.mark.parametrize("name", MODELS)
def test_nothing_of_a_published_model_is_left_unread(name):
    assert "though" not in said(requirements_from_config(config_of(name)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers = 1000000000000 .* at most 10000"),
        ({"layer_types": ["full_attention"] * 10**6}, "layer_types of 1000000 layers"),
        ({"attn_type_list": [1] * 10**6}, "attn_type_list of 1000000 layers"),
        ({"hidden_size": 10**5000}, "hidden_size = a number of 16610 bits"),
        ({"num_attention_heads": "x" * 10**6}, "num_attention_heads = 'xxx"),
    ],
)
def test_absurd_numbers_are_refused_at_once(change, text):
    config = config_of("llama-3.1-8b")
    with pytest.raises(ModelConfigError, match=text) as error:
        requirements_from_config({**config, **change})
    assert len(str(error.value)) < 500
    gemma = {**config_of("gemma-3-1b"), "sliding_window_pattern": 2**30}
    with pytest.raises(ModelConfigError, match="sliding_window_pattern = 1073741824"):
        requirements_from_config(gemma)


# --- unknown and broken


def test_unknown_architecture_is_read_from_standard_keys_and_said():
    config = {**config_of("llama-3.1-8b"), "model_type": "foo", "architectures": ["FooForCausalLM"]}
    needs = requirements_from_config(config)
    assert needs.layers == (mha(32, 8, 128),)
    assert "FooForCausalLM is not an architecture that attn-core knows" in said(needs)
    assert "(mha)" in said(needs)


def test_layers_that_carry_no_known_attention():
    config = {**config_of("llama-3.1-8b"), "model_type": "bar"}
    hybrid = requirements_from_config({**config, "layer_types": ["mamba", "attention"]})
    assert hybrid.layers == (mha(32, 8, 128),)
    assert "left to the model" in said(hybrid)
    lightning = requirements_from_config(
        {**config, "layer_types": ["linear_attention", "full_attention"]}
    )
    assert lightning.layers == (mha(32, 8, 128),)
    assert "unknown recurrence" in said(lightning)
    with pytest.raises(ModelConfigError, match="no layer that attn-core knows"):
        requirements_from_config({**config, "layer_types": ["mamba"]})
    with pytest.raises(ModelConfigError, match=r"layers of type hash_attention \(known: full_att"):
        requirements_from_config({**config, "layer_types": ["hash_attention"]})
    with pytest.raises(ModelConfigError, match="layer_types that are no list"):
        requirements_from_config({**config, "layer_types": "full"})


def test_heads_of_a_model_without_attention_are_not_those_of_attention():
    """Mamba 2 and xLSTM write heads of their recurrences under the names of attention's."""
    mamba = {"model_type": "mamba2", "hidden_size": 4096, "num_heads": 128, "head_dim": 64}
    for config in (mamba, mamba | {"model_type": "xlstm"}):
        with pytest.raises(ModelConfigError, match="no layer that attn-core knows"):
            requirements_from_config(config)


def test_layer_types_of_another_number_than_the_layers_are_said():
    config = {**config_of("llama-3.1-8b"), "num_hidden_layers": 4}
    note = "layer_types names 1 layers, num_hidden_layers 4: what is named was taken"
    for types, expected in ((["full_attention"], True), (["full_attention"] * 4, False)):
        needs = requirements_from_config({**config, "layer_types": types})
        assert (note in needs.assumptions) == expected


def test_missing_keys_are_all_listed_with_their_spellings():
    with pytest.raises(ModelConfigError) as error:
        requirements_from_config({"architectures": ["FooModel"]})
    for part in (
        "FooModel",
        "num_attention_heads or n_head",
        "hidden_size or n_embd",
        "--head-dim",
    ):
        assert part in str(error.value)
    with pytest.raises(ModelConfigError, match="qk_rope_head_dim"):
        requirements_from_config({"num_attention_heads": 8, "kv_lora_rank": 512})


def test_a_soft_cap_that_gemma_3_does_not_apply_is_no_need():
    needs = requirements_from_config({**config_of("gemma-3-1b"), "attn_logit_softcapping": 50.0})
    assert {x.logit_cap for x in needs.layers} == {None}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_attention_heads": "32"}, "num_attention_heads = '32' .expected a positive integer"),
        ({"num_attention_heads": [8, 16]}, r"num_attention_heads = \[8, 16\]"),
        ({"num_key_value_heads": True}, "num_key_value_heads = True"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
        ({"hidden_size": 4100}, "4100 is no multiple of 32 heads"),
        ({"attn_logit_softcapping": -1}, "attn_logit_softcapping = -1 .expected a positive number"),
    ],
)
def test_malformed_values_are_named(change, text):
    with pytest.raises(ModelConfigError, match=text):
        requirements_from_config({**config_of("llama-3.1-8b"), **change})


JUNK = (None, "x", "", -1, 0, 1.5, True, [], ["x"], [None], {}, {"a": 1}, 10**400, float("nan"))


@pytest.mark.parametrize("name", MODELS)
def test_any_value_of_any_key_gives_requirements_or_a_clear_error(name):
    config = config_of(name)
    parts = [(), *((key,) for key, value in config.items() if isinstance(value, dict))]
    for path in parts:
        for key in config if not path else config[path[0]]:
            for junk in JUNK:
                broken = json.loads(json.dumps(config))
                (broken[path[0]] if path else broken)[key] = junk
                with contextlib.suppress(ModelConfigError):
                    assert requirements_from_config(broken).layers


# --- reading


def test_read_config_takes_a_directory_or_a_file_and_runs_nothing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("deepseek-v3")))
    (tmp_path / "configuration_deepseek.py").write_text("raise SystemExit('was run')")
    assert read_config(tmp_path) == read_config(tmp_path / "config.json")
    assert "never run" in said(requirements_from_config(read_config(str(tmp_path))))


def test_errors_of_reading_say_what_is_there_and_what_to_do(tmp_path):
    with pytest.raises(ModelConfigError, match=r"no such file .*local files only"):
        read_config("meta-llama/Llama-3.1-8B")
    with pytest.raises(ModelConfigError, match=r"no config\.json in .* \(it holds nothing\)"):
        read_config(tmp_path)
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ModelConfigError, match=r"params\.json is another format"):
        read_config(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelConfigError, match=r"give one of its GGUF files: model\.gguf"):
        read_config(tmp_path)
    for content, text in [
        (b'{"a": ', "no JSON"),
        (b"[1]", "JSON list"),
        (b"\xff\xfe\x00", "is no text"),
    ]:
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelConfigError, match=text):
            read_config(tmp_path)


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, "/dev/zero"):
        with pytest.raises(ModelConfigError, match="is no regular file"):
            read_config(path)
    pipe.unlink()
    with pipe.open("wb") as file:
        file.truncate(10**12)  # a hole: it takes no room
    with pytest.raises(ModelConfigError, match="longer than 16 MiB"):
        read_config(tmp_path)
    pipe.unlink()
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62))
    with (tmp_path / "m.gguf").open("r+b") as file:
        file.truncate(10**12)
    with pytest.raises(ModelConfigError, match="broken GGUF file"):
        read_config(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "path", ["/tmp/" + "a" * 5000, "/tmp/" + "a/" * 5000, "a\0b", "loop", "loop/config.json"]
)
def test_a_path_that_cannot_be_looked_at_is_refused_in_a_sentence(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("loop").symlink_to("loop")
    with pytest.raises(ModelConfigError, match=r"cannot read .*; give the directory") as error:
        read_config(path)
    assert len(str(error.value)) < 500


def test_a_directory_that_may_not_be_entered_is_refused_in_a_sentence(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(pathlib.Path, "iterdir", refuse)  # a superuser may enter any
    with pytest.raises(ModelConfigError, match=r"cannot read .*: Permission denied"):
        read_config(tmp_path)
    monkeypatch.setattr(pathlib.Path, "stat", refuse)
    with pytest.raises(ModelConfigError, match=r"cannot read .*: Permission denied"):
        read_config(tmp_path / "config.json")


def gguf(entries, version=3):
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    def item(value):
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        if isinstance(value, list):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        if isinstance(value, float):
            return struct.pack("<If", 6, value)
        return struct.pack("<II", 4, value)

    head = b"GGUF" + struct.pack("<IQQ", version, 0, len(entries))
    return head + b"".join(text(key) + item(value) for key, value in entries.items())


GEMMA2_GGUF = {
    "general.architecture": "gemma2",
    "general.tags": ["a", "b"],
    "gemma2.attention.head_count": 16,
    "gemma2.attention.head_count_kv": 8,
    "gemma2.attention.key_length": 256,
    "gemma2.attention.sliding_window": 4096,
    "gemma2.attn_logit_softcapping": 50.0,
    "gemma2.context_length": 8192,
    "gemma2.embedding_length": 3584,
    "gemma2.block_count": 42,
}


def test_a_gguf_header_gives_the_same_layers_as_config_json(tmp_path):
    path = tmp_path / "g.gguf"
    path.write_bytes(gguf(GEMMA2_GGUF))
    assert requirements_from_config(read_config(path)).layers == tuple(MODELS["gemma-2-9b"][0])
    assert context_length(read_config(path)) == 8192


def test_a_gguf_header_without_kv_heads_has_one_for_each_query_head(tmp_path):
    """The format says so; the class of a config.json has another default."""
    path, key = tmp_path / "g.gguf", "gemma2.attention.head_count_kv"
    path.write_bytes(gguf({k: v for k, v in GEMMA2_GGUF.items() if k != key}))
    assert {x.num_kv_heads for x in requirements_from_config(read_config(path)).layers} == {16}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"nothing", "does not begin with GGUF"),
        (gguf(GEMMA2_GGUF)[:-3], "broken GGUF file"),
        (gguf(GEMMA2_GGUF, version=1), "GGUF version 1"),
        (
            gguf({"general.architecture": "rwkv7"}),
            "architecture rwkv7 .*give the model's config.json",
        ),
    ],
)
def test_a_gguf_file_that_cannot_be_read(tmp_path, content, text):
    path = tmp_path / "g.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelConfigError, match=text):
        read_config(path)


def test_reading_a_config_imports_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom attn_core.model_config import read_config, requirements_from_config\n"
        f"requirements_from_config(read_config({str(CONFIGS / 'gemma-3-4b.json')!r}))\n"
        "bad = {'torch', 'transformers', 'numpy'} & set(sys.modules)\nassert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the config classes of transformers

_TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
_GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"],
}
_MLA = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24}
_MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_WINDOWED = mha(4, 2, 32, sliding_window=8)
TINY = {
    "LlamaConfig": ({}, [mha(4, 2, 32)]),
    "MistralConfig": ({"sliding_window": 8}, [_WINDOWED]),
    "Qwen3Config": ({}, [mha(4, 2, 32)]),
    "Gemma2Config": (
        {"sliding_window": 8, "attn_logit_softcapping": 5.0},
        [replace(_WINDOWED, logit_cap=5.0), mha(4, 2, 32, logit_cap=5.0)],
    ),
    "Gemma3TextConfig": (_MIXED, [_WINDOWED, mha(4, 2, 32)]),
    "GptOssConfig": (_MIXED, [replace(_WINDOWED, sinks=True), mha(4, 2, 32, sinks=True)]),
    "DeepseekV3Config": (_MLA, [mla(4, latent=32, rope=16)]),
    "DeepseekV32Config": (
        {**_MLA, "index_n_heads": 8, "index_head_dim": 32, "index_topk": 6},
        [dsa(4, latent=32, rope=16, topk=6, heads=8, dim=32)],
    ),
    "GlmMoeDsaConfig": (
        {**_MLA, "index_topk_freq": 2, "index_skip_topk_offset": 1},
        [dsa(4, latent=32, rope=16, heads=32), sharing(dsa(4, latent=32, rope=16, heads=32))],
    ),
    "Qwen3NextConfig": (_GDN, [linear("gdn", 2, 4, 16, 24), mha(4, 2, 32)]),
    "Qwen3_5TextConfig": (_GDN, [linear("gdn", 2, 4, 16, 24), mha(4, 2, 32)]),
    "KimiLinearConfig": (
        {
            **_MLA,
            "linear_num_heads": 2,
            "linear_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
        [linear("kda", 2, 2, 16, 16), mla(4, latent=32, rope=16)],
    ),
}


@pytest.mark.parametrize("name", TINY)
def test_the_keys_that_transformers_writes_are_understood(name):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    keys, layers = TINY[name]
    config = getattr(transformers, name)(**{**_TINY, **keys}).to_dict()
    needs = requirements_from_config(config)
    assert needs.layers == tuple(layers)
    assert needs.vision is None
    assert context_length(config) == 512
    assert "not an architecture" not in said(needs)


def test_the_vision_language_keys_that_transformers_writes_are_understood():
    transformers = pytest.importorskip("transformers")
    text = {key: value for key, value in _TINY.items() if key != "head_dim"}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config={"embed_dim": 64, "hidden_size": 96, "num_heads": 4}
    ).to_dict()
    needs = requirements_from_config(config)
    assert (needs.layers, needs.vision) == ((mha(4, 2, 16),), tower(4, 16))


DEFAULTED = [
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    "llama4_text",
    "gpt_bigcode",
    "deepseek_v32",
    "glm_moe_dsa",
]


@pytest.mark.parametrize("name", DEFAULTED)
def test_the_defaults_of_a_family_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    from attn_core.model_config.families import FAMILIES

    config = transformers.AutoConfig.for_model(name).to_dict()
    for key, value in FAMILIES[name].defaults.items():
        assert config[key] == value, key


@pytest.mark.parametrize("key", ["kv_lora_rank", "num_key_value_heads", "head_dim", "v_head_dim"])
def test_a_key_that_is_left_out_is_what_the_class_takes_for_it(key):
    """Of every known family; heads and width are not those of its class."""
    transformers = pytest.importorskip("transformers")
    from attn_core.model_config.families import FAMILIES

    sizes = {"num_attention_heads": 16, "hidden_size": 1280}
    sizes |= {"num_key_value_heads": 4} if key != "num_key_value_heads" else {}
    compared = set()
    for name in FAMILIES.keys() & transformers.CONFIG_MAPPING.keys():
        try:
            config = transformers.AutoConfig.for_model(name, **sizes).to_dict()
        except Exception:  # some classes check that sizes belong together
            continue
        if "text_config" in config or config.get(key) is None:
            continue
        try:
            whole = requirements_from_config(config).layers
        except ModelConfigError:  # 16 heads do not fit the KV heads of the class
            continue
        without = {k: v for k, v in config.items() if k != key}
        assert requirements_from_config(without).layers == whole, name
        compared.add(name)
    assert len(compared) > 5


FULL, SHARED = "full", "shared"
GLM_52 = [FULL if i < 2 or i % 4 == 2 else SHARED for i in range(78)]


@pytest.mark.parametrize(
    "keys",
    [
        {"indexer_types": GLM_52},
        {"indexer_types": None, "index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS"},
        {"index_topk_pattern": GLM_52, "index_topk_freq": 1},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 2},
        {"index_topk_freq": 2, "num_hidden_layers": None},
    ],
)
def test_layers_may_share_the_selection_of_a_layer_before_them(keys):
    full = dsa(64, heads=32)
    needs = requirements_from_config({**read_config(CONFIGS / "glm-5.json"), **keys})
    assert needs.layers == (full, sharing(full))
    assert not needs.assumptions


@pytest.mark.parametrize(
    "keys",
    [
        {"index_topk_freq": 1},
        {"index_topk_freq": 4, "num_hidden_layers": 2},  # layers 0 and 1 come before the schedule
        {"index_topk_freq": 4, "index_skip_topk_offset": 79},
        {"indexer_types": [FULL] * 78 + [SHARED]},  # the last is no layer of the decoder
        {"indexer_types": []},
    ],
)
def test_layers_that_all_have_an_indexer(keys):
    needs = requirements_from_config({**read_config(CONFIGS / "glm-5.json"), **keys})
    assert needs.layers == (dsa(64, heads=32),)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"indexer_types": [FULL, "none"]}, "has indexers of layers .*none.* .expected"),
        ({"indexer_types": 4}, 'has indexers of layers 4 .*"full" and "shared"'),
        ({"index_topk_pattern": "FXS"}, "has indexers of layers 'FXS'"),
        ({"indexer_types": [SHARED, FULL]}, "lets its first layer share"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "lets its first layer share"),
        ({"index_topk_freq": 10**6}, "index_topk_freq = 1000000 .*at most 10000"),
        ({"index_topk": -1}, "index_topk = -1 .*positive integer"),
        ({"index_n_heads": "many"}, "index_n_heads = 'many'"),
    ],
)
def test_a_malformed_indexer_is_an_error(keys, message):
    with pytest.raises(ModelConfigError, match=message):
        requirements_from_config({**read_config(CONFIGS / "glm-5.json"), **keys})


def test_keys_that_are_always_selected_are_said():
    config = {**read_config(CONFIGS / "glm-5.json"), "index_init_tokens": 4}
    assert "index_init_tokens: the model always selects" in said(requirements_from_config(config))
    config["index_init_tokens"] = 0
    assert "index_init_tokens" not in said(requirements_from_config(config))


def test_an_indexer_is_of_sparse_layers_that_do_not_share():
    with pytest.raises(UsageError, match=r"kind mla with index_topk .expected kind dsa"):
        mla(4, index_topk=2048)
    with pytest.raises(UsageError, match=r"kind dsa with index_heads .expected none with shares"):
        mla(4, kind="dsa", index_topk=2048, index_heads=4, shares_topk=True)
    with pytest.raises(UsageError, match=r"index_topk 0 .expected an integer of 1 or more"):
        mla(4, kind="dsa", index_topk=0)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("gpt-oss-20b", {128: 12, None: 12}),
        ("gemma-2-9b", {4096: 21, None: 21}),
        ("gemma-3-1b", {512: 22, None: 4}),  # every sixth of 26 is full
        ("llama-3.1-8b", {None: 32}),
        ("deepseek-v3", {None: 61}),
    ],
)
def test_how_many_layers_a_group_has_weighs_costs(name, numbers):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    layers = requirements_from_config(config).layers
    assert {x.sliding_window: x.num_layers for x in layers} == numbers
    assert layers == tuple(replace(x, num_layers=None) for x in layers)  # the same needs
    fewer = {k: v for k, v in config.items() if k not in ("num_hidden_layers", "layer_types")}
    for x in requirements_from_config(fewer).layers:
        assert x.num_layers is None


def test_a_number_of_layers_is_checked():
    with pytest.raises(UsageError, match="num_layers 0"):
        LayerRequirements(num_layers=0)
