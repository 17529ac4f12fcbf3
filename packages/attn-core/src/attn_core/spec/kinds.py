"""The terms of the contract: kinds of attention, families, phases, roles, CUDA graph levels."""

from __future__ import annotations

import enum
from typing import Literal

Kind = Literal["mha", "mla", "dsa", "gdn", "kda"]
Family = Literal["softmax", "linear"]
# The passes that a row runs in captured CUDA graphs: none, those of one token per request, those
# in which every request has as many queries, all.
GraphLevel = Literal["never", "decode", "uniform", "always"]
VerifyMode = Literal["prefill", "decode"]
# What a chosen backend is for: serving, the vision tower, linear-attention layers.
Role = Literal[
    "prefill",
    "decode",
    "verify",
    "draft",
    "encode",
    "linear_prefill",
    "linear_decode",
    "linear_verify",
]
LATENT_KINDS: frozenset[str] = frozenset({"mla", "dsa"})
LINEAR_KINDS: frozenset[str] = frozenset({"gdn", "kda"})


class Phase(enum.Enum):
    """A phase of serving; ENCODE is attention without a cache (vision towers)."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


SERVING: frozenset[Phase] = frozenset({Phase.PREFILL, Phase.DECODE})
