"""The words of the contract: kinds of attention, families, phases, levels of CUDA graphs."""

from __future__ import annotations

import enum
from typing import Literal

Kind = Literal["mha", "mla", "dsa", "gdn", "kda"]
Family = Literal["softmax", "linear"]
GraphLevel = Literal["none", "decode", "full"]
VerifyMode = Literal["prefill", "decode"]
LINEAR_KINDS: frozenset[str] = frozenset({"gdn", "kda"})


class Phase(enum.Enum):
    """A half of serving, or ENCODE: attention that has no cache (the vision tower of a model)."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


SERVING: frozenset[Phase] = frozenset({Phase.PREFILL, Phase.DECODE})
