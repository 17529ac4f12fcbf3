"""Defaults, patterns and sinks of model families that their configs do not state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["full", "window", "chunk", "linear", "cross", "none"]

# Every spelling of a layer's role; "none" carries no attention.
LAYER_ROLES: Mapping[str, Role] = {
    "full_attention": "full",
    "attention": "full",
    "attn": "full",
    "global_attention": "full",
    "deepseek_sparse_attention": "full",  # sparse by its index keys
    "indexed_attention": "full",  # the same in transformers 5.23
    "sliding_attention": "window",
    "local_attention": "window",
    "swa": "window",
    "chunked_attention": "chunk",
    "linear_attention": "linear",
    "jet": "linear",
    "mamba": "none",
    "mamba2": "none",
    "conv": "none",
    "recurrent": "none",
    "mlp": "none",
    "moe": "none",
}


# Lists that write the roles of layers as numbers.
CODED_ROLES: Mapping[str, Mapping[int, Role]] = {
    "attn_type_list": {0: "linear", 1: "full"},  # MiniMax; linear is lightning attention
    "hybrid_layer_pattern": {0: "full", 1: "window"},  # MiMo-V2
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is the same for every model of a family.

    windowed: without a list of layer types, sliding_window holds for every layer. period: without
    one, every period-th layer is full attention and the others are `inner`; period_key overrides.
    role: of every layer where nothing of this says another.
    encoder: bidirectional, no cache. defaults: what a config of the family may leave out.
    """

    windowed: bool = False
    period: int = 0
    period_key: str = ""
    inner: Role = "window"
    role: Role = "full"
    sinks: bool = False
    encoder: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict, hash=False)


_LLAMA = {"hidden_size": 4096, "num_attention_heads": 32}
_GEMMA = {"hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_INDEXER = {**_LATENT, "index_topk": 2048, "index_head_dim": 128}


def _qwen(kv_heads: int) -> Family:
    """Return a family of Qwen with linear layers: every fourth layer is full attention."""
    return Family(
        period=4,
        period_key="full_attention_interval",
        inner="linear",
        defaults={"num_key_value_heads": kv_heads, "head_dim": 256},
    )


# Names are values of model_type, of the whole config or of its text_config.
_ROWS: tuple[tuple[str, Family], ...] = (
    ("llama llava llava_next", Family(defaults=_LLAMA)),
    (
        "mistral",
        Family(
            windowed=True,
            defaults={**_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096},
        ),
    ),
    ("phi3", Family(windowed=True)),
    ("mixtral phimoe", Family(windowed=True, defaults={"num_key_value_heads": 8})),
    ("starcoder2", Family(windowed=True, defaults={"num_key_value_heads": 2})),
    ("qwen2 qwen2_moe", Family(windowed=True, defaults={"use_sliding_window": False})),
    ("qwen3", Family(windowed=True, defaults={"use_sliding_window": False, "head_dim": 128})),
    (
        "qwen3_moe",
        Family(windowed=True, defaults={"use_sliding_window": False, "num_key_value_heads": 4}),
    ),
    (
        "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text",
        Family(windowed=True, defaults={"use_sliding_window": False, "num_key_value_heads": 8}),
    ),
    ("qwen3_vl qwen3_vl_text", Family(defaults={"head_dim": 128})),
    ("qwen3_vl_moe qwen3_vl_moe_text", Family()),
    ("gemma", Family(defaults={"head_dim": 256})),
    (
        "gemma2",
        Family(
            period=2, defaults={**_GEMMA, "sliding_window": 4096, "attn_logit_softcapping": 50.0}
        ),
    ),
    (
        "gemma3 gemma3_text",
        Family(
            period=6,
            period_key="sliding_window_pattern",
            defaults={**_GEMMA, "sliding_window": 4096, "max_position_embeddings": 131072},
        ),
    ),
    (
        "gpt_oss",
        Family(
            period=2,
            sinks=True,
            defaults={"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
        ),
    ),
    ("cohere2", Family(period=4, period_key="sliding_window_pattern")),
    ("exaone4 olmo3", Family(period=4)),
    (
        "llama4 llama4_text",
        Family(
            period=4,
            period_key="no_rope_layer_interval",
            inner="chunk",
            defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192},
        ),
    ),
    ("qwen3_next qwen3_5_moe qwen3_5_moe_text", _qwen(kv_heads=2)),
    ("qwen3_5 qwen3_5_text", _qwen(kv_heads=4)),
    ("jet_nemotron jet_vlm olmo_hybrid chatglm", Family()),
    ("minimax minimax_text_01 minimax_m1", Family(defaults={"num_key_value_heads": 8})),
    ("minimax_m2", Family(defaults={"num_key_value_heads": 8, "head_dim": 128})),
    (
        "mimo_v2_flash mimo_v2",
        Family(
            defaults={
                "num_key_value_heads": 4,
                "head_dim": 192,
                "v_head_dim": 128,
                "add_swa_attention_sink_bias": True,
            }
        ),
    ),
    ("deepseek_v2 deepseek_v3 kimi_k2 kimi_linear glm4_moe_lite", Family(defaults=_LATENT)),
    ("minicpm3", Family(defaults={"kv_lora_rank": 256, "qk_rope_head_dim": 32})),
    ("glm4", Family(defaults={"num_key_value_heads": 2, "head_dim": 128})),
    ("smollm3", Family(defaults={"num_key_value_heads": 4})),
    ("mllama mllama_text_model", Family(defaults={"num_key_value_heads": 8})),
    (
        "mistral3 pixtral cohere olmo olmo2 granite granitemoe stablelm phi gpt2 "
        "gptj gpt_neox opt bloom mpt nemotron "
        "bart mbart whisper marian pegasus m2m_100",
        Family(),
    ),
    ("deepseek_v32", Family(defaults={**_INDEXER, "index_n_heads": 64})),
    ("glm_moe_dsa", Family(defaults={**_INDEXER, "index_n_heads": 32})),
    ("falcon gpt_bigcode", Family(defaults={"multi_query": True})),
    ("mamba mamba2 falcon_mamba rwkv xlstm", Family(role="none")),
    (  # T5 stands here too: without its decoder it is an encoder
        "bert roberta xlm-roberta camembert electra albert distilbert mpnet modernbert t5 mt5 umt5",
        Family(encoder=True),
    ),
)
FAMILIES: Mapping[str, Family] = {name: f for names, f in _ROWS for name in names.split()}
UNKNOWN = Family(windowed=True)

# Vision towers by the model_type of vision_config: what it may leave out.
VISION_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "clip_vision_model": {"vision_width": 768, "vision_heads": 12},
    "siglip_vision_model": {"vision_width": 768, "vision_heads": 12},
    "pixtral": {"vision_width": 1024, "vision_heads": 16},
    "qwen2_vl": {"vision_width": 1280, "vision_heads": 16},
    "qwen2_5_vl": {"vision_heads": 16},
    "qwen3_vl": {"vision_width": 1152, "vision_heads": 16},
}

