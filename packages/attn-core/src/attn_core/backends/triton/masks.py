"""Which keys the queries of a layer see: the MASK of every kernel and its launcher."""

from __future__ import annotations

import triton.language as tl

from attn_core.runtime.batch import SpecInfo

MASK_NONE = tl.constexpr(0)  # every query sees all keys
MASK_CAUSAL = tl.constexpr(1)  # a query sees the keys up to its own
MASK_TREE = tl.constexpr(2)  # a draft sees the prefix and what the tree's mask says of the drafts


def mask_mode(spec: SpecInfo | None, *, causal: bool) -> int:
    """Return the MASK of a pass. spec: the drafts that it verifies."""
    if not causal:
        return int(MASK_NONE.value)
    tree = spec is not None and spec.tree_mask is not None
    return int(MASK_TREE.value if tree else MASK_CAUSAL.value)
