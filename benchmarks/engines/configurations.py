"""What is timed inside an engine: models by their shapes, cases, and the speed-ups to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.engines.cases import ALONE, FIXED, NEW_TOKENS, OURS, Case, Configuration
from benchmarks.engines.many_gpus import EAGLE, MANY_GPUS, TREES
from benchmarks.engines.models import (
    DEEPSEEK_V2_LITE,
    EAGLE_DRAFT,
    GPT_OSS_20B,
    LLAMA_8B,
    LLAMA_TINY,
    QWEN3_NEXT,
)

__all__ = [
    "ALONE",
    "CONFIGURATIONS",
    "FIXED",
    "NEW_TOKENS",
    "OURS",
    "Case",
    "Configuration",
    "named",
]

_DRAFTED = (  # 32 tokens behind the last state that a prefix cache keeps
    Case(kind="decode", batch=16, length=4128, must=1.05, aim=1.30),
    Case(kind="decode", batch=64, length=2080, must=1.05, aim=1.30),
    Case(kind="decode", batch=1, length=4128, must=1.00, aim=1.15),
)
_SHARED = (
    # one system prompt and 512 tokens of each request
    Case(kind="decode", batch=64, length=8704, shared=(64, 8192), must=2.0, aim=3.0),
    # 8 samples of each of 8 prompts
    Case(kind="decode", batch=64, length=8192, shared=(8, 8192), must=2.0, aim=3.0),
    Case(kind="decode", batch=64, length=8704, must=0.98, aim=1.03),
)
_LOGNORMAL = tuple(
    Case(kind="decode", batch=batch, length=1000, sigma=1.0, must=0.98, aim=1.05)
    for batch in (1, 16, 64)
)
_SIZES = tuple((batch, length) for length in (1024, 8192) for batch in (1, 16, 64))
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
    "shared-prefix": Configuration(
        title="Llama-3.1-8B shape, bf16, prompts that begin alike",
        model=LLAMA_8B,
        peers=("fa3", "flashinfer", OURS + ALONE, "triton"),
        arguments={},
        shared_prefix=True,
        cases=_SHARED,
    ),
    "eagle": Configuration(
        title="Llama-3.1-8B shape, EAGLE trees of 8 drafts, topk 4",
        model=LLAMA_8B,
        draft_model=EAGLE_DRAFT,
        arguments=EAGLE,
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
            **TREES,
            "speculative_algorithm": "NGRAM",
            "speculative_ngram_max_bfs_breadth": 4,
        },
        cases=(
            Case(kind="decode", batch=16, length=4096, must=1.10, aim=1.30),
            Case(kind="decode", batch=64, length=2048, must=1.10, aim=1.30),
            Case(kind="decode", batch=1, length=4096, must=1.10, aim=1.30),
        ),
    ),
    "lognormal": Configuration(
        title="Llama-3.1-8B shape, bf16, prompts of log-normal lengths",
        model=LLAMA_8B,
        peers=("fa3", "flashinfer"),
        arguments={},
        cases=_LOGNORMAL,
    ),
    "lognormal-fp8": Configuration(
        title="Llama-3.1-8B shape, FP8 KV cache, prompts of log-normal lengths",
        model=LLAMA_8B,
        peers=("fa3", "flashinfer"),
        arguments={"kv_cache_dtype": "fp8_e4m3"},
        cases=_LOGNORMAL[-1:],
    ),
    "lognormal-eagle": Configuration(
        title="Llama-3.1-8B shape, EAGLE trees of 8 drafts, prompts of log-normal lengths",
        model=LLAMA_8B,
        draft_model=EAGLE_DRAFT,
        peers=("fa3", "flashinfer"),
        arguments=EAGLE,
        cases=_LOGNORMAL,
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
    "qwen3-next": Configuration(
        title="Qwen3-Next shape, 8 layers of which 6 are linear (GDN)",
        model=QWEN3_NEXT,
        peers=("fa3",),  # beside SGLang's own kernels of linear layers
        arguments={"moe_runner_backend": "triton"},
        cases=(
            Case(kind="decode", batch=1, length=1056, must=0.98, aim=1.05),
            Case(kind="decode", batch=16, length=4128, must=0.98, aim=1.10),
            Case(kind="decode", batch=64, length=4128, must=0.98, aim=1.10),
            Case(kind="prefill", batch=16, length=1024, must=1.05, aim=1.20),
            Case(kind="prefill", batch=1, length=8192, must=1.05, aim=1.20),
        ),
    ),
    "qwen3-next-chain": Configuration(
        title="Qwen3-Next shape, MTP chains of 4 drafts",
        model=QWEN3_NEXT,
        draft_model=QWEN3_NEXT,  # SGLang takes its layer of multi-token prediction
        peers=("fa3",),
        arguments={
            "moe_runner_backend": "triton",
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
            "speculative_attention_mode": "decode",
        },
        cases=_DRAFTED,
    ),
    "qwen3-next-tree": Configuration(
        title="Qwen3-Next shape, MTP trees of 8 drafts, topk 4",
        model=QWEN3_NEXT,
        draft_model=QWEN3_NEXT,
        peers=("fa3",),
        arguments={
            **TREES,
            "moe_runner_backend": "triton",
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 4,
        },
        cases=_DRAFTED,
    ),
    **MANY_GPUS,
    "vllm-bf16": Configuration(
        title="Llama-3.1-8B shape, bf16",
        engine="vllm",
        model=LLAMA_8B,
        peers=("FLASH_ATTN", "FLASHINFER"),
        arguments={},
        cases=(
            *(Case(kind="decode", batch=b, length=n, must=0.98, aim=1.05) for b, n in _SIZES),
            Case(kind="prefill", batch=16, length=1024, must=0.98, aim=1.05),
            Case(kind="prefill", batch=1, length=8192, must=0.98, aim=1.05),
        ),
    ),
    "vllm-fp8": Configuration(
        title="Llama-3.1-8B shape, FP8 KV cache",
        engine="vllm",
        model=LLAMA_8B,
        peers=("FLASH_ATTN", "FLASHINFER"),
        arguments={"kv_cache_dtype": "fp8"},
        cases=tuple(Case(kind="decode", batch=b, length=n, must=1.1, aim=1.2) for b, n in _SIZES),
    ),
    "vllm-tp2": Configuration(
        title="Llama-3.1-8B shape, bf16, tensor parallel on 2 GPUs",
        engine="vllm",
        model=LLAMA_8B,
        peers=("FLASH_ATTN",),
        arguments={"tensor_parallel_size": 2},
        cases=(
            Case(kind="decode", batch=1, length=1024, must=0.98, aim=1.05),
            Case(kind="decode", batch=16, length=8192, must=0.98, aim=1.05),
        ),
    ),
    "vllm-shared-prefix": Configuration(
        title="Llama-3.1-8B shape, bf16, prompts that begin alike",
        engine="vllm",
        model=LLAMA_8B,
        peers=("FLASH_ATTN", "FLASHINFER", OURS + ALONE),
        arguments={},
        shared_prefix=True,
        cases=_SHARED,
    ),
    "vllm-cpu": Configuration(  # says that the parts fit, and nothing of speed
        title="A tiny Llama on a CPU",
        engine="vllm",
        model=LLAMA_TINY,
        peers=("CPU_ATTN",),
        arguments={"dtype": "float32", "enforce_eager": True},
        cases=(
            Case(kind="decode", batch=2, length=64, must=0.98, aim=1.03),
            Case(kind="prefill", batch=2, length=64, must=0.98, aim=1.03),
        ),
    ),
}


def named(configuration: str, names: Sequence[str]) -> list[Case]:
    """Return the cases of a configuration with these names, all without names."""
    return [c for c in CONFIGURATIONS[configuration].cases if not names or c.name in names]
