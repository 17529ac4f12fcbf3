"""What is timed inside an engine: models by their shapes, cases, and the speed-ups to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OURS = "attn_core"
NEW_TOKENS = 145  # of the longer of two runs whose difference is a number of steps
MARGIN = 64  # tokens of the context for drafts that are not accepted


@dataclass(frozen=True, kw_only=True)
class Case:
    """Requests of equal length, and how much faster than the best built-in backend to be.

    kind: "decode" (a whole step of the engine) or "prefill".
    must, aim: best built-in time / our time.
    """

    kind: str
    batch: int
    length: int
    must: float
    aim: float

    @property
    def name(self) -> str:
        """As in "decode 16x4096": requests x tokens of each."""
        return f"{self.kind} {self.batch}x{self.length}"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One engine: a model with its cache and speculation, and all cases that are timed in it.

    model, draft_model: config.json; weights are random.
    peers: the engine's own backends, in the order in which they are timed. The last is timed once.
    arguments: further arguments of the engine.
    """

    title: str
    model: Mapping[str, Any]
    cases: tuple[Case, ...]
    draft_model: Mapping[str, Any] | None = None
    peers: tuple[str, ...] = ("fa3", "flashinfer", "triton")
    arguments: Mapping[str, Any]

    @property
    def is_speculative(self) -> bool:
        """Whether a step verifies drafts."""
        return "speculative_algorithm" in self.arguments

    def engine_arguments(self, backend: str) -> dict[str, Any]:
        """Return the engine's arguments but for the paths of its models.

        One graph is captured for each batch size of the cases, and nothing that no case replays.
        """
        batches = sorted({case.batch for case in self.cases})
        return {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "attention_backend": backend,
            "page_size": 1,
            "context_length": max(case.length for case in self.cases) + NEW_TOKENS + MARGIN,
            "max_running_requests": batches[-1],
            "cuda_graph_bs_decode": batches,
            "disable_prefill_cuda_graph": True,
            "mem_fraction_static": 0.8,
            "random_seed": 1,
            "sampling_backend": "pytorch",  # greedy; the other compiles kernels first
            "decode_log_interval": 10000,
            "log_level": "info",  # attn_core's decision
            **self.arguments,
        }


LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EAGLE_DRAFT: Mapping[str, Any] = {
    **LLAMA_8B,
    "architectures": ["LlamaForCausalLMEagle"],
    "num_hidden_layers": 1,
}
DEEPSEEK_V2_LITE: Mapping[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "attention_bias": False,
    "max_position_embeddings": 163840,
    "vocab_size": 102400,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT_OSS_20B: Mapping[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "initial_context_length": 4096,
    "vocab_size": 201088,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_TREES = {
    "speculative_num_draft_tokens": 8,
    "speculative_attention_mode": "decode",
}
CONFIGURATIONS: Mapping[str, Configuration] = {
    "bf16": Configuration(
        title="Llama-3.1-8B shape, bf16",
        model=LLAMA_8B,
        arguments={},
        cases=(
            Case(kind="decode", batch=1, length=1024, must=0.98, aim=1.03),
            Case(kind="decode", batch=1, length=32768, must=0.98, aim=1.03),
            Case(kind="decode", batch=16, length=4096, must=0.98, aim=1.03),
            Case(kind="decode", batch=64, length=4096, must=0.98, aim=1.03),
            Case(kind="prefill", batch=64, length=512, must=0.98, aim=1.05),
            Case(kind="prefill", batch=1, length=32768, must=0.98, aim=1.05),
        ),
    ),
    "fp8": Configuration(
        title="Llama-3.1-8B shape, FP8 KV cache",
        model=LLAMA_8B,
        arguments={"kv_cache_dtype": "fp8_e4m3"},
        cases=(Case(kind="decode", batch=64, length=4096, must=1.28, aim=1.35),),
    ),
    "eagle": Configuration(
        title="Llama-3.1-8B shape, EAGLE trees of 8 drafts, topk 4",
        model=LLAMA_8B,
        draft_model=EAGLE_DRAFT,
        arguments={
            **_TREES,
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 4,  # the draft model runs on the same backend
        },
        cases=(
            Case(kind="decode", batch=16, length=4096, must=1.05, aim=1.15),
            Case(kind="decode", batch=64, length=2048, must=1.11, aim=1.25),
            Case(kind="decode", batch=1, length=4096, must=1.10, aim=1.20),
        ),
    ),
    "ngram": Configuration(
        title="Llama-3.1-8B shape, n-gram trees of 8 drafts, breadth 4",
        model=LLAMA_8B,
        arguments={
            **_TREES,
            "speculative_algorithm": "NGRAM",
            "speculative_ngram_max_bfs_breadth": 4,
        },
        cases=(
            Case(kind="decode", batch=16, length=4096, must=1.10, aim=1.30),
            Case(kind="decode", batch=64, length=2048, must=1.10, aim=1.30),
            Case(kind="decode", batch=1, length=4096, must=1.10, aim=1.30),
        ),
    ),
    "mla": Configuration(
        title="DeepSeek-V2-Lite shape, MLA with 16 heads, pages of 64",
        model=DEEPSEEK_V2_LITE,
        peers=("fa3", "flashinfer", "flashmla", "triton"),
        arguments={"page_size": 64, "moe_runner_backend": "triton"},
        cases=(
            Case(kind="decode", batch=1, length=4096, must=0.98, aim=1.05),
            Case(kind="decode", batch=64, length=4096, must=0.98, aim=1.05),
        ),
    ),
    "gpt-oss": Configuration(
        title="gpt-oss-20b shape, bf16 weights, sinks and windows",
        model=GPT_OSS_20B,
        arguments={"moe_runner_backend": "triton"},
        cases=(Case(kind="decode", batch=16, length=4096, must=0.98, aim=1.05),),
    ),
}
