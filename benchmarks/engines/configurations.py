"""What is timed inside an engine: models by their shapes, cases, and the speed-ups to reach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from benchmarks.engines.models import (
    DEEPSEEK_V2_LITE,
    EAGLE_DRAFT,
    GPT_OSS_20B,
    LLAMA_8B,
    LLAMA_TINY,
    QWEN3_NEXT,
)

OURS = "attn_core"
ALONE = "+alone"  # behind OURS: without ATTN_SHARED_PREFIX, where the configuration asks for it
FIXED = "+fixed"  # behind OURS: one backend for every pass of a role, ATTN_ADAPTIVE=0
NEW_TOKENS = 145  # of the longer of two runs whose difference is a number of steps


@dataclass(frozen=True, kw_only=True)
class Case:
    """Requests, and how much faster than the best built-in backend to be.

    kind: "decode" (a whole step of the engine) or "prefill".
    must, aim: best built-in time / our time.
    shared: (members, tokens): so many requests, one after another, begin with the same tokens.
    sigma: of the lengths' logarithm. 0: all prompts have `length` tokens, else it is their median.
    """

    kind: str
    batch: int
    length: int
    must: float
    aim: float
    shared: tuple[int, int] = (1, 0)
    sigma: float = 0.0

    @property
    def name(self) -> str:
        """As in "decode 16x4096 shared 8x2048": requests x tokens of each, what members share."""
        members, tokens = self.shared
        shared = f" shared {members}x{tokens}" if tokens else ""
        drawn = f" sigma {self.sigma:g}" if self.sigma else ""
        return f"{self.kind} {self.batch}x{self.length}{shared}{drawn}"

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt, short to long: the quantiles of a log-normal distribution."""
        z = (NormalDist().inv_cdf((i + 0.5) / self.batch) for i in range(self.batch))
        return [round(self.length * math.exp(self.sigma * x)) for x in z]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One engine: a model with its cache and speculation, and all cases that are timed in it.

    engine: "sglang" or "vllm".
    model, draft_model: config.json; weights are random.
    peers: the engine's own backends, in the order in which they are timed. The last is timed once.
    arguments: further arguments of the engine.
    shared_prefix: ours reads once what requests share; the name "attn_core+alone" is ours without.
    """

    title: str
    engine: str = "sglang"
    model: Mapping[str, Any]
    cases: tuple[Case, ...]
    draft_model: Mapping[str, Any] | None = None
    peers: tuple[str, ...] = ("fa3", "flashinfer", "triton")
    arguments: Mapping[str, Any]
    shared_prefix: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(max(case.lengths) for case in self.cases)

    @property
    def is_speculative(self) -> bool:
        """Whether a step verifies drafts."""
        return "speculative_algorithm" in self.arguments


_TREES = {
    "speculative_num_draft_tokens": 8,
    "speculative_attention_mode": "decode",
}
_EAGLE = {
    **_TREES,
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,  # the draft model runs on the same backend
}
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
        arguments=_EAGLE,
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
        arguments=_EAGLE,
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
            **_TREES,
            "moe_runner_backend": "triton",
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 4,
        },
        cases=_DRAFTED,
    ),
    "vllm-bf16": Configuration(
        title="Llama-3.1-8B shape, bf16",
        engine="vllm",
        model=LLAMA_8B,
        peers=("FLASH_ATTN", "FLASHINFER"),
        arguments={},
        cases=(
            *(Case(kind="decode", batch=b, length=n, must=0.98, aim=1.03) for b, n in _SIZES),
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
        cases=tuple(Case(kind="decode", batch=b, length=n, must=1.0, aim=1.2) for b, n in _SIZES),
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