ALIBI = (
    "ALiBi adds a bias to the scores, and no backend does that: the choice holds for the shapes "
    "alone, what a backend computes is not this model's attention"
)
# A key that changes the attention and that no backend knows, or that is not followed → a sentence.
NOT_APPLIED: Mapping[str, str] = {
    "auto_map": "auto_map names code beside the weights: it is never run, only keys are read",
    "relative_attention_num_buckets": (
        "a relative position bias is added to the scores, which no backend does: the choice holds "
        "for the shapes, the model must add the bias"
    ),
    "alibi": ALIBI,
    "use_alibi": ALIBI,
    "attn_config.alibi": ALIBI,
    "attention_value_scale": "attention_value_scale is left to the model: it scales V",
    "quantization_config.kv_cache_scheme": (
        "kv_cache_scheme in the config is not applied: ask for a KV cache dtype by name"
    ),
    "index_init_tokens": (
        "index_init_tokens: the model always selects its first keys, which no indexer here does; "
        "selections differ from the model's beyond index_topk keys"
    ),
    "index_local_tokens": (
        "index_local_tokens: the model always selects the last keys, which no indexer here does; "
        "selections differ from the model's beyond index_topk keys"
    ),
    "audio_config": "the audio tower is left to the model",
    "hybrid_override_pattern": "Mamba layers carry no attention: they are left to the model",
    "efficient_attention_config.jet": (
        "jet layers are gated delta rule layers (gdn); their convolution, whose weights depend on "
        "the tokens, is left to the model"
    ),
    "local_attention": "local_attention is not applied: local encoder layers are taken as global",
}

# A model_type of the whole config → a sentence, for what no key says.
NOTES: Mapping[str, str] = {
    "bloom": ALIBI,
    "gemma3": "the tokens of one image see each other both ways: the choice is for causal layers",
}

# Names of keys that say something of how tokens attend …
ABOUT_ATTENTION = re.compile(
    "attn|attention|head_dim|head_size|dim_head|d_head|_heads|n_head|_kv|kv_|window|swa|sink|alibi"
    "|sparse|layer_type|layers_block|block_configs|layer_pattern|lora_rank|softcap|query_group|group_num"
    "|relative|position_bias|hybrid"
)
# … and those that the model applies on its own, or that are of another module.
OF_THE_MODEL = re.compile(
    "drop|prob|norm|fp32|impl|theta|rope|rotary|lm_head|classifi|mlp|moe|expert|ffn|feed_forward"
    "|sinkhorn|mamba|vision|image|video|audio|loss|quant|conv|alpha|beta|multiplier|scal|temperature"
    "|final_logit|sparse_step|sparsity|mtp|nextn|prune|bias_max|hash|ngram|max_window_layers|shared_layers"
    "|^q_lora|^o_lora|^qk_nope|^qk_head|^index_head_dim|^index_n_heads|^parallel_attn"
    "|^add_cross_attention|^(use_)?(attention|attn|qkv|q|k|v|o|out)(_proj)?_bias$"
)
# … and other spellings of a list of layer types, which goes before them.
OF_THE_ORDER = re.compile(
    "pattern|period|offset|interval|every_n|idxs|_layers$|_ids|sliding_window$"
)
# Values of such keys that stand for plain attention.
PLAIN = (None, False, 0, "", "full", "mha", "multihead_attention", "default", "eager", "sdpa")
