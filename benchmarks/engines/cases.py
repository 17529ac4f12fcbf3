"""A case, and a configuration: one engine with a model, and all cases that are timed in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

OURS = "attn_core"
ALONE = "+alone"  # behind OURS: without ATTN_SHARED_PREFIX, where the configuration asks for it
FIXED = "+fixed"  # behind OURS: one backend for every pass of a role, ATTN_ADAPTIVE=0
NEW_TOKENS = 145  # of the longer of two runs whose difference is a number of steps


def gpus_of(arguments: Mapping[str, Any]) -> int:
    """Return over how many GPUs an engine with these arguments splits its model."""
    sizes = ("tp_size", "pp_size", "tensor_parallel_size")
    return math.prod(arguments.get(name, 1) for name in sizes)


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
    def gpus(self) -> int:
        """Over how many GPUs the model is split."""
        return gpus_of(self.arguments)

    @property
    def batches(self) -> list[int]:
        """Requests of each rank, in the cases: data parallel ranks and stages share them."""
        shares = math.prod(self.arguments.get(name, 1) for name in ("dp_size", "pp_size"))
        return sorted({-(-case.batch // shares) for case in self.cases})

    @property
    def is_speculative(self) -> bool:
        """Whether a step verifies drafts."""
        return "speculative_algorithm" in self.arguments
